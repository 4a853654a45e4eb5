"""Collectives as sequences of phases, each a set of messages that are under way together.

For a group of n devices on m nodes with g each, S bytes, a path of latency alpha and bandwidth B:

| operation | S is | algorithm | phases, and time where all paths are alike |
|---|---|---|---|
| all_reduce | what every device has | ring | 2 (n - 1) alpha + 2 (n - 1) / n S / B |
| | | tree | twice P(depth, S), depth = ceil(log2 n): a double binary tree, up and then down |
| | | hierarchical | reduce-scatter in the nodes, all-reduce of S / g along each place, all-gather in the nodes |
| | | hierarchical tree | the same, the middle by trees |
| all_gather, reduce_scatter | the whole result, the whole input | ring | (n - 1) alpha + (n - 1) / n S / B |
| | | hierarchical | along each place on S / g, and in the nodes: first for reduce_scatter, last for all_gather |
| all_to_all | what one device gives to all, itself included | direct | (n - 1) alpha + (n - 1) / n S / B, all at once |
| | | hierarchical | to the neighbour in the place of the receiver, then along the places |
| | | pairwise | (n - 1) steps, in each a whole shift; only where direct has too many messages |
| broadcast | the message | chain | P(n - 1, S) |
| | | tree | P(depth, S): both binary trees, half the message each |
| | | hierarchical | S / g to each neighbour, chains along the places, all-gather in the nodes |
| p2p | the message | direct | alpha + S / B |

P(d, S) = min over c of (d - 1 + c) (alpha + S / (c B)) is a pipeline of depth d that cuts the message into c chunks.

"Along a place" is the ring (tree, chain) of the devices that hold the same place in their nodes, one for each place: on
a rail-optimised network they stay on their rail. Hierarchies exist where each node has the same number of members,
more than one, on more than one node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dynarl.fabric.topology import Topology

# A phase of more messages is not laid out: with so many, from 512 devices to each other, it takes seconds to solve.
MOST_MESSAGES = 2**18
# Below this a chunk's time is its latency, whatever the link's rate.
LEAST_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True)
class Phase:
    """Messages that are under way together, each of `share` times S bytes.

    A phase of steps pays its latency `steps` times; the bytes are those of all steps, since equal steps one after
    another take what their sum takes. A pipeline has a `depth` instead, and cuts its messages into chunks.
    """

    src: np.ndarray
    dst: np.ndarray
    share: float
    steps: int = 0
    depth: int = 0

    def seconds(self, nbytes: float, latency_s: float, seconds_per_byte: float) -> float:
        """`seconds_per_byte` is what the phase takes for each byte of S, all its messages under way."""
        if not self.depth:
            return self.steps * latency_s + nbytes * seconds_per_byte
        wire_s = nbytes * seconds_per_byte
        return self._pipeline_s(self.chunks(nbytes, latency_s, seconds_per_byte), latency_s, wire_s)

    def chunks(self, nbytes: float, latency_s: float, seconds_per_byte: float) -> int:
        """How many chunks are fastest: the time is convex in it, with its minimum where both parts are equal."""
        most = max(1, int(nbytes * self.share // LEAST_CHUNK_BYTES))
        if most == 1 or self.depth == 1:
            return 1
        wire_s = nbytes * seconds_per_byte
        best = np.sqrt((self.depth - 1) * wire_s / latency_s) if latency_s else np.inf
        low = int(min(max(best, 1), most))
        return min((low, min(low + 1, most)), key=lambda chunks: self._pipeline_s(chunks, latency_s, wire_s))

    def _pipeline_s(self, chunks: int, latency_s: float, wire_s: float) -> float:
        return (self.depth - 1 + chunks) * (latency_s + wire_s / chunks)


def algorithms(topology: Topology, op: str, group: Sequence[int]) -> dict[str, list[Phase]]:
    """The phases of every algorithm that the operation has for this group, by name. No phases: nothing is to be sent.

    Raises ValueError on an unknown operation and on devices that are no group.
    """
    if op not in OPERATIONS:
        raise ValueError(f"{op!r} is no collective: one of {', '.join(OPERATIONS)}")
    members = np.asarray(group, dtype=np.int64)
    if not len(members) or len(set(group)) != len(members):
        raise ValueError(f"{op} of devices {list(group)}: give each of at least one device once")
    if op == "p2p" and len(members) != 2:
        raise ValueError(f"p2p of devices {list(group)}: give the sender and the receiver")
    if len(members) == 1:
        return {"none": []}
    return OPERATIONS[op](topology, members)


def _all_reduce(topology: Topology, members: np.ndarray) -> dict[str, list[Phase]]:
    line = np.sort(members)[None]
    found = {"ring": [_ring(line, 1.0, passes=2)], "tree": _trees_up_and_down(line, 1.0)}
    grid = _grid(topology, members)
    if grid is not None:
        share, within = 1 / grid.shape[1], _ring(grid, 1.0)
        found["hierarchical"] = [within, _ring(grid.T, share, passes=2), within]
        found["hierarchical tree"] = [within, *_trees_up_and_down(grid.T, share), within]
    return found


def _gather_or_scatter(topology: Topology, members: np.ndarray) -> dict[str, list[Phase]]:
    """All-gather and reduce-scatter: the same messages, in the opposite order."""
    found = {"ring": [_ring(np.sort(members)[None], 1.0)]}
    grid = _grid(topology, members)
    if grid is not None:
        found["hierarchical"] = [_ring(grid.T, 1 / grid.shape[1]), _ring(grid, 1.0)]
    return found


def _all_to_all(topology: Topology, members: np.ndarray) -> dict[str, list[Phase]]:
    line = np.sort(members)
    n = len(line)
    if n * (n - 1) <= MOST_MESSAGES:
        found = {"direct": [_exchange(line[None], 1.0)]}
    else:
        found = {"pairwise": [Phase(line, np.roll(line, -shift), 1 / n, steps=1) for shift in range(1, n)]}
    grid = _grid(topology, members)
    if grid is not None and grid.size * (len(grid) - 1) <= MOST_MESSAGES:
        found["hierarchical"] = [_exchange(grid, 1.0), _exchange(grid.T, 1.0)]
    return found


def _broadcast(topology: Topology, members: np.ndarray) -> dict[str, list[Phase]]:
    """From the first member."""
    line = _from(members[0], np.sort(members))[None]
    found = {"chain": [_chain(line, 1.0)], "tree": [_tree(line, 1.0)]}
    grid = _grid(topology, members)
    if grid is not None:
        home = int(np.nonzero((grid == members[0]).any(axis=1))[0][0])
        grid = np.roll(grid, -home, axis=0)
        g = grid.shape[1]
        others = grid[0][grid[0] != members[0]]
        scatter = Phase(np.full(g - 1, members[0]), others, 1 / g, steps=g - 1)
        found["hierarchical"] = [scatter, _chain(grid.T, 1 / g), _ring(grid, 1.0)]
    return found


def _p2p(topology: Topology, members: np.ndarray) -> dict[str, list[Phase]]:
    return {"direct": [Phase(members[:1], members[1:], 1.0, steps=1)]}


OPERATIONS: dict[str, Callable[[Topology, np.ndarray], dict[str, list[Phase]]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _gather_or_scatter,
    "reduce_scatter": _gather_or_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "p2p": _p2p,
}


def _grid(topology: Topology, members: np.ndarray) -> np.ndarray | None:
    """Members [nodes, places], where all nodes have as many, more than one, and there is more than one node."""
    line = np.sort(members)
    counts = np.bincount(line // topology.devices_per_node)
    counts = counts[counts > 0]
    if len(counts) == 1 or counts[0] == 1 or (counts != counts[0]).any():
        return None
    return line.reshape(len(counts), counts[0])


def _from(root: int, line: np.ndarray) -> np.ndarray:
    return np.roll(line, -int(np.nonzero(line == root)[0][0]))


def _ring(lines: np.ndarray, share: float, passes: int = 1) -> Phase:
    """Rings side by side: each member of each line sends all but one part of `share` to the next, in every pass."""
    n = lines.shape[1]
    steps = passes * (n - 1)
    return Phase(lines.ravel(), np.roll(lines, -1, axis=1).ravel(), steps / n * share, steps)


def _chain(lines: np.ndarray, share: float) -> Phase:
    return Phase(lines[:, :-1].ravel(), lines[:, 1:].ravel(), share, depth=lines.shape[1] - 1)


def _exchange(lines: np.ndarray, share: float) -> Phase:
    """Each member of each line sends a part of `share` to each other one, all at once."""
    n = lines.shape[1]
    here, there = np.nonzero(~np.eye(n, dtype=bool))
    return Phase(lines[:, here].ravel(), lines[:, there].ravel(), share / n, steps=n - 1)


def tree_parents(n: int) -> np.ndarray:
    """Parent of positions 1 .. n - 1 in a binary tree in order, with 0 above its top. Odd positions are leaves.

    A position with lowest set bit b has its parent at distance b, the side on which b is the right half of a subtree of
    twice the size; where that lies past the end, on the other side.
    """
    position = np.arange(1, n)
    bit = position & -position
    parent = (position ^ bit) | (bit << 1)
    return np.where(parent >= n, position ^ bit, parent)


def _tree(lines: np.ndarray, share: float) -> Phase:
    """Two trees from the first member, half of `share` down each: inner positions of one are leaves of the other."""
    n = lines.shape[1]
    if n == 2:
        return _chain(lines, share)
    child, parent = np.arange(1, n), tree_parents(n)
    # The second tree runs over the other members from the last to the first (n odd), or shifted by one (n even).
    rest = np.arange(1, n)
    other = np.append(0, rest[::-1] if n % 2 else np.roll(rest, 1))
    src, dst = np.append(parent, other[parent]), np.append(child, other[child])
    return Phase(lines[:, src].ravel(), lines[:, dst].ravel(), share / 2, depth=(n - 1).bit_length())


def _trees_up_and_down(lines: np.ndarray, share: float) -> list[Phase]:
    down = _tree(lines, share)
    return [Phase(down.dst, down.src, down.share, depth=down.depth), down]
