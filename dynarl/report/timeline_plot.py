"""The picture of a timeline: a row per node, coloured by role; remaps as ticks above, iterations as thin lines."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from dynarl.report.palette import CANCELLED_COLOUR, ROLE_COLOURS  # noqa: E402
from dynarl.report.timeline import Timeline  # noqa: E402
from dynarl.report.units import duration  # noqa: E402

WIDTH_IN = 11.0
MAX_NODE_LABELS = 40
# Room that a label of the row of iterations needs, as a share of the width; a digit, and what lies between two labels.
DIGIT_WIDTH, LABEL_GAP = 0.0065, 0.008
MAX_ITERATION_LINES = 250
ROW_IN, MAX_HEIGHT_IN = 0.34, 9.0
# Above the uppermost node.
REMAPS_IN, ITERATIONS_IN, HEAD_IN = 0.14, 0.36, 0.5


def draw(timeline: Timeline, path: Path, form: str, window_s: tuple[float, float] | None = None) -> None:
    """Write the picture to `path`; `form` is "png" or "svg". `window_s`: only this part of the time."""
    window_s = window_s or (0.0, timeline.end_s or 1.0)
    rows = list(timeline.spans)
    row_in = min(ROW_IN, MAX_HEIGHT_IN / max(len(rows), 1))

    def above(inches: float) -> float:
        """Position above the nodes, which are the rows 0, 1, 2 ... downwards."""
        return -0.5 - inches / row_in

    figure = Figure(figsize=(WIDTH_IN, 1.2 + HEAD_IN + row_in * len(rows)), layout="constrained")
    axes = figure.subplots()
    for index, node in enumerate(rows):
        for role, colour in ROLE_COLOURS.items():
            bars = [(s.start_s, s.end_s - s.start_s) for s in timeline.spans[node] if s.role == role]
            axes.broken_barh(bars, (index - 0.43, 0.86), facecolors=colour, linewidth=0)
    for stage in timeline.stages:
        if stage["stage"] == "start":
            # Nodes have their role, but nothing to do yet.
            axes.axvspan(
                stage["start_s"],
                stage["end_s"],
                ymax=1 - HEAD_IN / (HEAD_IN + row_in * len(rows)),
                facecolor="white",
                alpha=0.65,
            )
    _iteration_lines(axes, timeline, len(rows))
    _labels(axes, timeline, window_s, above(ITERATIONS_IN))
    _remaps(axes, timeline, above(REMAPS_IN))
    axes.set_xlim(*window_s)
    axes.set_ylim(len(rows) - 0.5, above(HEAD_IN))
    step = -(-len(rows) // MAX_NODE_LABELS) or 1
    places = [above(ITERATIONS_IN), above(REMAPS_IN), *range(0, len(rows), step)]
    axes.set_yticks(places, ["iteration", "remaps", *rows[::step]])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds since the start of the run")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(_title(timeline), x=0.01, ha="left", fontsize=11)
    _legend(figure, timeline)
    figure.savefig(path, format=form, dpi=150, metadata={"Title": timeline.run} if form == "svg" else None)


def _title(timeline: Timeline) -> str:
    committed = sum(remap.committed for remap in timeline.remaps)
    accuracy = {each["when"]: each["accuracy"] for each in timeline.evaluations}
    learnt = (
        f", accuracy {accuracy['start']:.0%} to {accuracy['end']:.0%}" if accuracy.keys() >= {"start", "end"} else ""
    )
    return (
        f"{timeline.run}: {len(timeline.spans)} nodes, {len(timeline.iterations)} iterations, {committed} remaps, "
        f"{duration(timeline.end_s)}{learnt}"
    )


def _iteration_lines(axes, timeline: Timeline, num_rows: int) -> None:
    """A thin line where an iteration starts."""
    places = [each["start_s"] for each in timeline.iterations if each["start_s"] is not None]
    if len(places) <= MAX_ITERATION_LINES:
        axes.vlines(places, -0.5, num_rows - 0.5, colors="white", linewidth=1.6)
        axes.vlines(places, -0.5, num_rows - 0.5, colors="black", linewidth=0.5)


def _labels(axes, timeline: Timeline, window_s: tuple[float, float], y: float) -> None:
    """The number of each iteration and the name of each stage above the middle of it, as far as there is room."""
    labelled = [(each["stage"], each["start_s"], each["end_s"]) for each in timeline.stages]
    for each in timeline.iterations:
        end = each["end_s"] if each["end_s"] is not None else timeline.end_s
        labelled.append((str(each["iteration"]), each["start_s"], end))
    low, high = window_s
    free = 0.0
    for text, start, end in sorted((entry for entry in labelled if entry[1] is not None), key=lambda entry: entry[1]):
        start, end = max(start, low), min(end, high)
        middle = ((start + end) / 2 - low) / (high - low)
        half = len(text) * DIGIT_WIDTH / 2
        fits = text.isdecimal() or (end - start) / (high - low) > 2 * half
        if start < end and fits and middle - half >= free:
            axes.text((start + end) / 2, y, text, ha="center", va="center", fontsize=8)
            free = middle + half + LABEL_GAP


def _remaps(axes, timeline: Timeline, y: float) -> None:
    for committed, marker, colour in ((True, "|", "black"), (False, "x", CANCELLED_COLOUR)):
        times = [remap.t_s for remap in timeline.remaps if remap.committed == committed]
        axes.plot(times, [y] * len(times), linestyle="", marker=marker, color=colour, markersize=6, markeredgewidth=1.2)


def _legend(figure: Figure, timeline: Timeline) -> None:
    seconds = timeline.node_seconds()
    total = sum(seconds.values()) or 1.0
    entries = [
        Patch(facecolor=ROLE_COLOURS[role], label=f"{role} ({seconds[role] / total:.0%} of node time)")
        for role in timeline.roles
    ]
    entries.append(Line2D([], [], linestyle="", marker="|", color="black", markersize=7, label="remap"))
    if not all(remap.committed for remap in timeline.remaps):
        entries.append(
            Line2D([], [], linestyle="", marker="x", color=CANCELLED_COLOUR, markersize=6, label="remap cancelled")
        )
    figure.legend(handles=entries, loc="outside lower left", ncols=len(entries), frameon=False, fontsize=9)
