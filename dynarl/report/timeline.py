"""Which node had which role when, as data: what the picture, the text and the JSON of `dynarl timeline` all show."""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from dynarl.errors import DynarlError
from dynarl.hypergraph.graph import Graph
from dynarl.report.units import iso_time


@dataclass(frozen=True)
class Span:
    """A node in one role, in seconds since the start of the run."""

    start_s: float
    end_s: float
    role: str


@dataclass(frozen=True)
class Remap:
    """A committed or cancelled change of roles."""

    t_s: float
    epoch: int
    committed: bool
    moves: list[dict[str, str]]
    pause_ms: float | None
    reason: str | None


@dataclass(frozen=True)
class Timeline:
    """Everything, with times in seconds since `started_t` (unix). roles: that there can be; spans: by node; stages:
    what is not an iteration."""

    run: str
    started_t: float
    end_s: float
    roles: tuple[str, ...]
    homes: dict[str, str]
    spans: dict[str, list[Span]]
    remaps: list[Remap]
    stages: list[dict[str, Any]]
    iterations: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    checkpoints: list[dict[str, Any]]

    def node_seconds(self) -> dict[str, float]:
        """Seconds spent in each role, summed over nodes."""
        total: dict[str, float] = defaultdict(float)
        for spans in self.spans.values():
            for span in spans:
                total[span.role] += span.end_s - span.start_s
        return {role: round(total[role], 3) for role in self.roles}

    def window(self, first: int, last: int) -> tuple[float, float]:
        """From the start of iteration `first` to the end of iteration `last`. Raises DynarlError if there is none."""
        chosen = [i for i in self.iterations if first <= i["iteration"] <= last and i["start_s"] is not None]
        if not chosen:
            raise DynarlError(f"{self.run} has no iteration from {first} to {last}; it has {len(self.iterations)}")
        following = [i["start_s"] for i in self.iterations if i["iteration"] > last and i["start_s"] is not None]
        return chosen[0]["start_s"], min(following, default=self.end_s)

    def as_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "started": iso_time(self.started_t),
            "end_s": self.end_s,
            "nodes": [
                {"node": node, "home": self.homes.get(node), "spans": [_rounded(vars(span)) for span in spans]}
                for node, spans in self.spans.items()
            ],
            "remaps": [_rounded(vars(remap)) for remap in self.remaps],
            "stages": self.stages,
            "iterations": self.iterations,
            "evaluations": self.evaluations,
            "checkpoints": self.checkpoints,
            "node_seconds": self.node_seconds(),
        }


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}


def timeline(graph: Graph, now: float | None = None, since_t: float = 0.0) -> Timeline:
    """The timeline of a run that has started. A run that goes on is drawn up to `now`, else to its last record.

    since_t: roles before this unix time are left out, which makes it fast for a long run. Raises ValueError if the run
    has not started.
    """
    if graph.started_t is None:
        raise ValueError("the run has not started yet: there is no record of it in the journal")
    start = graph.started_t
    end_t = graph.ended["t"] if graph.ended else max(graph.last_t, now or 0.0)

    def since(t: float | None) -> float | None:
        return None if t is None else round(t - start, 4)

    return Timeline(
        run=graph.run,
        started_t=start,
        end_s=since(end_t),
        roles=graph.workflow.roles,
        homes=dict(graph.homes),
        spans={node: _spans(_from(graph.spans.get(node, []), since_t), start, end_t) for node in _order(graph)},
        remaps=[
            Remap(
                since(e.ended_t), e.number, e.state == "committed", [m._asdict() for m in e.moves], e.pause_ms, e.reason
            )
            for e in (*graph.committed, *graph.cancelled)
        ],
        stages=[{"stage": name, "start_s": since(low), "end_s": since(high)} for name, low, high in _stages(graph)],
        iterations=[
            {"iteration": i.number, "start_s": since(i.started_t), "end_s": since(i.ended_t)}
            for i in graph.iterations.values()
        ],
        evaluations=[
            {**{k: e[k] for k in ("when", "iteration", "accuracy")}, "t_s": since(e["t"])} for e in graph.evaluations
        ],
        checkpoints=[{"iteration": c["iteration"], "t_s": since(c["t"])} for c in graph.checkpoints],
    )


def _stages(graph: Graph) -> list[tuple[str, float, float]]:
    """(name, start, end) of start, warm start and evaluations; each lasts from the event before it to its own."""
    events = [(graph.ready_t, "start")]
    events += [(graph.warm_start["t"], "warm start")] if graph.warm_start else []
    events += [(each["t"], "evaluation") for each in graph.evaluations]
    others = [graph.started_t, *(i.ended_t for i in graph.iterations.values())]
    times = sorted(t for t in [*others, *(t for t, _ in events)] if t is not None)
    return [(name, max([low for low in times if low < t], default=t), t) for t, name in events if t is not None]


def _order(graph: Graph) -> list[str]:
    """Rollout nodes first, training nodes last, so that what moves meets in the middle; within a role as allocated."""
    rank = {role: index for index, role in enumerate(graph.workflow.roles)}
    nodes = dict.fromkeys([*graph.nodes, *graph.spans])
    return sorted(nodes, key=lambda node: rank.get(graph.homes.get(node), len(rank)))


def _from(changes: list[tuple[float, str | None]], since_t: float) -> list[tuple[float, str | None]]:
    """The change in force at `since_t` and all later ones."""
    return changes[max(0, bisect.bisect_right(changes, since_t, key=lambda change: change[0]) - 1) :]


def _spans(changes: list[tuple[float, str | None]], start: float, end_t: float) -> list[Span]:
    ends = [t for t, _ in changes[1:]] + [end_t]
    return [Span(t - start, end - start, role) for (t, role), end in zip(changes, ends) if role is not None and end > t]
