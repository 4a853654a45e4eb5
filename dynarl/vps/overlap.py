"""Where the pieces of two layouts overlap: the fragments of which a transition is made.

Layouts are close to grids: of one tensor there are few distinct boxes, each held by many ranks. So pieces are first
grouped into cells (a box and its holders), cells of both sides are joined tensor by tensor through sorted rows, and
replicas are only multiplied out at the end. No loop runs over tensors or ranks.

Letters in array shapes: N pieces, C cells, H holders of all cells together, F fragments, A = 2 axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynarl.vps.box import Pieces

# Candidate pairs that are tested at a time; bounds the memory of a join.
JOIN_BLOCK = 1 << 21
# Coordinates below this are packed with the tensor into one sort key.
PACKED = 1 << 21


@dataclass(frozen=True, eq=False)
class Cells:
    """Distinct boxes, sorted by tensor and then by place, each with the ranks that hold it, ascending."""

    tensor: np.ndarray  # int64 [C]
    lo: np.ndarray  # int64 [C, A]
    hi: np.ndarray  # int64 [C, A]
    start: np.ndarray  # int64 [C + 1]: holders of cell c are rank[start[c] : start[c + 1]]
    rank: np.ndarray  # int64 [H]

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def num_holders(self) -> np.ndarray:
        return np.diff(self.start)

    @property
    def volume(self) -> np.ndarray:
        return volumes(self.lo, self.hi)


def volumes(lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """Elements of each box."""
    return (hi[:, 0] - lo[:, 0]) * (hi[:, 1] - lo[:, 1])


def concat(*pieces: Pieces) -> Pieces:
    """Pieces of several sources together, in no order."""
    if len(pieces) == 1:
        return pieces[0]
    return Pieces(*(np.concatenate([getattr(p, f) for p in pieces]) for f in ("rank", "tensor", "lo", "hi")))


def expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts [N]: the index into N of each of their sum's items, and its ordinal there.

    >>> [a.tolist() for a in expand(np.array([2, 0, 1]))]
    [[0, 0, 2], [0, 1, 0]]
    """
    index = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return index, np.arange(len(index)) - first[index]


def group(pieces: Pieces) -> Cells:
    """The distinct boxes of pieces in any order; a rank that names a box twice counts once."""
    tensor, lo, hi = pieces.tensor.astype(np.int64), pieces.lo, pieces.hi
    if not len(tensor):
        return Cells(tensor, lo, hi, np.zeros(1, np.int64), tensor)
    if int(hi.max()) < PACKED:
        keys = (pieces.rank, hi[:, 0] * PACKED + hi[:, 1], (tensor * PACKED + lo[:, 0]) * PACKED + lo[:, 1])
    else:
        keys = (pieces.rank, hi[:, 1], hi[:, 0], lo[:, 1], lo[:, 0], tensor)
    order = np.lexsort(keys)
    boxes = [key[order] for key in keys[1:]]
    new = np.ones(len(order), bool)
    new[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in boxes])
    rank = pieces.rank[order].astype(np.int64)
    keep = new.copy()
    keep[1:] |= rank[1:] != rank[:-1]
    first = np.nonzero(new)[0]
    start = np.concatenate([(np.cumsum(keep) - 1)[first], [int(keep.sum())]])
    chosen = order[first]
    return Cells(tensor[chosen], lo[chosen], hi[chosen], start, rank[keep])


def cut(pieces: Pieces, axis: int, tensor: np.ndarray, at: np.ndarray) -> Pieces:
    """Pieces cut along `axis` at the places `at` [K] of the tensors `tensor` [K], which are sorted by both."""
    if not len(tensor) or not len(pieces):
        return pieces
    base = int(max(at.max(), pieces.hi[:, axis].max())) + 1
    keys, of = tensor.astype(np.int64) * base + at, pieces.tensor.astype(np.int64) * base
    first = np.searchsorted(keys, of + pieces.lo[:, axis], side="right")
    counts = np.searchsorted(keys, of + pieces.hi[:, axis], side="left") - first
    if not counts.any():
        return pieces
    index, nth = expand(counts + 1)
    lo, hi = pieces.lo[index], pieces.hi[index]
    places = first[index] + nth
    inner = nth > 0
    lo[inner, axis] = at[places[inner] - 1]
    inner = nth < counts[index]
    hi[inner, axis] = at[places[inner]]
    return Pieces(pieces.rank[index], pieces.tensor[index], lo, hi)


def join(left: Cells | Pieces, right: Cells) -> tuple[np.ndarray, np.ndarray]:
    """Indices (into left, into right) of all pairs of boxes that overlap. `right` is sorted by tensor and first row."""
    if not len(left) or not len(right):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    base = int(max(left.hi[:, 0].max(), right.hi[:, 0].max())) + 1
    of, there = left.tensor.astype(np.int64) * base, right.tensor.astype(np.int64) * base
    # Rows end in no order; up to which box none of the earlier ones reaches the row is found through a running maximum.
    first = np.searchsorted(np.maximum.accumulate(there + right.hi[:, 0]), of + left.lo[:, 0], side="right")
    counts = np.maximum(np.searchsorted(there + right.lo[:, 0], of + left.hi[:, 0], side="left") - first, 0)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    ends = np.cumsum(counts)
    at = 0
    while at < len(counts):
        until = max(at + 1, int(np.searchsorted(ends, (ends[at - 1] if at else 0) + JOIN_BLOCK, side="right")))
        index, nth = expand(counts[at:until])
        a, b = index + at, first[at:until][index] + nth
        hit = ((left.lo[a] < right.hi[b]) & (right.lo[b] < left.hi[a])).all(axis=1)
        found.append((a[hit], b[hit]))
        at = until
    return np.concatenate([a for a, _ in found]), np.concatenate([b for _, b in found])


