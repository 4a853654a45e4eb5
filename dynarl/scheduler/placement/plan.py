"""A plan: a tree of stages in turn and side by side, and what happens when it is carried out.

    Alone(stage)                    one stage on devices of its own
    InTurn(first, second)           one after the other on the same devices, state switched in between
    SideBySide(first, second, n)    on disjoint devices; the second takes the first's items in n chunks as they come

`Execution` carries a plan out chunk by chunk, so that the times of the tree, of its picture and of the search that
found it are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dynarl.scheduler.placement.flow import Flow
from dynarl.scheduler.placement.stage import Stage


@dataclass(frozen=True)
class Alone:
    """A vertex of the flow by its number, on `devices` devices."""

    stage: int
    devices: int
    shared: bool = False


@dataclass(frozen=True)
class InTurn:
    first: Node
    second: Node
    devices: int


@dataclass(frozen=True)
class SideBySide:
    """chunks: pieces that the first part's items are handed on in; 1 where nothing flows between the two."""

    first: Node
    second: Node
    devices: int
    chunks: int
    joined: bool = True


Node = Alone | InTurn | SideBySide


def leaves(node: Node) -> Iterator[Alone]:
    """The stages of a tree, first to last."""
    if isinstance(node, Alone):
        yield node
    else:
        yield from leaves(node.first)
        yield from leaves(node.second)


def shape(flow: Flow, node: Node) -> str:
    """What shares devices with what, without numbers: `rollout | (inference > training)`.

    > is in turn, | side by side.
    """
    if isinstance(node, Alone):
        return "+".join(flow.vertices[node.stage])
    mark = " > " if isinstance(node, InTurn) else " | "
    parts = [shape(flow, each) for each in (node.first, node.second)]
    kinds = [type(each) for each in (node.first, node.second)]
    return mark.join(f"({p})" if k not in (Alone, type(node)) else p for p, k in zip(parts, kinds, strict=True))


def mode(node: Node) -> str:
    """temporal: all in turn; spatial: all side by side; else hybrid."""
    if isinstance(node, Alone):
        return "temporal"
    kinds = {type(each) for each in inner(node)}
    return "hybrid" if len(kinds) > 1 else "temporal" if kinds == {InTurn} else "spatial"


def inner(node: Node) -> Iterator[InTurn | SideBySide]:
    """The nodes of a tree that have parts, from its root."""
    if not isinstance(node, Alone):
        yield node
        yield from inner(node.first)
        yield from inner(node.second)


def parts(node: Node, pieces: int = 1) -> tuple[list[Node], list[int]]:
    """Parts of nested nodes of one kind in one list, each with the pieces of the batch in which it gets its items, where
    the node gets its own in `pieces`.
    """
    return _parts(node, type(node), pieces)


def _parts(node: Node, kind: type, pieces: int) -> tuple[list[Node], list[int]]:
    if isinstance(node, Alone) or type(node) is not kind:
        return [node], [pieces]
    finer = pieces * node.chunks if isinstance(node, SideBySide) else pieces
    first, second = _parts(node.first, kind, pieces), _parts(node.second, kind, finer)
    return first[0] + second[0], first[1] + second[1]


def ranges(node: Node, first: int = 0) -> dict[int, tuple[int, int]]:
    """Devices of each stage, [first, end)."""
    if isinstance(node, Alone):
        return {node.stage: (first, first + node.devices)}
    second = first + (node.first.devices if isinstance(node, SideBySide) else 0)
    return ranges(node.first, first) | ranges(node.second, second)


@dataclass
class Execution:
    """Times of a plan. `factors`: how much longer than its cost says a stage takes, by its number.

    busy: for each stage its periods of work, (start, end) in seconds; switching: of loading and unloading.
    """

    flow: Flow
    stages: Sequence[Stage]
    items: int
    sync_s: Mapping[int, float] = field(default_factory=dict)
    factors: Mapping[int, float] = field(default_factory=dict)
    busy: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    switching: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    known: dict[tuple, np.ndarray] = field(default_factory=dict)

    def run(self, plan: Node) -> float:
        """Seconds of the whole plan; fills `busy` and `switching`."""
        self.busy, self.switching = {}, {}
        releases = self._run(plan, 0.0, float(self.items), 1)
        return float(releases[-1]) + self.synced(plan)

    def synced(self, plan: Node) -> float:
        """Seconds in which renewed state is sent to stages on other devices than its owner's."""
        if isinstance(plan, Alone):
            return 0.0
        own = 0.0
        if isinstance(plan, SideBySide):
            first, second = (sum(1 << leaf.stage for leaf in leaves(part)) for part in (plan.first, plan.second))
            own = sum(self.sync_s.get(holder, 0.0) for holder in self.flow.synced(first, second))
        return own + self.synced(plan.first) + self.synced(plan.second)

    def _run(self, node: Node, start: float, items: float, points: int) -> np.ndarray:
        """When each of `points` equal parts of the items is complete."""
        if isinstance(node, Alone):
            return self._alone(node, start, items, points)
        if isinstance(node, InTurn):
            before = self._load(node.first, start)
            end = float(self._run(node.first, start + before, items, 1)[-1])
            return self._run(node.second, end + self._load(node.second, end), items, points)
        if not node.joined:
            parts = [self._run(part, start, items, points) for part in (node.first, node.second)]
            return np.maximum(*parts)
        ready = self._run(node.first, start, items, node.chunks)
        finest = max(1, points // node.chunks)
        done, free = [], start
        for at in ready.tolist():
            part = self._run(node.second, max(free, at), items / node.chunks, finest)
            done.append(part)
            free = float(part[-1])
        return np.concatenate(done).reshape(points, -1)[:, -1]

    def _alone(self, node: Alone, start: float, items: float, points: int) -> np.ndarray:
        factor = self.factors.get(node.stage, 1.0)
        done = start + factor * self._release(node.stage, node.devices, items, node.shared, points)
        _extend(self.busy.setdefault(node.stage, []), start, float(done[-1]))
        return done

    def _release(self, stage: int, devices: int, *rest: float) -> np.ndarray:
        """Of one number of devices; worked out once, since chunks are many and alike."""
        key = (stage, devices, *rest)
        if key not in self.known:
            self.known[key] = self.stages[stage].release(np.array([devices]), *rest)[0]
        return self.known[key]

    def _load(self, node: Node, start: float) -> float:
        """Seconds of switching to and from a part that takes turns; parts that take turns inside have counted it."""
        if isinstance(node, InTurn):
            return 0.0
        if isinstance(node, Alone):
            seconds = float(self.stages[node.stage].load_s(np.array([node.devices]))[0])
            if seconds:
                _extend(self.switching.setdefault(node.stage, []), start, start + seconds)
            return seconds
        return max(self._load(node.first, start), self._load(node.second, start))


def _extend(periods: list[tuple[float, float]], start: float, end: float) -> None:
    if periods and start - periods[-1][1] < 1e-9:
        periods[-1] = (periods[-1][0], end)
    else:
        periods.append((start, end))
