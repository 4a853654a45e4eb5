"""Who sends a fragment to whom, from what is known of its tensor alone: every rank comes to the same choice by itself.

- A receiver on whose node a holder is takes it from there; of several holders, which one rotates with the fragment and
  the receiver, so that replicas share the work. The rotation is even within every chunk.
- Where a tensor goes to more ranks than have it, receivers pass it on: the receivers of a fragment form groups, one on
  each node that has a holder, and as many of the others as there are holders. A holder sends it to one member of its
  group (hop 0), that one to the rest of its node and to one rank of each other node (hop 1), those to the rest of
  their nodes (hop 2). Which member is first, and on each node, rotates too, so that each receiver passes on about as
  much as it gets, and a source sends one copy, whatever the number of receivers.

Hop k of a chunk runs in the step that is hop 0 of the k-th chunk after it: a pipeline, in which what is passed on
always arrived in an earlier step.
"""

from __future__ import annotations

import numpy as np

from dynarl.vps.overlap import Cells

HOPS = 3


def route(
    cells: Cells,
    cell_F: np.ndarray,
    tensor_F: np.ndarray,
    turn_F: np.ndarray,
    fragment_K: np.ndarray,
    receiver_K: np.ndarray,
    ranks_per_node: int,
    worth_F: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(sender, hop) of each of K arrivals, which are sorted by fragment and receiver.

    `cells`: who holds what; `cell_F`: the cell that fragment F is part of; `turn_F`: a number in [0, 1) that is spread
    evenly over the fragments of a chunk; `worth_F`: whether it is big enough to be passed on (what a norm's few bytes
    save is not worth a message of its own).
    """
    if not len(fragment_K):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    base = int(max(cells.rank.max(), receiver_K.max())) + ranks_per_node + 1
    holders = np.repeat(np.arange(len(cells)), cells.num_holders) * base + cells.rank

    def turn(of: np.ndarray, size: np.ndarray) -> np.ndarray:
        return (turn_F[of] * size).astype(np.int64)

    cell_K, node_K = cell_F[fragment_K], receiver_K // ranks_per_node
    _, nth_K, _ = _runs(fragment_K)
    h_K = cells.num_holders[cell_K]
    # Straight from a holder: on the same node if there is one.
    near = cell_K * base + node_K * ranks_per_node
    first = np.searchsorted(holders, near)
    count = np.searchsorted(holders, near + ranks_per_node) - first
    _, nth_on_node, _ = _runs(fragment_K * base + node_K)
    far = count == 0
    first = np.where(far, cells.start[cell_K], first)
    count = np.where(far, h_K, count)
    sender = cells.rank[first + (turn(fragment_K, count) + np.where(far, nth_K, nth_on_node)) % count]
    hop = np.zeros(len(sender), np.int64)

    q_F = np.bincount(fragment_K, minlength=len(cell_F))
    scarce = _scarce_tensors(cells, tensor_F[fragment_K], receiver_K, base)
    forward = worth_F & (q_F > cells.num_holders[cell_F]) & scarce[tensor_F]
    k = np.nonzero(forward[fragment_K])[0]
    if len(k):
        # Groups: the receivers on a node that has a holder, and as many of the others as there are holders.
        away, group = np.nonzero(far[k])[0], node_K[k] + int(cells.num_holders.max()) + 1
        run, nth, size = _runs(fragment_K[k][away])
        groups = np.minimum(h_K[k][away], size[run])
        group[away] = nth * groups // size[run]
        holder = sender[k]
        start = cells.start[cell_K[k][away]]
        holder[away] = cells.rank[start + (turn(fragment_K[k][away], h_K[k][away]) + group[away]) % h_K[k][away]]
        order = np.lexsort((receiver_K[k], group, fragment_K[k]))
        k = k[order]
        sender[k], hop[k] = _passed_on(fragment_K[k], group[order], node_K[k], receiver_K[k], holder[order], turn)
    return sender, hop


def _passed_on(fragment, group, node, receiver, holder, turn) -> tuple[np.ndarray, np.ndarray]:
    """(sender, hop) of arrivals, sorted by fragment, group and receiver, that members of a group pass on to each other.

    `holder`: from whom each would have it if it were the first of its group.
    """
    run, _, size = _runs(fragment * (int(group.max()) + 1) + group)
    start = np.concatenate([[0], np.cumsum(size)])[:-1]
    root = start[run] + turn(fragment, size[run])
    node_run, _, node_size = _runs(run * (int(node.max()) + 1) + node)
    node_start = np.concatenate([[0], np.cumsum(node_size)])[:-1]
    leader = node_start[node_run] + turn(fragment, node_size[node_run])
    me = np.arange(len(fragment))
    is_root = me == root
    from_root = (node == node[root]) | (me == leader)
    sender = np.where(is_root, holder, np.where(from_root, receiver[root], receiver[leader]))
    return sender, np.where(is_root, 0, np.where(from_root, 1, 2))


def _runs(key: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For a sorted key [K]: number of the run of equal values, place within it, and the sizes of the runs."""
    new = np.ones(len(key), bool)
    new[1:] = key[1:] != key[:-1]
    run = np.cumsum(new) - 1
    start = np.nonzero(new)[0]
    return run, np.arange(len(key)) - start[run], np.diff(np.append(start, len(key)))


def _scarce_tensors(cells: Cells, tensor_K: np.ndarray, receiver_K: np.ndarray, base: int) -> np.ndarray:
    """By tensor: does it go to more ranks than have some of it? Otherwise all send alike without passing on."""
    tensors = int(max(cells.tensor.max(), tensor_K.max())) + 1
    have = np.unique(np.repeat(cells.tensor, cells.num_holders) * base + cells.rank) // base
    want = np.unique(tensor_K * base + receiver_K) // base
    return np.bincount(want, minlength=tensors) > np.bincount(have, minlength=tensors)
