"""The search for a plan: RLinf's recursion over the cuts of a workflow, for all numbers of devices at once.

- A set of stages is one stage, or it is cut in two. The parts take turns on all devices: their times add up, with the
  switching. Or they stand side by side and hand items on in chunks: the second part starts a chunk when it is complete and
  the chunk before is done, T = max over k of ready_k + (C - k) * chunk_s. With parts of even pace that is the published
  critical path + (C - 1) * bottleneck; a rollout's pace is not even, because its last answers are the long ones.
- The best of every cut, chunk and split is kept for each number of devices: an array operation, not a loop over it. What
  comes after may be better served by a part that ends later but has its first items ready earlier. So several bests are
  kept: for nobody that comes after, and for such as are as quick as the part itself, or slower (LANES).
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
REFINED = 3
# Most chunks that a batch is handed on in, and points of a pace that a pipeline is judged by.
MOST_CHUNKS, POINTS = 64, 8
# Seconds that what comes after takes for the batch, in seconds of the part itself: the part is best for that.
LANES = (0.0, 1.0, 3.0)
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
    grid = _first_grid(stages, num_devices, unit)
    found = _Search(flow, stages, grid, items, mode, sync_s or {}).roots()
    exact = len(grid) == num_devices // unit
    for reach, ratio in () if exact or not found else itertools.pairwise((COARSE, *FINER)):
        grid = _grid_around(found[:REFINED], num_devices, unit, ratio, reach)
        found = _best_of_each(flow, found + _Search(flow, stages, grid, items, mode, sync_s or {}).roots())
    if not found:
        raise ConfigError(_why_nothing(flow, stages, num_devices))
    return found


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
    """The best for each size of the grid. kind, cut, level, lane, first, second: how it comes about, for `_Search.tree`;
    lane: which best of the first part it rests on.

    ready [D, points]: when which share is complete; load_s [D]: still to be added where it takes turns; sync_s [D]: once
    in an iteration; fresh [D]: it is not the plan of the size before.
    """

    ready: np.ndarray
    load_s: np.ndarray
    sync_s: np.ndarray
    kind: np.ndarray
    cut: np.ndarray
    level: np.ndarray
    lane: np.ndarray
    first: np.ndarray
    second: np.ndarray
    fresh: np.ndarray

    @property
    def seconds(self) -> np.ndarray:
        return self.ready[:, -1]

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
    tables: dict[tuple[int, int, bool], tuple[_Table, ...]] = field(default_factory=dict)

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
            Found(self._node(everything, 0, False, table, 0), float(table.seconds[0] + table.sync_s[0]))
            for table in [*single, *self._ways(everything, 0, False, rows)]
            if np.isfinite(table.seconds[0])
        ]
        return _best_of_each(self.flow, found)

    def lanes(self, mask: int, level: int, shared: bool) -> tuple[_Table, ...]:
        """The best parts for each of LANES; the first is that which ends first."""
        key = (mask, level, shared)
        if key not in self.tables:
            if mask.bit_count() == 1:
                table = self._single(mask, level, shared)
                self.tables[key] = (self._grown(table, self._values(table, level, shared, 0.0)),)
            else:
                ways = list(self._ways(mask, level, shared, np.arange(len(self.grid))))
                first = self._best(ways, 0.0, level, shared)
                others = [self._best(ways, share * first.seconds, level, shared) for share in LANES[1:]]
                self.tables[key] = (first, *others)
        return self.tables[key]

    def table(self, mask: int, level: int, shared: bool) -> _Table:
        """The part that ends first."""
        return self.lanes(mask, level, shared)[0]

    def _values(self, table: _Table, level: int, shared: bool, after_s: np.ndarray | float) -> np.ndarray:
        """Seconds with something that takes `after_s` [D] for the batch after it, and all that is still to be added."""
        points = table.ready.shape[1]
        left = (points - np.arange(points)) / points
        with np.errstate(invalid="ignore"):
            end = table.seconds if np.ndim(after_s) == 0 else (table.ready + after_s[:, None] * left).max(axis=1)
        return (
            np.where(np.isfinite(end), end, np.inf)
            + table.sync_s / self.chain[level]
            + (table.load_s if shared else 0.0)
        )

    def _best(self, ways: list[_Table], after_s: np.ndarray | float, level: int, shared: bool) -> _Table:
        """For each size the best of all ways; the first of those that are as good."""
        values = np.array([self._values(way, level, shared, after_s) for way in ways])
        chosen, here = values.argmin(axis=0), np.arange(len(self.grid))
        fields = _Table.__dataclass_fields__
        best = _Table(*(np.array([getattr(way, name) for way in ways])[chosen, here] for name in fields))
        return self._grown(best, values.min(axis=0))

    def _grown(self, table: _Table, values: np.ndarray) -> _Table:
        """Sizes at which a smaller one is as good take its plan, and let the rest idle."""
        lowest = np.minimum.accumulate(values)
        fresh = np.concatenate([[True], values[1:] < lowest[:-1] * (1 - 1e-12)])
        found = table.take(np.maximum.accumulate(np.where(fresh, np.arange(len(fresh)), 0)))
        found.fresh = fresh & np.isfinite(values)
        return found

    def _single(self, mask: int, level: int, shared: bool) -> _Table:
        stage, items = self.stages[mask.bit_length() - 1], self.items / self.chain[level]
        ready = stage.release(self.grid, items, shared, self.points(level))
        return _made(
            ALONE, 0, 0, 0, ready, stage.load_s(self.grid), 0.0, np.arange(len(self.grid)), np.arange(len(self.grid))
        )

    def _ways(self, mask: int, level: int, shared: bool, rows: np.ndarray) -> Iterator[_Table]:
        for first, second in self.flow.cuts(mask):
            if self.mode != "spatial":
                yield self._in_turn(first, second, level, rows)
            for lane in range(len(self.lanes(first, level, shared)) if self.mode != "temporal" else 0):
                if self.flow.joined(first, second):
                    for finer in range(level + 1, len(self.chain)):
                        yield self._chunked(first, second, level, finer, lane, shared, rows)
                yield self._beside(first, second, level, lane, shared, rows)

    def _in_turn(self, first: int, second: int, level: int, rows: np.ndarray) -> _Table:
        a, b = self.table(first, level, True).take(rows), self.table(second, level, True).take(rows)
        before = a.seconds + a.load_s + b.load_s
        return _made(
            IN_TURN, first, level, 0, before[:, None] + b.ready, np.zeros(len(rows)), a.sync_s + b.sync_s, rows, rows
        )

    def _chunked(
        self, first: int, second: int, level: int, finer: int, lane: int, shared: bool, rows: np.ndarray
    ) -> _Table:
        """Side by side; level, finer: of the batch, and of the chunks that it is handed on in."""
        a, b = self.lanes(first, level, shared)[lane], self.table(second, finer, shared)
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
        return self._placed(first, second, finer, lane, done, a, b, i, j)

    def _beside(self, first: int, second: int, level: int, lane: int, shared: bool, rows: np.ndarray) -> _Table:
        """Side by side in one chunk: one after the other where something flows, else at the same time."""
        a, b = self.lanes(first, level, shared)[lane], self.table(second, level, shared)
        sizes, other = self._splits(a, rows)
        joined = self.flow.joined(first, second)
        theirs = np.where(other >= 0, b.seconds[other], np.inf)
        total = a.seconds[None, sizes] + theirs if joined else np.maximum(a.seconds[None, sizes], theirs)
        best = total.argmin(axis=1)
        i, j = sizes[best], np.maximum(other[np.arange(len(rows)), best], 0)
        done = a.seconds[i][:, None] + b.ready[j] if joined else np.maximum(a.ready[i], b.ready[j])
        done[~np.isfinite(total[np.arange(len(rows)), best])] = np.inf
        return self._placed(first, second, level, lane, done, a, b, i, j)

    def _placed(
        self, first: int, second: int, level: int, lane: int, done: np.ndarray, a: _Table, b: _Table, i: np.ndarray,
        j: np.ndarray,
    ) -> _Table:  # fmt: skip
        sync_s = a.sync_s[i] + b.sync_s[j] + sum(self.sync_s.get(h, 0.0) for h in self.flow.synced(first, second))
        return _made(SIDE_BY_SIDE, first, level, lane, done, np.maximum(a.load_s[i], b.load_s[j]), sync_s, i, j)

    def _splits(self, first: _Table, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sizes of the first part that bring it something, and what each leaves to the second: [S], [rows, S]."""
        sizes = np.flatnonzero(first.fresh) if first.fresh.any() else np.zeros(1, np.int64)
        return sizes, self.remainder[np.ix_(rows, sizes)]

    def _node(self, mask: int, level: int, shared: bool, table: _Table, row: int) -> Node:
        if table.kind[row] == ALONE:
            return Alone(mask.bit_length() - 1, int(self.grid[table.first[row]]), shared)
        first, finer = int(table.cut[row]), int(table.level[row])
        second = mask ^ first
        i, j = int(table.first[row]), int(table.second[row])
        if table.kind[row] == IN_TURN:
            parts = self._tree(first, level, True, 0, i), self._tree(second, level, True, 0, j)
            return InTurn(*parts, max(part.devices for part in parts))
        parts = self._tree(first, level, shared, int(table.lane[row]), i), self._tree(second, finer, shared, 0, j)
        joined = self.flow.joined(first, second)
        chunks = self.chain[finer] // self.chain[level]
        return SideBySide(*parts, parts[0].devices + parts[1].devices, chunks, joined)

    def _tree(self, mask: int, level: int, shared: bool, lane: int, row: int) -> Node:
        return self._node(mask, level, shared, self.lanes(mask, level, shared)[lane], row)


def _made(
    kind: int, cut: int, level: int, lane: int, ready: np.ndarray, load_s: np.ndarray, sync_s: np.ndarray | float,
    first: np.ndarray, second: np.ndarray,
) -> _Table:  # fmt: skip
    same = [np.full(len(ready), value, np.int64) for value in (kind, cut, level, lane)]
    sync_s = np.broadcast_to(sync_s, len(ready))
    return _Table(ready, load_s, sync_s, *same, first, second, np.ones(len(ready), bool))


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
