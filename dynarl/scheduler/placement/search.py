"""The search for a plan: RLinf's recursion over the cuts of a workflow, for all numbers of devices at once.

- A set of stages is one stage, or it is cut in two. The parts take turns on all devices: their times add up, with the
  switching. Or they stand side by side and hand items on in chunks: the second part starts a chunk when it is complete and
  the chunk before is done, T = max over k of ready_k + (C - k) * chunk_s. With parts of even pace that is the published
  critical path + (C - 1) * bottleneck; a rollout's pace is not even, because its last answers are the long ones.
- The best of every cut, chunk and split is kept for each number of devices: an array operation, not a loop over it.
- More devices never harm, since some may idle. So sizes that bring nothing need no look: up to EXACT sizes all are tried;
  beyond that a geometric grid finds the neighbourhood, and finer grids around what was chosen find the place.
- Chunks come from one chain of divisors of the batch, so that chunks of chunks are whole.

Published: O(V^3 N^2), 5.98 s for three stages on 1024 GPUs (RLinf). Here: docs/planning.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dynarl.errors import ConfigError
from dynarl.scheduler.placement.flow import Flow
from dynarl.scheduler.placement.plan import Alone, InTurn, Node, SideBySide, inner, shape
from dynarl.scheduler.placement.stage import Stage

# Most sizes that are all tried.
EXACT = 72
# Ratio of neighbouring sizes on the first grid; then around the chosen ones.
COARSE, FINER = 1.07, (1.012, 1.002)
# Plans whose neighbourhood is searched.
REFINED = 2
# Most chunks that a batch is handed on in, and points of a pace that a pipeline is judged by.
MOST_CHUNKS, POINTS = 64, 8
Mode = Literal["any", "temporal", "spatial"]
ALONE, IN_TURN, SIDE_BY_SIDE = range(3)


@dataclass(frozen=True)
class Found:
    """A plan and its seconds as the search counted them."""

    plan: Node
    seconds: float


def find_schedule(
    flow: Flow,
    stages: Sequence[Stage],
    num_devices: int,
    items: int,
    *,
    unit: int = 1,
    mode: Mode = "any",
    sync_s: Mapping[int, float] | None = None,
) -> list[Found]:
    """The best plan first, then the best that was found of other shapes: one for every first cut and way to begin.

    unit: devices that can only be given together, such as those of a node; sync_s: seconds in which renewed state gets
    to a vertex on other devices than the owner's. Raises ConfigError with the arithmetic where nothing fits.
    """
    if unit < 1 or num_devices % unit:
        raise ConfigError(f"{num_devices} devices are not a whole number of {unit}")
    search = _Sized(flow, stages, num_devices, items, unit, sync_s or {})
    found = search.found(mode)
    if mode == "any" and not search.exact:
        # Pure plans have a finer grid of their own: those around the best mixed ones may pass by their sizes.
        found = _best_of_each(flow, [*found, *search.found("spatial")])
    if not found:
        raise ConfigError(_why_nothing(flow, stages, num_devices))
    return found


@dataclass(frozen=True)
class _Sized:
    """A search from coarse sizes to fine ones."""

    flow: Flow
    stages: Sequence[Stage]
    num_devices: int
    items: int
    unit: int
    sync_s: Mapping[int, float]

    @property
    def exact(self) -> bool:
        """All sizes are tried at once."""
        return self.num_devices // self.unit <= EXACT

    def found(self, mode: Mode) -> list[Found]:
        grid = _first_grid(self.stages, self.num_devices, self.unit)
        found = self._on(grid, mode)
        for reach, ratio in () if self.exact else itertools.pairwise((COARSE, *FINER)):
            if found:
                grid = _grid_around(found[:REFINED], self.num_devices, self.unit, ratio, reach)
                found = _best_of_each(self.flow, found + self._on(grid, mode))
        return found

    def _on(self, grid: np.ndarray, mode: Mode) -> list[Found]:
        return _Search(self.flow, self.stages, grid, self.items, mode, self.sync_s).roots()


def chain(items: int, most: int = MOST_CHUNKS) -> list[int]:
    """Numbers of chunks, each a divisor of the next and of the batch.

    >>> chain(96), chain(45), chain(7)
    ([1, 2, 4, 8, 16, 32], [1, 3, 9, 45], [1, 7])
    """
    found, factor = [1], 2
    while factor <= items and found[-1] * factor <= most:
        if items // found[-1] % factor == 0:
            found.append(found[-1] * factor)
        else:
            factor += 1
    return found


@dataclass
class _Table:
    """The best for each size of the grid. kind, cut, level, first, second: how it comes about, for `_Search.tree`.

    seconds [D]; ready [D, points]; load_s [D], still to be added where it takes turns.
    """

    seconds: np.ndarray
    ready: np.ndarray
    load_s: np.ndarray
    kind: np.ndarray
    cut: np.ndarray
    level: np.ndarray
    first: np.ndarray
    second: np.ndarray

    def take(self, index: np.ndarray) -> _Table:
        return _Table(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


@dataclass
class _Search:
    flow: Flow
    stages: Sequence[Stage]
    grid: np.ndarray
    items: int
    mode: Mode
    sync_s: Mapping[int, float]
    tables: dict[tuple[int, int, bool], _Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chain = chain(self.items)
        # remainder[n, i]: the largest size that is left of size n when size i is given away; -1: none.
        left = self.grid[:, None] - self.grid[None, :]
        self.remainder = np.searchsorted(self.grid, left, side="right") - 1

    def points(self, level: int) -> int:
        return self.chain[-1] // self.chain[level]

    def roots(self) -> list[Found]:
        """All that fits, the best first; for the whole flow and all devices."""
        rows = np.array([len(self.grid) - 1])
        everything = self.flow.everything
        single = [self._single(everything, 0, False).take(rows)] if everything.bit_count() == 1 else []
        found = [
            Found(self._node(everything, 0, False, table, 0), float(table.seconds[0]))
            for table in [*single, *self._ways(everything, 0, False, rows)]
            if np.isfinite(table.seconds[0])
        ]
        return _best_of_each(self.flow, found)

    def table(self, mask: int, level: int, shared: bool) -> _Table:
        key = (mask, level, shared)
        if key not in self.tables:
            if mask.bit_count() == 1:
                best = self._single(mask, level, shared)
            else:
                best = None
                for way in self._ways(mask, level, shared, np.arange(len(self.grid))):
                    best = way if best is None else _better(best, way)
            self.tables[key] = _at_least_as_good_as_smaller(best)
        return self.tables[key]

    def _single(self, mask: int, level: int, shared: bool) -> _Table:
        stage, items = self.stages[mask.bit_length() - 1], self.items / self.chain[level]
        ready = stage.release(self.grid, items, shared, self.points(level))
        none = np.zeros(len(self.grid), np.int64)
        here = np.arange(len(self.grid))
        return _Table(ready[:, -1], ready, stage.load_s(self.grid), none, none, none, here, here)

    def _ways(self, mask: int, level: int, shared: bool, rows: np.ndarray) -> Iterator[_Table]:
        for first, second in self.flow.cuts(mask):
            if self.mode != "spatial":
                yield self._in_turn(first, second, level, rows)
            if self.mode != "temporal":
                if self.flow.joined(first, second):
                    for finer in range(level + 1, len(self.chain)):
                        yield self._chunked(first, second, level, finer, shared, rows)
                yield self._beside(first, second, level, shared, rows)

    def _in_turn(self, first: int, second: int, level: int, rows: np.ndarray) -> _Table:
        a, b = self.table(first, level, True).take(rows), self.table(second, level, True).take(rows)
        before = a.seconds + a.load_s + b.load_s
        return _made(IN_TURN, first, level, before[:, None] + b.ready, np.zeros(len(rows)), rows, rows)

    def _chunked(self, first: int, second: int, level: int, finer: int, shared: bool, rows: np.ndarray) -> _Table:
        """Side by side; level, finer: of the batch, and of the chunks that it is handed on in."""
        a, b = self.table(first, level, shared), self.table(second, finer, shared)
        chunks = self.chain[finer] // self.chain[level]
        ready = a.ready[:, a.ready.shape[1] // chunks - 1 :: a.ready.shape[1] // chunks]
        sizes, other = self._splits(a, rows)
        chunk_s = np.where(other >= 0, b.seconds[other], np.inf)
        total = np.full(other.shape, -np.inf)
        for k in np.unique(np.linspace(0, chunks - 1, POINTS).round().astype(int)):
            np.maximum(total, ready[None, sizes, k] + (chunks - k) * chunk_s, out=total)
        best = total.argmin(axis=1)
        i, j = sizes[best], np.maximum(other[np.arange(len(rows)), best], 0)
        # Each chunk begins when it is there and the one before is done; the points within it follow the second's pace.
        step = chunk_s[np.arange(len(rows)), best][:, None]
        number = np.arange(chunks)
        with np.errstate(invalid="ignore"):
            begin = np.maximum.accumulate(ready[i] - number * step, axis=1) + number * step
        done = (begin[:, :, None] + b.ready[j][:, None, :]).reshape(len(rows), -1)
        done[np.isnan(done) | ~np.isfinite(step)] = np.inf
        load_s = np.maximum(a.load_s[i], b.load_s[j])
        return _made(SIDE_BY_SIDE, first, finer, self._synced(done, first, second, level), load_s, i, j)

    def _beside(self, first: int, second: int, level: int, shared: bool, rows: np.ndarray) -> _Table:
        """Side by side in one chunk: one after the other where something flows, else at the same time."""
        a, b = self.table(first, level, shared), self.table(second, level, shared)
        sizes, other = self._splits(a, rows)
        joined = self.flow.joined(first, second)
        theirs = np.where(other >= 0, b.seconds[other], np.inf)
        total = a.seconds[None, sizes] + theirs if joined else np.maximum(a.seconds[None, sizes], theirs)
        best = total.argmin(axis=1)
        i, j = sizes[best], np.maximum(other[np.arange(len(rows)), best], 0)
        done = a.seconds[i][:, None] + b.ready[j] if joined else np.maximum(a.ready[i], b.ready[j])
        done[~np.isfinite(total[np.arange(len(rows)), best])] = np.inf
        load_s = np.maximum(a.load_s[i], b.load_s[j])
        return _made(SIDE_BY_SIDE, first, level, self._synced(done, first, second, level), load_s, i, j)

    def _splits(self, first: _Table, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sizes of the first part that bring it something, and what each leaves to the second: [S], [rows, S]."""
        sizes = np.flatnonzero(np.concatenate([[True], first.seconds[1:] < first.seconds[:-1]]))
        return sizes, self.remainder[np.ix_(rows, sizes)]

    def _synced(self, done: np.ndarray, first: int, second: int, level: int) -> np.ndarray:
        """With the time in which state gets across the cut, once in an iteration."""
        total = sum(self.sync_s.get(holder, 0.0) for holder in self.flow.synced(first, second))
        done[:, -1] += total / self.chain[level]
        return done

    def _node(self, mask: int, level: int, shared: bool, table: _Table, row: int) -> Node:
        if table.kind[row] == ALONE:
            return Alone(mask.bit_length() - 1, int(self.grid[table.first[row]]), shared)
        first, finer = int(table.cut[row]), int(table.level[row])
        second = mask ^ first
        i, j = int(table.first[row]), int(table.second[row])
        if table.kind[row] == IN_TURN:
            parts = self._tree(first, level, True, i), self._tree(second, level, True, j)
            return InTurn(*parts, max(part.devices for part in parts))
        parts = self._tree(first, level, shared, i), self._tree(second, finer, shared, j)
        joined = self.flow.joined(first, second)
        chunks = self.chain[finer] // self.chain[level]
        return SideBySide(*parts, parts[0].devices + parts[1].devices, chunks, joined)

    def _tree(self, mask: int, level: int, shared: bool, row: int) -> Node:
        return self._node(mask, level, shared, self.table(mask, level, shared), row)


