"""What one rank sends and receives in a transition, as messages of bounded size: bookkeeping, the same on all sides.

A plan says which fragments (kind, tensor, box) two ranks exchange in which round. Both cut that list by the same rule
into messages of at most `limit` bytes, so sender and receiver agree on every message without talking.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Sequence

from dynarl.transport.mailbox import Ring
from dynarl.vps.box import Box, intersect, volume
from dynarl.vps.steps import Fragment, Local

# What is copied from the old state to the new one at a time.
LOCAL_BYTES = 1 << 20


class Message(NamedTuple):
    """`fragments` one after the other, each row-major, for `peer` or from it. The first `after` incoming messages must
    be unpacked before it is packed: they bring what it forwards. `then`: what is cast from it when it has arrived.
    """

    round: int
    part: int
    peer: int
    num_bytes: int
    fragments: tuple[Fragment, ...]
    after: int = 0
    then: tuple[Local, ...] = ()


@dataclass(frozen=True)
class Places:
    """Which node a rank of a plan lives on: workers first, node by node, then one staging rank per node.

    >>> Places(num_nodes=2, devices_per_node=3).node_of(4), Places(2, 3).staging_rank(1), Places(2, 3).node_of(7)
    (1, 7, 1)
    """

    num_nodes: int
    devices_per_node: int

    def node_of(self, rank: int) -> int:
        workers = self.num_nodes * self.devices_per_node
        if not 0 <= rank < workers + self.num_nodes:
            raise ValueError(f"rank {rank} is on none of {self.num_nodes} nodes with {self.devices_per_node} devices")
        return rank // self.devices_per_node if rank < workers else rank - workers

    def is_staging(self, rank: int) -> bool:
        return rank >= self.num_nodes * self.devices_per_node

    def worker_rank(self, node: int, device: int) -> int:
        return node * self.devices_per_node + device

    def staging_rank(self, node: int) -> int:
        return self.num_nodes * self.devices_per_node + node

    def device_of(self, rank: int) -> int:
        return rank % self.devices_per_node


def num_bytes(fragments: Iterable[Fragment], item_bytes: Mapping[str, int]) -> int:
    return sum(volume(f[2]) * item_bytes[f[0]] for f in fragments)


def cut(
    fragments: Iterable[Fragment], item_bytes: Mapping[str, int], limit: int
) -> Iterator[tuple[int, tuple[Fragment, ...]]]:
    """Lists of fragments of at most `limit` bytes each, in order; a fragment that does not fit is cut along its first
    axis, and a single row that does not fit along its second.

    >>> [(size, f.box) for size, (f,) in cut([Fragment("param", 0, ((0, 3), (0, 4)))], {"param": 2}, 16)]
    [(16, ((0, 2), (0, 4))), (8, ((2, 3), (0, 4)))]
    """
    if limit < max(item_bytes.values(), default=1):
        raise ValueError(f"messages of at most {limit} bytes cannot hold one element")
    part: list[Fragment] = []
    room = limit
    todo = list(reversed([f if isinstance(f, Fragment) else Fragment(*f) for f in fragments]))
    while todo:
        fragment = todo.pop()
        size = volume(fragment.box) * item_bytes[fragment.kind]
        if size == 0:
            continue
        if size <= room:
            part.append(fragment)
            room -= size
            continue
        axis = next((i for i, (lo, hi) in enumerate(fragment.box) if hi - lo > 1), 0)
        lo, hi = fragment.box[axis]
        row_bytes = size // (hi - lo)
        if rows := room // row_bytes:
            # The rest waits: the place left over is smaller than a row.
            part.append(_along(fragment, axis, lo, lo + rows))
            todo.append(_along(fragment, axis, lo + rows, hi))
        elif row_bytes > limit:
            if hi - lo > 1:
                todo.append(_along(fragment, axis, lo + 1, hi))
            todo.append(_along(fragment, axis, lo, lo + 1))
            continue
        else:
            todo.append(fragment)
        yield limit - room + (rows * row_bytes if rows else 0), tuple(part)
        part, room = [], limit
    if part:
        yield limit - room, tuple(part)


def _along(fragment: Fragment, axis: int, lo: int, hi: int) -> Fragment:
    box = fragment.box
    return Fragment(fragment.kind, fragment.tensor, (*box[:axis], (lo, hi), *box[axis + 1 :]))


@dataclass
class Schedule:
    """All messages of one rank, in the order in which they are packed and unpacked."""

    outgoing: list[Message] = field(default_factory=list)
    incoming: list[Message] = field(default_factory=list)
    local: list[Local] = field(default_factory=list)  # what is kept, and cast from it

    @classmethod
    def of(
        cls,
        transfers: Iterable[Any],
        item_bytes: Mapping[str, int],
        limit_of: Callable[[int], int],
        local: Iterable[Local] = (),
        local_limit: int = LOCAL_BYTES,
    ) -> Schedule:
        """From `plan.transfers(rank)`: (round, peer, [fragments out], [fragments in]) per round, rounds ascending; and
        `plan.local(rank)`. limit_of: bytes of a message to or from a peer.

        What is cast from masters is cut as those are: it is done while they are in the cache.
        """
        schedule = cls()
        arriving: dict[tuple[str, int], list[tuple[int, Box]]] = {}
        derived: dict[int, list[Local]] = {}
        kept: list[Local] = []
        for item in local:
            if item.how == "derive":
                derived.setdefault(item.fragment.tensor, []).append(item)
            else:
                kept.append(item)
        for round_, peer, out, into in transfers:
            limit = limit_of(peer)
            for part, (size, fragments) in enumerate(cut(out, item_bytes, limit)):
                after = 1 + max((_last_overlap(f, arriving) for f in fragments), default=-1)
                schedule.outgoing.append(Message(round_, part, peer, size, fragments, after))
            # Noted after the outgoing ones: what arrives in a round can be sent on in a later one only.
            for part, (size, fragments) in enumerate(cut(into, item_bytes, limit)):
                for f in fragments:
                    arriving.setdefault((f.kind, f.tensor), []).append((len(schedule.incoming), f.box))
                then = tuple(cast for f in fragments for cast in _casts(f, derived))
                schedule.incoming.append(Message(round_, part, peer, size, fragments, then=then))
        for item in kept:
            for _, fragments in cut([item.fragment], item_bytes, local_limit):
                for fragment in fragments:
                    schedule.local += [item._replace(fragment=fragment), *_casts(fragment, derived)]
        return schedule

    def sizes(self) -> dict[str, list[list[int]]]:
        """[round, part, peer, bytes] per message: what the agent needs to know of a worker's messages."""
        return {
            "outgoing": [[m.round, m.part, m.peer, m.num_bytes] for m in self.outgoing],
            "incoming": [[m.round, m.part, m.peer, m.num_bytes] for m in self.incoming],
        }

    @classmethod
    def from_sizes(cls, sizes: Mapping[str, Sequence[Sequence[int]]]) -> Schedule:
        """The same without fragments."""
        return cls(*([Message(*m, ()) for m in sizes[way]] for way in ("outgoing", "incoming")))


