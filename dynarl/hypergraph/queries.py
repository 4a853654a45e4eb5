"""Questions about a job, answered from its graph alone. Unknown is not zero: what no record tells is left out."""

from __future__ import annotations

from typing import NamedTuple

from dynarl.hypergraph.edges import dataflow, devices, residency, seen
from dynarl.hypergraph.graph import Graph


class Wait(NamedTuple):
    """A component that has nothing to do, or items that nobody takes; `on`: the vertex that has to change first."""

    component: str
    on: str
    why: str


class Stage(NamedTuple):
    """A component on the critical path of an iteration: it ended `end_s` after the start, and until then, from the end
    of the stage before it, the iteration waited `alone_s` for it."""

    component: str
    end_s: float
    alone_s: float


def free_pool(graph: Graph) -> tuple[str, ...]:
    """Devices of the allocation whose node has no active role."""
    return devices(graph, [node for node in graph.nodes if node not in graph.roles])


def staleness(graph: Graph) -> dict[str, int | None]:
    """By how many versions the oldest copy of each state object is older than its owners' own; None: unknown."""
    return {name: residency(graph, name).attributes["behind"] for name in graph.workflow.state}


def waits(graph: Graph) -> list[Wait]:
    """Who waits for whom, as far as the last decision of the running iteration saw it."""
    found = []
    if graph.in_transit is not None:
        why = f"version {graph.in_transit} of the weights is on its way"
        found += [Wait(name, "state/weights", why) for name in graph.workflow.roles]
    full = _full(graph)
    for name in graph.workflow.order:
        for channel, declared in graph.workflow.taken_by(name).items():
            flow = dataflow(graph, channel).attributes
            if flow["waiting"] is None:
                continue
            placed = name not in graph.workflow.roles or bool(graph.with_role(name))
            if flow["waiting"] and not placed:
                why = f"{flow['waiting']} {declared.granularity}(s) wait in {channel}, and no node runs {name}"
                found.append(Wait(name, f"component/{name}", why))
            elif placed and not flow["waiting"] and not flow["at_work"]:
                behind = [p for p in declared.producers if _reachable(graph, p) & full]
                if behind:
                    found.append(Wait(name, f"channel/{channel}", f"{channel} is empty until {behind[0]} is further"))
    return found


def _full(graph: Graph) -> set[str]:
    """Channels that are known to hold something."""
    figures = seen(graph)
    channels = graph.workflow.channels.items()
    return {name for name, each in channels if figures.get(each.waiting) or figures.get(each.at_work)}


def _reachable(graph: Graph, component: str) -> set[str]:
    """Channels whose items come to `component` sooner or later."""
    found: set[str] = set()
    ahead = [component]
    while ahead:
        for name, channel in graph.workflow.taken_by(ahead.pop()).items():
            if name not in found:
                found.add(name)
                ahead += channel.producers
    return found


def critical_path(graph: Graph, number: int | None = None) -> list[Stage]:
    """Which component an iteration waited for, and how long: stages in the order in which they ended. `number`: of the
    iteration, default the last one that has an optimizer step. Empty where the records do not tell. Raises KeyError for
    an iteration that the graph does not have."""
    if number is None:
        number = next((n for n, each in reversed(graph.iterations.items()) if each.num_steps), None)
        if number is None:
            return []
    iteration = graph.iterations[number]
    if iteration.started_t is None or iteration.ended_t is None or not iteration.stages:
        return []
    ends = dict(iteration.stages)
    last = [name for name, each in graph.workflow.components.items() if each.program == "training"]
    ends |= dict.fromkeys(last, iteration.ended_t - iteration.started_t)
    path, before = [], 0.0
    for name, end_s in sorted(ends.items(), key=lambda item: item[1]):
        path.append(Stage(name, end_s, end_s - before))
        before = end_s
    return path
