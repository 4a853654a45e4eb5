"""Boxes: axis-parallel pieces of a tensor, half-open on every axis, alone and as arrays of many.

>>> whole = ((0, 4), (0, 6))
>>> subtract(whole, ((1, 3), (0, 6)))
[((0, 1), (0, 6)), ((3, 4), (0, 6))]
>>> flat_boxes(4, 14, (4, 6))  # elements 4..13 in row-major order: the end of row 0, row 1, the start of row 2
[((0, 1), (4, 6)), ((1, 2), (0, 6)), ((2, 3), (0, 2))]

Letters in array shapes: N pieces, A = 2 axes. A tensor of one axis has (0, 1) on the second: every array has both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    """Number of elements."""
    return math.prod(hi - lo for lo, hi in box)


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share, None if nothing."""
    both = tuple((max(a_lo, b_lo), min(a_hi, b_hi)) for (a_lo, a_hi), (b_lo, b_hi) in zip(a, b, strict=True))
    return both if all(lo < hi for lo, hi in both) else None


def subtract(a: Box, b: Box) -> list[Box]:
    """`a` without `b`, as disjoint boxes: at most two for each axis."""
    both = intersect(a, b)
    if both is None:
        return [a]
    rest, left = [], list(a)
    for axis, ((lo, hi), (cut_lo, cut_hi)) in enumerate(zip(a, both)):
        for side in ((lo, cut_lo), (cut_hi, hi)):
            if side[0] < side[1]:
                rest.append((*left[:axis], side, *a[axis + 1 :]))
        left[axis] = (cut_lo, cut_hi)
    return rest


def flat_boxes(lo: int, hi: int, shape: Sequence[int]) -> list[Box]:
    """Elements lo..hi-1 of a row-major tensor, as boxes in that order: at most 2n-1 for n axes."""
    if lo >= hi:
        return []
    if len(shape) == 1:
        return [((lo, hi),)]
    inner = math.prod(shape[1:])
    first, last = -(-lo // inner), hi // inner
    if first > last:  # both ends inside one row
        return [((last, last + 1), *box) for box in flat_boxes(lo - last * inner, hi - last * inner, shape[1:])]
    boxes = []
    if lo < first * inner:
        boxes = [((first - 1, first), *box) for box in flat_boxes(lo - (first - 1) * inner, inner, shape[1:])]
    if first < last:
        boxes.append(((first, last), *whole(shape[1:])))
    return boxes + [((last, last + 1), *box) for box in flat_boxes(0, hi - last * inner, shape[1:])]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Many boxes and who holds them, sorted by tensor and then by rank. The arrays are not to be written to."""

    rank: np.ndarray  # int32 [N]
    tensor: np.ndarray  # int32 [N], index into ModelSpec.tensors
    lo: np.ndarray  # int64 [N, A]
    hi: np.ndarray  # int64 [N, A]

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def volume(self) -> np.ndarray:
        """Elements of each piece, int64 [N]."""
        return (self.hi[:, 0] - self.lo[:, 0]) * (self.hi[:, 1] - self.lo[:, 1])

    def select(self, which: np.ndarray) -> Pieces:
        """The pieces where a mask is true, or at some indices (which must be ascending)."""
        return Pieces(self.rank[which], self.tensor[which], self.lo[which], self.hi[which])

    def of_rank(self, rank: int) -> Pieces:
        """The pieces of one rank."""
        return self.select(self.rank == rank)

    def box(self, index: int, axes: int) -> Box:
        """One piece as a Box of the tensor's own number of axes."""
        lo, hi = self.lo[index].tolist(), self.hi[index].tolist()
        return tuple(zip(lo[:axes], hi[:axes]))


def collect(groups: Iterable[tuple[int, np.ndarray, np.ndarray, np.ndarray]]) -> Pieces:
    """Pieces from (rank, tensor [n], lo [n, A], hi [n, A]) of each rank, in any order."""
    groups = list(groups)
    if not groups:
        empty = np.zeros((0, 2), np.int64)
        return Pieces(np.zeros(0, np.int32), np.zeros(0, np.int32), empty, empty)
    counts = [len(group[1]) for group in groups]
    rank = np.repeat(np.array([group[0] for group in groups], np.int32), counts)
    tensor = np.concatenate([group[1] for group in groups]).astype(np.int32, copy=False)
    # One key, and a sort that makes use of each rank's boxes being in order already.
    order = np.argsort(tensor.astype(np.int64) << 32 | rank, kind="stable")
    lo, hi = (np.concatenate([group[side] for group in groups])[order] for side in (2, 3))
    return Pieces(_frozen(rank[order]), _frozen(tensor[order]), _frozen(lo), _frozen(hi))


def joined(tensor: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Disjoint boxes (tensor [n], lo and hi [n, A]) in order, those that continue each other along the rows as one."""
    order = np.lexsort((lo[:, 1], lo[:, 0], tensor))
    tensor, lo, hi = tensor[order], lo[order], hi[order]
    starts = np.ones(len(tensor), bool)
    same = (tensor[1:] == tensor[:-1]) & (lo[1:, 1] == lo[:-1, 1]) & (hi[1:, 1] == hi[:-1, 1])
    starts[1:] = ~(same & (lo[1:, 0] == hi[:-1, 0]))
    first = np.nonzero(starts)[0]
    last = np.append(first[1:], len(tensor)) - 1 if len(first) else first
    return tensor[first], lo[first], np.stack([hi[last, 0], hi[first, 1]], axis=1)


def interval_boxes(lo_N: np.ndarray, hi_N: np.ndarray, columns_N: np.ndarray) -> tuple[np.ndarray, ...]:
    """Row-major intervals of matrices `columns_N` wide as boxes: (index into N, lo [M, A], hi [M, A]), M <= 3 N.

    The array form of `flat_boxes` for two axes; empty intervals (lo >= hi) yield nothing.
    """
    first, last = -(-lo_N // columns_N), hi_N // columns_N
    row = lo_N // columns_N
    head_hi = np.minimum(hi_N - row * columns_N, columns_N)
    # End of the row that `lo` lies in, whole rows, start of the row that `hi` lies in (unless that is the first part).
    filled = lo_N < hi_N
    head = filled & (first > row)
    body = filled & (first < last)
    tail = filled & (hi_N > last * columns_N) & (first <= last)
    zero = np.zeros_like(lo_N)
    parts = (
        (head, row, row + 1, lo_N - row * columns_N, head_hi),
        (body, first, last, zero, columns_N),
        (tail, last, last + 1, zero, hi_N - last * columns_N),
    )
    index = np.concatenate([np.nonzero(mask)[0] for mask, *_ in parts])
    lo = np.stack([np.concatenate([p[i][p[0]] for p in parts]) for i in (1, 3)], axis=1)
    hi = np.stack([np.concatenate([p[i][p[0]] for p in parts]) for i in (2, 4)], axis=1)
    order = np.argsort(index, kind="stable")
    return index[order], lo[order], hi[order]


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
