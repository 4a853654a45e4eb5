"""A plan executed in one process: what the transports do between processes, on dictionaries of arrays.

The reference for what a plan means, and the way in which tests compare its promises with what happens. Memory is
counted in elements: destination as it is filled, source until it is released, staging while messages are in flight.
(Real memory behaves so where it is touched as it is filled and given back in pages.)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dynarl.vps.box import Box, intersect, volume

if TYPE_CHECKING:
    from dynarl.vps.plan import Plan
    from dynarl.vps.steps import Fragment

Stored = list[tuple[Box, np.ndarray]]


class Result(NamedTuple):
    """Buffers at the destination, and the most bytes that each rank needed."""

    buffers: dict[int, dict[tuple[Any, str], Stored]]
    peak_bytes: dict[int, int]


class Store:
    """The pieces of one rank, by (tensor, kind)."""

    def __init__(self, pieces: Mapping[tuple[int, str], Sequence[tuple[Box, np.ndarray]]]):
        self.pieces = pieces
        self.released: dict[tuple[int, str], list[Box]] = {}

    def read(self, fragment: Fragment) -> np.ndarray | None:
        """A copy of a fragment; None if it is not all here (any more)."""
        if any(intersect(box, fragment.box) for box in self.released.get((fragment.tensor, fragment.kind), ())):
            return None
        result, missing = None, volume(fragment.box)
        for box, array in self.pieces.get((fragment.tensor, fragment.kind), ()):
            if array is not None and (both := intersect(box, fragment.box)) is not None:
                if result is None:
                    result = np.empty([hi - lo for lo, hi in fragment.box], array.dtype)
                result[_within(both, fragment.box)] = array[_within(both, box)]
                missing -= volume(both)
                if not missing:
                    return result
        return None

    def release(self, fragment: Fragment) -> None:
        """Forget a fragment. (The arrays are the caller's, so their memory stays.)"""
        self.released.setdefault((fragment.tensor, fragment.kind), []).append(fragment.box)

    def write(self, fragment: Fragment, value: np.ndarray) -> None:
        """Fill the place of a fragment. Raises KeyError if there is none."""
        for i, (box, array) in enumerate(self.pieces[fragment.tensor, fragment.kind]):
            if intersect(box, fragment.box) == fragment.box:
                if array is None:
                    array = np.zeros([hi - lo for lo, hi in box], value.dtype)
                    self.pieces[fragment.tensor, fragment.kind][i] = (box, array)
                array[_within(fragment.box, box)] = value
                return
        raise KeyError(fragment)


def _within(inner: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(lo - base, hi - base) for (lo, hi), (base, _) in zip(inner, outer))


def run(plan: Plan, buffers: Mapping[int, Mapping[tuple[Any, str], Sequence[tuple[Box, np.ndarray]]]]) -> Result:
    """Execute a plan of all ranks. Raises ValueError where the buffers lack what the source layout says."""
    names = _Names(plan, buffers)
    source = {rank: Store(names.indexed(buffers.get(rank, {}))) for rank in plan.ranks}
    target = {rank: Store(_empty(plan, rank)) for rank in plan.ranks}
    live, peak = dict(plan.source_bytes), dict(plan.source_bytes)
    dtype = next(
        (a.dtype for s in source.values() for (_, kind), v in s.pieces.items() if kind == "param" for _, a in v), None
    )

    def grow(rank: int, nbytes: int, staged: int = 0) -> None:
        live[rank] += nbytes
        peak[rank] = max(peak[rank], live[rank] + staged)

    def size(fragments: Sequence[Fragment]) -> int:
        return sum(volume(f.box) * plan.spec.itemsize(f.kind) for f in fragments)

    def fetch(rank: int, fragment: Fragment) -> np.ndarray:
        value = source[rank].read(fragment)
        if value is None:
            value = target[rank].read(fragment)  # passed on
        if value is None:
            raise ValueError(f"rank {rank} has no {fragment} to send or keep; the buffers do not fit the source layout")
        return value

    todo = [(step.number, rank, step) for rank in plan.ranks for step in plan.steps(rank)]
    for _, steps in itertools.groupby(sorted(todo, key=lambda item: item[:2]), key=lambda item: item[0]):
        now = [(rank, step) for _, rank, step in steps]
        for rank, step in now:
            for fragment in step.keep:
                target[rank].write(fragment, fetch(rank, fragment))
                grow(rank, size([fragment]))
        exchanges = sorted(
            ((e.round, rank, e) for rank, step in now for e in step.exchanges), key=lambda item: item[:2]
        )
        for _, pairs in itertools.groupby(exchanges, key=lambda item: item[0]):
            pairs = [(rank, exchange) for _, rank, exchange in pairs]
            packed = {rank: [fetch(rank, f) for f in exchange.out] for rank, exchange in pairs}
            for rank, exchange in pairs:
                staged = size(exchange.out) + size(exchange.into)
                grow(rank, size(exchange.into), staged)
                for fragment, value in zip(exchange.into, packed[exchange.peer], strict=True):
                    target[rank].write(fragment, value)
        for rank, step in now:
            for fragment in step.derive:
                master = target[rank].read(fragment._replace(kind="master"))
                target[rank].write(fragment, cast(master, dtype, plan.spec.dtype))
                grow(rank, size([fragment]))
            for fragment in step.release:
                source[rank].release(fragment)
            grow(rank, -size(step.release))
    return Result({rank: names.named(store.pieces) for rank, store in target.items()}, peak)


def cast(master: np.ndarray, dtype: np.dtype | None, name: str) -> np.ndarray:
    """A parameter from its master. dtype: of parameters in memory (None: unknown); name: what they stand for.

    numpy has no bfloat16: where parameters are kept as 16-bit integers, these are its bits, rounded to nearest, ties
    to even.

    >>> [hex(x) for x in cast(np.array([1.0, -2.5, 3.1415926], np.float32), None, "bfloat16")]
    ['0x3f80', '0xc020', '0x4049']
    """
    if dtype is None:
        dtype = np.dtype(np.uint16 if name == "bfloat16" else name)
    if name == "bfloat16" and dtype in (np.uint16, np.int16) and master.dtype == np.float32:
        bits = master.view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        # Adding must not turn a NaN into an infinity.
        return np.where(np.isnan(master), (bits >> 16) | 0x40, rounded).astype(np.uint16).view(dtype)
    return master.astype(dtype)


def _empty(plan: Plan, rank: int) -> dict[tuple[int, str], Stored]:
    """The destination's pieces, without arrays yet."""
    pieces: dict[tuple[int, str], Stored] = {}
    for fragment in plan.destination(rank):
        pieces.setdefault((fragment.tensor, fragment.kind), []).append((fragment.box, None))
    return pieces


class _Names:
    """How the caller names tensors: by LogicalTensor, by name or by index."""

    def __init__(self, plan: Plan, buffers: Mapping[int, Mapping[tuple[Any, str], Any]]):
        self.tensors = plan.spec.tensors
        self.index: dict[Any, int] = {}
        sample = next((tensor for held in buffers.values() for tensor, _ in held), None)
        self.by = range(len(self.tensors))
        if isinstance(sample, str):
            self.by = [tensor.name for tensor in self.tensors]
        elif not isinstance(sample, (int, np.integer)):
            self.by = self.tensors
        self.index = {name: i for i, name in enumerate(self.by)}

    def indexed(
        self, held: Mapping[tuple[Any, str], Sequence[tuple[Box, np.ndarray]]]
    ) -> dict[tuple[int, str], Stored]:
        return {(self.index[tensor], kind): list(stored) for (tensor, kind), stored in held.items()}

    def named(self, pieces: Mapping[tuple[int, str], Stored]) -> dict[tuple[Any, str], Stored]:
        return {(self.by[tensor], kind): stored for (tensor, kind), stored in pieces.items()}
