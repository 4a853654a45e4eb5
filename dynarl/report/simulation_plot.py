"""Pictures of simulated runs: GPUs by role over time, a panel per policy under one time axis."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from dynarl.report.palette import NO_ROLE_COLOUR, ROLE_COLOURS  # noqa: E402
from dynarl.report.simulation import KINDS, Run, drawn_s  # noqa: E402

WIDTH_IN, PANEL_IN = 10.0, 1.7
COLOURS = ROLE_COLOURS | {"idle": NO_ROLE_COLOUR}


def figure(runs: Sequence[Run], title: str) -> Figure:
    """One panel for each run, in this order."""
    made = Figure(figsize=(WIDTH_IN, 1.0 + PANEL_IN * len(runs)), layout="constrained")
    panels = made.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    end_s = drawn_s(runs)
    for axes, run in zip(panels, runs):
        edges = [span["start_s"] for span in run["timeline"]] + [run["timeline"][-1]["end_s"]]
        below = [0.0] * len(run["timeline"])
        for kind in KINDS:
            above = [low + span[kind] for low, span in zip(below, run["timeline"])]
            axes.stairs(above, edges, baseline=below, fill=True, color=COLOURS[kind], linewidth=0)
            below = above
        axes.axvline(edges[-1], color="black", linewidth=0.8)
        axes.set_xlim(0, end_s * 1.02)
        axes.set_ylim(0, max(below))
        axes.set_ylabel("GPUs")
        axes.set_title(f"{run['policy']}: {run['makespan_s']:.0f} s", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds")
    made.suptitle(title, x=0.01, ha="left", fontsize=11)
    handles = [Patch(facecolor=COLOURS[kind], label=kind) for kind in KINDS]
    made.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9)
    return made


def save(runs: Sequence[Run], title: str, path: Path, form: str) -> None:
    figure(runs, title).savefig(path, format=form, dpi=150)


def svg(runs: Sequence[Run], title: str) -> str:
    """The picture as an <svg> element for a page."""
    text = io.StringIO()
    figure(runs, title).savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]