def _made(
    kind: int, cut: int, level: int, ready: np.ndarray, load_s: np.ndarray, first: np.ndarray, second: np.ndarray
) -> _Table:
    same = [np.full(len(ready), value, np.int64) for value in (kind, cut, level)]
    return _Table(ready[:, -1], ready, load_s, *same, first, second)


def _better(one: _Table, other: _Table) -> _Table:
    """For each size the faster of the two; the first where they are as good."""
    wins = other.seconds < one.seconds * (1 - 1e-12)
    if not wins.any():
        return one
    chosen = {}
    for name in _Table.__dataclass_fields__:
        a, b = getattr(one, name), getattr(other, name)
        chosen[name] = np.where(wins[:, None] if a.ndim == 2 else wins, b, a)
    return _Table(**chosen)


def _at_least_as_good_as_smaller(table: _Table) -> _Table:
    """Sizes at which a smaller one is as good take its plan, and let the rest idle."""
    lowest = np.minimum.accumulate(table.seconds)
    new = np.concatenate([[True], table.seconds[1:] < lowest[:-1] * (1 - 1e-12)])
    return table.take(np.maximum.accumulate(np.where(new, np.arange(len(new)), 0)))


def _best_of_each(flow: Flow, found: Iterable[Found]) -> list[Found]:
    """The best of every shape, fastest first."""
    best: dict[str, Found] = {}
    for each in sorted(found, key=lambda each: each.seconds):
        best.setdefault(shape(flow, each.plan), each)
    return list(best.values())