def _casts(fragment: Fragment, derived: Mapping[int, list[Local]]) -> Iterator[Local]:
    """What is cast from this fragment, as soon as it is there."""
    if fragment.kind == "master":
        for item in derived.get(fragment.tensor, ()):
            if (box := intersect(fragment.box, item.fragment.box)) is not None:
                yield item._replace(fragment=item.fragment._replace(box=box))


def _last_overlap(fragment: Fragment, arriving: Mapping[tuple[str, int], list[tuple[int, Box]]]) -> int:
    for number, box in reversed(arriving.get((fragment.kind, fragment.tensor), ())):
        if all(lo < b and a < hi for (lo, hi), (a, b) in zip(fragment.box, box)):
            return number
    return -1


@dataclass
class Lanes:
    """Where the messages of one rank lie in its mailbox. Messages from a rank of the same node take no place: they are
    read where that rank packed them.
    """

    schedule: Schedule
    out_ring: Ring
    in_ring: Ring
    near: frozenset[int]  # outgoing messages to ranks of the same node

    @classmethod
    def of(cls, schedule: Schedule, rank: int, places: Places, ring_bytes: int) -> Lanes:
        """ring_bytes: of each of the two rings."""
        here = places.node_of(rank)
        far = [m.num_bytes if places.node_of(m.peer) != here else 0 for m in schedule.incoming]
        near = frozenset(k for k, m in enumerate(schedule.outgoing) if places.node_of(m.peer) == here)
        out = Ring([m.num_bytes for m in schedule.outgoing], ring_bytes)
        return cls(schedule, out, Ring(far, ring_bytes), near)

    @property
    def num_states(self) -> int:
        return max(1, len(self.schedule.outgoing), len(self.schedule.incoming))

    def needs(self) -> tuple[int, int, int]:
        """Bytes of the outgoing ring, of the incoming ring, and state bytes, that a mailbox must have."""
        ends = [
            max((at + size for at, size in zip(ring.offset, ring.sizes)), default=0)
            for ring in (self.out_ring, self.in_ring)
        ]
        return ends[0], ends[1], self.num_states
