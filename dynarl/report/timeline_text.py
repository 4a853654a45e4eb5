"""A timeline in characters: blocks in the roles' colours where there is colour, letters where there is not."""

from __future__ import annotations

import bisect

from rich.text import Text

from dynarl.report.palette import CANCELLED_COLOUR, ROLE_LETTERS, role_style
from dynarl.report.timeline import Span, Timeline
from dynarl.report.units import duration

MAX_ROWS = 64


def render(
    timeline: Timeline,
    width: int,
    colour: bool,
    fancy: bool,
    window_s: tuple[float, float] | None = None,
    max_rows: int = MAX_ROWS,
) -> list[Text]:
    """Lines of at most `width` columns for the time in `window_s`, default all. Each column shows the role that had
    most of its time. `fancy`: symbols beyond ASCII may be used."""
    low, high = window_s or (0.0, timeline.end_s)
    rows = list(timeline.spans)[:max_rows]
    label = max([len(node) for node in rows] + [5])
    columns = max(10, width - label - 1)
    edges = [low + (high - low) * i / columns for i in range(columns + 1)]
    block = "█" if fancy and colour else None
    lines = []
    for node in rows:
        line = Text(f"{node:<{label}} ")
        for role in _cells(timeline.spans[node], edges):
            line.append(
                " " if role is None else block or ROLE_LETTERS[role], style=role_style(role) if colour and role else ""
            )
        lines.append(line)
    if len(timeline.spans) > len(rows):
        lines.append(Text(f"{'':<{label}} ... and {len(timeline.spans) - len(rows)} more nodes"))
    pad = " " * (label + 1)
    lines.append(_marks(timeline, edges, f"{'remap':<{label}} ", "╵" if fancy else "'", "×" if fancy else "x"))
    if (numbers := _numbers(timeline, edges)).strip():
        lines.append(Text(f"{'iter':<{label}} {numbers}"))
    start, end = duration(low), duration(high)
    lines.append(Text(f"{pad}{start}{end:>{columns - len(start)}}"))
    for line in lines:
        line.rstrip()
    return lines


def legend(timeline: Timeline, colour: bool, fancy: bool) -> Text:
    seconds = timeline.node_seconds()
    total = sum(seconds.values()) or 1.0
    text = Text()
    for role in timeline.roles:
        mark = "██" if colour and fancy else ROLE_LETTERS[role]
        text.append(mark, style=role_style(role) if colour else "").append(f" {role} {seconds[role] / total:.0%}   ")
    text.append("╵ remap" if fancy else "' remap")
    if not all(remap.committed for remap in timeline.remaps):
        text.append("   ").append("× cancelled" if fancy else "x cancelled", style=CANCELLED_COLOUR if colour else "")
    return text


def _cells(spans: list[Span], edges: list[float]) -> list[str | None]:
    """For each interval between two edges the role that covers most of it, None where most of it has no role."""
    cells: list[str | None] = []
    ends = [span.end_s for span in spans]
    for low, high in zip(edges, edges[1:]):
        covered: dict[str, float] = {}
        for span in spans[bisect.bisect_right(ends, low) :]:
            if span.start_s >= high:
                break
            covered[span.role] = covered.get(span.role, 0.0) + min(span.end_s, high) - max(span.start_s, low)
        role = max(covered, key=covered.get, default=None)
        cells.append(role if role and sum(covered.values()) >= (high - low) / 2 else None)
    return cells


def _marks(timeline: Timeline, edges: list[float], head: str, committed: str, cancelled: str) -> Text:
    cells = [" "] * (len(edges) - 1)
    for remap in sorted(timeline.remaps, key=lambda r: not r.committed):
        column = bisect.bisect_right(edges, remap.t_s) - 1
        if 0 <= column < len(cells):
            cells[column] = committed if remap.committed else cancelled
    return Text(head + "".join(cells))


def _numbers(timeline: Timeline, edges: list[float]) -> str:
    """Each iteration's number at the column where it starts; numbers that would touch the one before are left out."""
    cells = [" "] * (len(edges) - 1)
    free = 0
    for each in timeline.iterations:
        column = bisect.bisect_right(edges, each["start_s"]) - 1 if each["start_s"] is not None else -1
        number = str(each["iteration"])
        if column >= free and column + len(number) <= len(cells):
            cells[column : column + len(number)] = number
            free = column + len(number) + 1
    return "".join(cells)