def _first_grid(stages: Sequence[Stage], num_devices: int, unit: int) -> np.ndarray:
    """int64 ascending; the last is all devices."""
    most = num_devices // unit
    if most <= EXACT:
        return unit * np.arange(1, most + 1)
    sizes = np.geomspace(1, most, 1 + int(np.ceil(np.log(most) / np.log(COARSE))))
    steps = [unit * -(-stage.sizes(num_devices) // unit) for stage in stages]
    few = [each for each in steps if len(each) <= EXACT]
    return np.unique(np.concatenate([unit * sizes.round().astype(np.int64), *few]))


def _grid_around(found: Sequence[Found], num_devices: int, unit: int, ratio: float, reach: float) -> np.ndarray:
    """Sizes from chosen / reach to chosen * reach in steps of ratio, for every part of the plans; and what they leave
    to the part beside.
    """
    steps = ratio ** np.arange(-np.ceil(np.log(reach) / np.log(ratio)), np.ceil(np.log(reach) / np.log(ratio)) + 1)
    around = {
        size: unit * np.maximum(1, (size / unit * steps).round().astype(np.int64))
        for each in found
        for node in inner(each.plan)
        for size in (node.devices, node.first.devices, node.second.devices)
    }
    left = [
        node.devices - around[part.devices]
        for each in found
        for node in inner(each.plan)
        if isinstance(node, SideBySide)
        for part in (node.first, node.second)
    ]
    sizes = np.unique(np.concatenate([*around.values(), *left, [unit, num_devices]]))
    return sizes[(sizes > 0) & (sizes <= num_devices)]


def _why_nothing(flow: Flow, stages: Sequence[Stage], num_devices: int) -> str:
    faults = [
        f"{'+'.join(names)}: {stage.why_not(num_devices)}"
        for names, stage in zip(flow.vertices, stages, strict=True)
        if not np.isfinite(stage.seconds(np.array([num_devices]), 1.0, False)[0])
    ]
    return "\n".join(faults) or f"no plan fits on {num_devices} devices: every stage does alone, but not all together"
