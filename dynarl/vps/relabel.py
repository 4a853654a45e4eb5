"""Which rank takes which place of the destination: the one that holds most of it, all places considered together.

A layout's places (coordinates) are filled by physical ranks in any order. A place's bytes that its rank holds already
need not move, so the best order is an assignment of greatest weight between ranks and places. Inside a node first:
with `ranks_per_node`, whole nodes change places with each other and ranks change places within their node, so that
ranks that shared a node in the given order (a tensor-parallel group) still share one. Where two orders are as good,
the given one stays.

>>> held = np.array([[0, 5], [5, 0]])  # rank 10 holds five bytes of the second place, rank 11 of the first
>>> best(held, (10, 11))
((11, 10), 10)
"""

from __future__ import annotations

import numpy as np

from dynarl.vps.overlap import Cells, expand, volumes

# Entries that are expanded at a time.
BLOCK = 1 << 21


def best(held: np.ndarray, ranks: tuple[int, ...], ranks_per_node: int = 1) -> tuple[tuple[int, ...], int]:
    """(ranks by place, bytes saved against the given order). held [n, n]: bytes that ranks[i] holds of place j."""
    n = len(ranks)
    # Scaled so that all ties together weigh less than one byte.
    weight = held.astype(np.int64) * (n + 1) + np.eye(n, dtype=np.int64)
    if ranks_per_node == 1:
        order = assign(weight)
    else:
        order = _node_by_node(weight, np.array(ranks) // ranks_per_node)
    places = np.arange(n)
    return tuple(ranks[i] for i in order.tolist()), int(held[order, places].sum() - held[places, places].sum())


def _node_by_node(weight: np.ndarray, node: np.ndarray) -> np.ndarray:
    """The row for each column where nodes of equal size change places as a whole, and rows within their node."""
    members = [np.nonzero(node == value)[0] for value in np.unique(node)]
    order = np.arange(len(weight))
    for size in {len(rows) for rows in members}:
        nodes = [rows for rows in members if len(rows) == size]
        values, inner, known = np.zeros((len(nodes), len(nodes)), np.int64), {}, {}
        for i, rows in enumerate(nodes):
            for j, columns in enumerate(nodes):
                part = weight[np.ix_(rows, columns)]
                key = part.tobytes()
                if key not in known:
                    known[key] = assign(part)
                inner[i, j] = known[key]
                values[i, j] = part[known[key], np.arange(size)].sum()
        for j, i in enumerate(assign(values).tolist()):
            order[nodes[j]] = nodes[i][inner[i, j]]
    return order


def assign(weight: np.ndarray) -> np.ndarray:
    """The row for each column of a square matrix of non-negative integers, each row once, so that the sum is greatest.

    Shortest augmenting paths with potentials (Jonker and Volgenant 1987), one row at a time; rows whose best column is
    free are matched at once.

    >>> assign(np.array([[7, 9, 1], [8, 9, 2], [1, 2, 0]])).tolist()
    [1, 0, 2]
    """
    n = len(weight)
    cost = (int(weight.max(initial=0)) - weight).astype(np.int64)
    column_price = cost.min(axis=0)
    row_price = (cost - column_price).min(axis=1)
    row_of, column_of = np.full(n, -1), np.full(n, -1)
    tight = cost - column_price == row_price[:, None]
    for row in range(n):
        free = np.nonzero(tight[row] & (row_of < 0))[0]
        if len(free):
            column = row if row_of[row] < 0 and tight[row, row] else free[0]
            row_of[column], column_of[row] = row, column
    for row in np.nonzero(column_of < 0)[0].tolist():
        _augment(cost, row_price, column_price, row_of, column_of, row)
    return row_of


def _augment(cost, row_price, column_price, row_of, column_of, row: int) -> None:
    """Match one more row, along the cheapest alternating path from it to a free column."""
    n = len(cost)
    far = np.iinfo(np.int64).max
    distance, before, done = np.full(n, far), np.full(n, row), np.zeros(n, bool)
    reached, at = 0, row
    while True:
        step = reached + cost[at] - row_price[at] - column_price
        closer = ~done & (step < distance)
        distance[closer], before[closer] = step[closer], at
        column = int(np.where(done, far, distance).argmin())
        reached = int(distance[column])
        done[column] = True
        if row_of[column] < 0:
            break
        at = int(row_of[column])
    # Keep reduced costs non-negative, and zero along the path.
    gain = reached - distance[done]
    matched = row_of[done]
    column_price[done] -= gain
    row_price[matched[matched >= 0]] += gain[matched >= 0]
    row_price[row] += reached
    while True:
        previous = int(before[column])
        row_of[column] = previous
        column_of[previous], column = column, int(column_of[previous])
        if previous == row:
            return


def overlap(holders: Cells, wanted: Cells, fragments, ranks: tuple[int, ...]) -> np.ndarray:
    """Elements that ranks[i] holds of what ranks[j] is to have, int64 [n, n].

    fragments: (cell of holders, cell of wanted, lo, hi). Cells with the same ranks are counted together, since
    replicas of thousands of tensors are held by few different sets of ranks.
    """
    n = len(ranks)
    result = np.zeros(n * n, np.int64)
    cell, want, lo, hi = fragments
    if not len(cell):
        return result.reshape(n, n)
    place = np.full(max(int(holders.rank.max()), int(wanted.rank.max()), max(ranks)) + 1, -1)
    place[list(ranks)] = np.arange(n)
    set_of, want_set = _same_ranks(holders), _same_ranks(wanted)
    base = len(wanted)
    pairs, first, inverse = np.unique(set_of[cell] * base + want_set[want], return_index=True, return_inverse=True)
    elements = np.zeros(len(pairs), np.int64)
    np.add.at(elements, inverse, volumes(lo, hi))
    cell, want = cell[first], want[first]
    holding, wanting = holders.num_holders[cell], wanted.num_holders[want]
    ends = np.cumsum(holding * wanting)
    at = 0
    while at < len(pairs):
        until = max(at + 1, int(np.searchsorted(ends, (ends[at - 1] if at else 0) + BLOCK, side="right")))
        some = slice(at, until)
        index, nth = expand((holding * wanting)[some])
        i = place[holders.rank[holders.start[cell[some]][index] + nth // wanting[some][index]]]
        j = place[wanted.rank[wanted.start[want[some]][index] + nth % wanting[some][index]]]
        there = i >= 0
        np.add.at(result, (i * n + j)[there], elements[some][index][there])
        at = until
    return result.reshape(n, n)


def _same_ranks(cells: Cells) -> np.ndarray:
    """A number for each cell, equal for cells with the same ranks (and, with a chance below 1e-9, for others)."""
    rng = np.random.default_rng(0)
    mark = rng.integers(0, 2**64, int(cells.rank.max(initial=0)) + 1, dtype=np.uint64)
    sums = np.add.reduceat(mark[cells.rank], cells.start[:-1]) if len(cells) else np.zeros(0, np.uint64)
    return np.unique(sums, return_inverse=True)[1]