def disjoint(pieces: Pieces) -> Cells:
    """Cells that do not overlap, from pieces that may.

    Where some do, the pieces of that tensor are cut at the first and last rows of all of them, and then the slabs
    between two such rows at the columns of those within the slab.
    """
    cells = group(pieces)
    one, other = join(cells, cells)
    overlapping = np.unique(cells.tensor[one[one != other]])
    if not len(overlapping):
        return cells
    mine = np.isin(pieces.tensor, overlapping)
    some = pieces.select(mine)
    some = cut(some, 0, *_edges(some, 0))
    _, slab = np.unique(
        some.tensor.astype(np.int64) * (int(some.lo[:, 0].max()) + 1) + some.lo[:, 0], return_inverse=True
    )
    slabs = Pieces(some.rank, slab, some.lo, some.hi)
    of_slab = np.zeros(int(slab.max()) + 1, np.int64)
    of_slab[slab] = some.tensor
    slabs = cut(slabs, 1, *_edges(slabs, 1))
    return group(concat(pieces.select(~mine), Pieces(slabs.rank, of_slab[slabs.tensor], slabs.lo, slabs.hi)))


def _edges(pieces: Pieces, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Where pieces begin and end along an axis: (tensor, place), sorted, each once."""
    base = int(pieces.hi[:, axis].max()) + 1
    of = pieces.tensor.astype(np.int64) * base
    return np.divmod(np.unique(np.concatenate([of + pieces.lo[:, axis], of + pieces.hi[:, axis]])), base)


def holds(cells: Cells, cell: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Whether `rank` [K] is among the holders of `cell` [K]."""
    if not len(cells.rank) or not len(cell):
        return np.zeros(len(cell), bool)
    base = int(max(cells.rank.max(), rank.max())) + 1
    keys = np.repeat(np.arange(len(cells)), cells.num_holders) * base + cells.rank
    wanted = cell * base + rank
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return keys[at] == wanted


def subtract(pieces: Pieces, minus: Pieces) -> tuple[Pieces, Pieces]:
    """(what is left of each rank's pieces without the same rank's `minus`, what was taken away)."""
    if not len(minus) or not len(pieces):
        return pieces, pieces.select(np.zeros(0, np.int64))
    # A (rank, tensor) is a tensor of its own to the join.
    base = int(max(pieces.tensor.max(), minus.tensor.max())) + 1

    def by_rank(some: Pieces) -> Pieces:
        owner = some.rank.astype(np.int64) * base + some.tensor
        return Pieces(some.rank, owner, some.lo, some.hi)

    mine, theirs = by_rank(pieces), by_rank(minus)
    order = np.lexsort((theirs.lo[:, 1], theirs.lo[:, 0], theirs.tensor))
    theirs = theirs.select(order)
    p, m = join(mine, theirs)
    lo, hi = np.maximum(pieces.lo[p], theirs.lo[m]), np.minimum(pieces.hi[p], theirs.hi[m])
    taken = Pieces(pieces.rank[p], pieces.tensor[p], lo, hi)
    counts = np.bincount(p, minlength=len(pieces))
    first = np.cumsum(counts) - counts
    by_piece = np.argsort(p, kind="stable")
    lo, hi = lo[by_piece], hi[by_piece]

    owner, left_lo, left_hi = np.arange(len(pieces)), pieces.lo, pieces.hi
    for nth in range(int(counts.max(initial=0))):
        active = counts[owner] > nth
        a_owner, a_lo, a_hi = owner[active], left_lo[active], left_hi[active]
        cut_lo = np.clip(lo[first[a_owner] + nth], a_lo, a_hi)
        cut_hi = np.clip(hi[first[a_owner] + nth], a_lo, a_hi)
        apart = (cut_lo >= cut_hi).any(axis=1)
        parts = [(owner[~active], left_lo[~active], left_hi[~active]), (a_owner[apart], a_lo[apart], a_hi[apart])]
        a_owner, a_lo, a_hi, cut_lo, cut_hi = (x[~apart] for x in (a_owner, a_lo, a_hi, cut_lo, cut_hi))
        for axis in (0, 1):
            for side_lo, side_hi in ((a_lo, cut_lo), (cut_hi, a_hi)):
                new_lo, new_hi = a_lo.copy(), a_hi.copy()
                new_lo[:, axis], new_hi[:, axis] = side_lo[:, axis], side_hi[:, axis]
                if axis == 1:
                    new_lo[:, 0], new_hi[:, 0] = cut_lo[:, 0], cut_hi[:, 0]
                some = new_lo[:, axis] < new_hi[:, axis]
                parts.append((a_owner[some], new_lo[some], new_hi[some]))
        owner, left_lo, left_hi = (np.concatenate(column) for column in zip(*parts))
    order = np.lexsort((left_lo[:, 1], left_lo[:, 0], owner))
    owner = owner[order]
    return Pieces(pieces.rank[owner], pieces.tensor[owner], left_lo[order], left_hi[order]), taken
