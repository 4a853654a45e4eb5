"""The picture of a hypergraph: components as boxes with their nodes, channels as arrows with what flows, state below.

Components that have nodes of their own stand in the middle row in the order of the workflow, those that run on every
node below them. All positions are inches.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch  # noqa: E402

from dynarl.hypergraph.edges import dataflow, placement  # noqa: E402
from dynarl.hypergraph.graph import Graph  # noqa: E402
from dynarl.hypergraph.queries import staleness  # noqa: E402
from dynarl.report.graph_text import flow, free, layout, path_of, states, wait_lines  # noqa: E402
from dynarl.report.palette import CANCELLED_COLOUR, NO_ROLE_COLOUR, ROLE_COLOURS  # noqa: E402
from dynarl.slurm import hostlist  # noqa: E402

COLUMN, ROW = 4.8, 2.3  # from one box to the next
BOX_W, BOX_H = 2.5, 1.5
SMALL_W, SMALL_H = 1.7, 0.6
PILL_W, PILL_H = 1.5, 0.4
MAX_TILES, TILES_PER_ROW = 8, 4
INK, FAINT = "#222222", "#777777"

Point = tuple[float, float]


class _Box:
    """A component or a channel: where its centre is, and how large it is."""

    def __init__(self, x: float, y: float, width: float, height: float):
        self.x, self.y, self.width, self.height = x, y, width, height

    def edge_towards(self, point: Point) -> Point:
        """Where the line from the centre to `point` leaves the box."""
        dx, dy = point[0] - self.x, point[1] - self.y
        scale = max(abs(dx) / (self.width / 2), abs(dy) / (self.height / 2)) or 1.0
        return self.x + dx / scale, self.y + dy / scale


def draw(graph: Graph, title: str, path: Path, form: str) -> None:
    """Write the picture to `path`; `form` is "png" or "svg"."""
    boxes = _components(graph)
    pills = _channels(graph, boxes)
    everything = [*boxes.values(), *pills.values()]
    left, right = min(b.x - b.width / 2 for b in everything) - 0.3, max(b.x + b.width / 2 for b in everything) + 0.3
    top, bottom = max(b.y + b.height / 2 for b in everything) + 0.75, min(b.y - b.height / 2 for b in everything) - 0.3
    notes = _notes(graph)
    bottom -= 0.22 * len(notes)
    figure = Figure(figsize=(right - left, top - bottom))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.set_axis_off()
    for name, pill in pills.items():
        _channel(axes, graph, name, pill, boxes)
    for name, box in boxes.items():
        (_component if name in graph.workflow.roles else _small)(axes, graph, name, box)
    axes.text(left + 0.3, top - 0.25, title, fontsize=11, color=INK, va="top")
    for line, (text, colour) in enumerate(notes):
        y = bottom + 0.2 + 0.22 * (len(notes) - 1 - line)
        axes.text(left + 0.3, y, text, fontsize=8.5, color=colour)
    figure.savefig(path, format=form, dpi=150, metadata={"Title": title} if form == "svg" else None)


# Positions


def _components(graph: Graph) -> dict[str, _Box]:
    workflow = graph.workflow
    columns: dict[int, list[str]] = defaultdict(list)
    for name in workflow.roles:
        columns[_column(graph, name)].append(name)
    boxes = {}
    for column, names in columns.items():
        for index, name in enumerate(names):
            y = ((len(names) - 1) / 2 - index) * (BOX_H + 0.7)
            boxes[name] = _Box(column * COLUMN, y, BOX_W, BOX_H)
    floor = min(box.y for box in boxes.values()) - ROW
    beside = [name for name in workflow.components if name not in workflow.roles]
    for name in beside:
        ends = [channel.producers + channel.consumers for channel in workflow.channels.values()]
        around = {e: boxes[e].x for each in ends if name in each for e in each if e in workflow.roles}
        x = fmean(around.values()) if around else 0.0
        # What only serves one component stands to its left, so that channels to the others pass on its right.
        aside = -BOX_W / 2 - 0.7 if len(around) == 1 else 0.7
        boxes[name] = _Box(x + aside, floor, SMALL_W, SMALL_H)
    return boxes


def _column(graph: Graph, name: str) -> int:
    """How many components with nodes of their own lie before this one, at most."""
    workflow = graph.workflow

    def before(component: str) -> int:
        producers = {p for channel in workflow.taken_by(component).values() for p in channel.producers}
        return max((before(p) + (p in workflow.roles) for p in producers), default=0)

    return before(name)


def _channels(graph: Graph, boxes: dict[str, _Box]) -> dict[str, _Box]:
    """A channel stands in the middle between its two ends; in the row of the components with nodes, if both have one
    there; those that would lie on each other are moved apart."""
    roles = graph.workflow.roles
    places: dict[str, Point] = {}
    for name, channel in graph.workflow.channels.items():
        if not channel.producers:
            box = boxes[channel.consumers[0]]
            places[name] = (box.x - box.width / 2 - 0.55 - PILL_W / 2, box.y)
        elif set(channel.producers) == set(channel.consumers):
            box = boxes[channel.consumers[0]]
            places[name] = (box.x, box.y + box.height / 2 + 0.45 + PILL_H / 2)
        else:
            ends = [[e for e in side if e in roles] for side in (channel.producers, channel.consumers)]
            if not all(ends):
                ends = [list(channel.producers), list(channel.consumers)]
            middle = [(fmean(boxes[e].x for e in side), fmean(boxes[e].y for e in side)) for side in ends]
            places[name] = ((middle[0][0] + middle[1][0]) / 2, (middle[0][1] + middle[1][1]) / 2)
    same: dict[Point, list[str]] = defaultdict(list)
    for name, place in places.items():
        same[round(place[0], 2), round(place[1], 2)].append(name)
    pills = {}
    for (x, y), names in same.items():
        for index, name in enumerate(names):
            shift = (index - (len(names) - 1) / 2) * (PILL_W + 0.15)
            pills[name] = _Box(x + shift, y, PILL_W, PILL_H)
    return {name: pills[name] for name in places}


# Drawing


def _rounded(axes: Any, box: _Box, **style: Any) -> None:
    corner = (box.x - box.width / 2, box.y - box.height / 2)
    axes.add_patch(FancyBboxPatch(corner, box.width, box.height, boxstyle="round,pad=0,rounding_size=0.08", **style))


def _component(axes: Any, graph: Graph, name: str, box: _Box) -> None:
    nodes = graph.with_role(name)
    colour = ROLE_COLOURS.get(name, INK) if nodes else NO_ROLE_COLOUR
    _rounded(axes, box, facecolor="white", edgecolor=colour, linewidth=2.2, linestyle="-" if nodes else (0, (4, 3)))
    left, top = box.x - box.width / 2 + 0.14, box.y + box.height / 2 - 0.1
    axes.text(left, top, name, fontsize=12, weight="bold", color=colour if nodes else FAINT, va="top")
    axes.text(left, top - 0.27, layout(placement(graph, name)), fontsize=8, color=FAINT, va="top")
    _tiles(axes, graph, name, nodes, left, top - 0.5, box.width - 0.28)
    text, late = states(graph, name)
    axes.text(left, box.y - box.height / 2 + 0.1, text, fontsize=8, color=CANCELLED_COLOUR if late else INK)


def _tiles(axes: Any, graph: Graph, name: str, nodes: list[str], left: float, top: float, width: float) -> None:
    """A tile for each node, filled where its home is; nodes that are lent are outlined in the colour of their home."""
    if not nodes:
        axes.text(left, top - 0.06, "no node", fontsize=9, color=FAINT, va="top", style="italic")
        return
    if len(nodes) > MAX_TILES:
        lent = sum(graph.homes.get(node) != name for node in nodes)
        text = hostlist.fold(nodes)
        text = f"{len(nodes)} nodes  {text if len(text) < 24 else text[:21] + '...'}"
        axes.text(left, top - 0.06, text, fontsize=9, color=ROLE_COLOURS.get(name, INK), va="top", weight="bold")
        axes.text(left, top - 0.28, f"{lent} of them lent" if lent else "", fontsize=8, color=INK, va="top")
        return
    gap, height = 0.06, 0.24
    tile = (width - gap * (TILES_PER_ROW - 1)) / TILES_PER_ROW
    for index, node in enumerate(nodes):
        row, column = divmod(index, TILES_PER_ROW)
        box = _Box(left + column * (tile + gap) + tile / 2, top - row * (height + gap) - height / 2, tile, height)
        home = graph.homes.get(node)
        lent = home != name
        _rounded(
            axes, box, linewidth=1.6 if lent else 0, edgecolor=ROLE_COLOURS.get(home, NO_ROLE_COLOUR),
            facecolor="white" if lent else ROLE_COLOURS.get(name, INK),
        )
        dark = not lent and name in ("rollout", "training")
        label = node if len(node) <= 8 else node[:2] + "…" + node[-5:]
        axes.text(box.x, box.y - 0.01, label, fontsize=7.5, color="white" if dark else INK, ha="center", va="center")


def _small(axes: Any, graph: Graph, name: str, box: _Box) -> None:
    _rounded(axes, box, facecolor="#F4F4F4", edgecolor=FAINT, linewidth=1.2)
    axes.text(box.x, box.y + 0.09, name, fontsize=10, weight="bold", color=INK, ha="center", va="center")
    axes.text(box.x, box.y - 0.14, layout(placement(graph, name)), fontsize=8, color=FAINT, ha="center", va="center")


def _channel(axes: Any, graph: Graph, name: str, pill: _Box, boxes: dict[str, _Box]) -> None:
    declared, attributes = graph.workflow.channels[name], dataflow(graph, name).attributes
    busy = bool(attributes["waiting"] or attributes["at_work"])
    style = {"color": INK if busy else FAINT, "linewidth": 1.6 if busy else 1.0, "zorder": 0}
    loop = set(declared.producers) == set(declared.consumers)
    for ends, inwards in ((declared.producers, True), (declared.consumers, False)):
        for end in ends:
            box = boxes[end]
            aside = (0.55 if inwards else -0.55) if loop else 0.0
            outer = (box.x + aside, box.y + box.height / 2) if loop else box.edge_towards((pill.x, pill.y))
            inner = (pill.x + aside, pill.y) if loop else pill.edge_towards(outer)
            start, stop = (outer, inner) if inwards else (inner, outer)
            form = {"arrowstyle": "-" if inwards else "-|>", "mutation_scale": 11, "shrinkA": 0, "shrinkB": 1}
            axes.add_patch(FancyArrowPatch(start, stop, **form, **style))
    _rounded(axes, pill, facecolor="white", edgecolor=style["color"], linewidth=style["linewidth"], zorder=2)
    centred = {"ha": "center", "va": "center", "zorder": 3}
    axes.text(pill.x, pill.y + 0.08, name.replace("_", " "), fontsize=8.5, color=INK, **centred)
    axes.text(pill.x, pill.y - 0.09, flow(attributes), fontsize=7, color=FAINT, **centred)


def _notes(graph: Graph) -> list[tuple[str, str]]:
    """Lines below the picture, with their colours."""
    notes = [(f"free: {text}", INK) for text in free(graph)] + [(path, INK) for path in path_of(graph)]
    notes += [(line, CANCELLED_COLOUR) for line in wait_lines(graph)]
    shown = [name for name in graph.workflow.roles if len(graph.with_role(name)) <= MAX_TILES]
    if any(role in shown and graph.homes.get(node) != role for node, role in graph.roles.items()):
        notes.append(("an outlined node is lent; the colour is that of its home", FAINT))
    late = [(name, behind) for name, behind in staleness(graph).items() if behind]
    return notes + [(f"{name}: the oldest copy is {behind} behind", CANCELLED_COLOUR) for name, behind in late]
