"""The wire between nodes: agents move the messages of their local ranks by MPI, in one bounded phase.

MPI reads and writes the mailboxes themselves. Every receive is posted as soon as its place is free and every send as
soon as its message is packed, in the order of the rounds; nothing blocks. An agent looks at MPI often only while a
message is on the wire, else it sleeps: an idle process must not burn a core in MPI. Messages between ranks of one node
never come here (see `Carrier`).

A send that has completed may not have left: MPI carries on with it only while it is called. So no agent goes away
before all have what they wait for; they meet at a barrier at the end.

Tags: both agents of a pair number the messages between them by (round, sender, part), so a message has a tag of its own
in its transition, and messages of two transitions that follow each other differ too.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Callable, Iterable, Mapping, NamedTuple, Sequence

from mpi4py import MPI

from dynarl.transport.carrier import Carrier
from dynarl.transport.mailbox import FULL, TAKEN, Mailbox, Patience, is_now, mark
from dynarl.transport.messages import Lanes, Message, Places

# Highest tag that MPI promises everywhere is 32767.
TAG_SPACE = 32000
# Longest sleep between two looks at MPI while a message is on the wire: what the network's buffers hold meanwhile.
WIRE_PAUSE_S = 1e-4
# How long the event loop may be kept from other work. Its own timers are too coarse here: epoll counts milliseconds.
LOOP_S = 1e-3
# When nothing has moved for so long somebody is late, or stuck: then a look in so many seconds is enough.
STILL_S, STILL_PAUSE_S = 0.1, 1e-2
# Sends, and receives, that one rank has posted at a time: enough to fill a wire, few enough to look at often.
MOST_POSTED = 16


class ExchangeError(RuntimeError):
    """Two ranks do not agree on the messages between them."""


@dataclass
class Lane:
    """One local rank: its messages, its mailbox, and a carrier if the agent itself packs and unpacks for it."""

    rank: int
    lanes: Lanes
    mailbox: Mailbox
    carrier: Carrier | None = None


class _Way(NamedTuple):
    """One message to or from another node."""

    number: int  # in its rank's list
    agent: int  # rank of the other agent in the communicator
    tag: int
    offset: int
    num_bytes: int
    freed: int  # incoming: how many of the first messages must have been unpacked


class Exchange:
    """The messages of one transition that cross between this node and others. Made once, run as often as it is wanted.

    agent_of: node -> rank of its agent in the communicator.
    """

    def __init__(self, lanes: Sequence[Lane], places: Places, agent_of: Mapping[int, int]):
        self._lanes = lanes
        sent = tags(places, ((lane.rank, m) for lane in lanes for m in lane.lanes.schedule.outgoing), sends=True)
        received = tags(places, ((lane.rank, m) for lane in lanes for m in lane.lanes.schedule.incoming), sends=False)
        self._sends: list[list[_Way]] = []
        self._receives: list[list[_Way]] = []
        for lane in lanes:
            for numbers, messages, ring, ways in (
                (sent, lane.lanes.schedule.outgoing, lane.lanes.out_ring, self._sends),
                (received, lane.lanes.schedule.incoming, lane.lanes.in_ring, self._receives),
            ):
                far = [
                    (k, m, agent_of[places.node_of(m.peer)])
                    for k, m in enumerate(messages)
                    if (lane.rank, k) in numbers
                ]
                ways.append(
                    [
                        _Way(k, agent, numbers[lane.rank, k], ring.offset[k], m.num_bytes, ring.freed[k])
                        for k, m, agent in far
                    ]
                )
        self.bytes_sent = sum(way.num_bytes for ways in self._sends for way in ways)
        self.bytes_received = sum(way.num_bytes for ways in self._receives for way in ways)

    async def run(
        self,
        communicator: MPI.Intracomm,
        transition: int,
        timeout_s: float,
        checks: Iterable[Callable[[], None]] = (),
    ) -> dict[str, float]:
        """Move everything; returns when all agents of the communicator have what they wait for: all must take part.
        Returns {"wire_s", "waited_s"}: seconds until the last message had arrived here, and asleep.

        The event loop gets its turn every millisecond. Raises Overdue at the deadline, PeerDied when a worker here is
        gone, and what a check raises. After an error the communicator and the mailboxes must not be used again: a late
        message may still write into them.
        """
        run = _Run(self._lanes, self._sends, self._receives, communicator, transition)
        checks = [*(lane.mailbox.check for lane in self._lanes), *checks]
        patience = Patience(timeout_s, f"exchange of transition {transition}", checks)
        began = yielded = moved = time.monotonic()
        wire_s = waited_s = 0.0
        barrier = None
        while barrier is None or not barrier.Test():
            now = time.monotonic()
            if run.advance():
                patience.moved()
                moved = now
            elif barrier is None and run.done:
                barrier = communicator.Ibarrier()
            elif now - moved > STILL_S:
                patience.next_pause()
                await asyncio.sleep(STILL_PAUSE_S)
                waited_s += STILL_PAUSE_S
            else:
                pause = min(patience.next_pause(), WIRE_PAUSE_S if run.posted or barrier else LOOP_S)
                time.sleep(pause)
                waited_s += pause
            now = time.monotonic()
            if run.posted:
                wire_s = now - began
            if now - yielded > LOOP_S:
                yielded = now
                await asyncio.sleep(0)
        return {"wire_s": wire_s, "waited_s": waited_s}


class _Run:
    """One pass over an exchange: what is posted, and what comes next."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        sends: list[list[_Way]],
        receives: list[list[_Way]],
        communicator: MPI.Intracomm,
        transition: int,
    ):
        self._communicator = communicator
        # Successive transitions start far apart, so that one's last message cannot be taken for the next one's first.
        self._first_tag = transition * 7919 % TAG_SPACE
        self._ends = [_End(lane, s, r) for lane, s, r in zip(lanes, sends, receives)]
        self._requests: list[MPI.Request] = []
        self._of_request: list[tuple[_End, bool, int]] = []

    @property
    def posted(self) -> bool:
        return bool(self._requests)

    @property
    def done(self) -> bool:
        return not self._requests and all(end.done for end in self._ends)

    def advance(self) -> bool:
        """Post what can be posted, take note of what has completed, let local carriers work. Returns whether anything
        happened.
        """
        moved = False
        for end in self._ends:
            if end.lane.carrier is not None and not end.lane.carrier.done:
                moved = end.lane.carrier.advance() or moved
            while (way := end.next_receive()) is not None:
                view = end.lane.mailbox.into(way.offset, way.num_bytes)
                self._post(end, False, way.number, self._communicator.Irecv(_buffer(view), way.agent, self._tag(way)))
                moved = True
            while (way := end.next_send()) is not None:
                view = end.lane.mailbox.out(way.offset, way.num_bytes)
                self._post(end, True, way.number, self._communicator.Isend(_buffer(view), way.agent, self._tag(way)))
                moved = True
        return self._complete() or moved

    def _tag(self, way: _Way) -> int:
        return (self._first_tag + way.tag) % TAG_SPACE

    def _post(self, end: _End, sent: bool, number: int, request: MPI.Request) -> None:
        self._requests.append(request)
        self._of_request.append((end, sent, number))

    def _complete(self) -> bool:
        if not self._requests or not (finished := MPI.Request.Testsome(self._requests)):
            return False
        for index in finished:
            end, sent, number = self._of_request[index]
            if sent:
                mark(end.lane.mailbox.outgoing, number, TAKEN)
                end.sending -= 1
            else:
                mark(end.lane.mailbox.incoming, number, FULL)
                end.receiving -= 1
        gone = set(finished)
        self._requests = [r for i, r in enumerate(self._requests) if i not in gone]
        self._of_request = [r for i, r in enumerate(self._of_request) if i not in gone]
        return True


class _End:
    """One local rank in a run: the next message to send and to receive."""

    def __init__(self, lane: Lane, sends: list[_Way], receives: list[_Way]):
        self.lane, self._sends, self._receives = lane, sends, receives
        self._sent = self._received = self._taken = self.sending = self.receiving = 0

    @property
    def done(self) -> bool:
        return (
            self._sent == len(self._sends)
            and self._received == len(self._receives)
            and (self.lane.carrier is None or self.lane.carrier.done)
        )

    def next_receive(self) -> _Way | None:
        if self._received == len(self._receives) or self.receiving >= MOST_POSTED:
            return None
        way, states = self._receives[self._received], self.lane.mailbox.incoming
        sizes = self.lane.lanes.in_ring.sizes
        # Messages without a place (from this node) never stand in the way of one that has one.
        while self._taken < way.freed and (states[self._taken] == TAKEN or not sizes[self._taken]):
            self._taken += 1
        if self._taken < way.freed:
            return None
        self._received += 1
        self.receiving += 1
        return way

    def next_send(self) -> _Way | None:
        if self._sent == len(self._sends) or self.sending >= MOST_POSTED:
            return None
        way = self._sends[self._sent]
        if not is_now(self.lane.mailbox.outgoing, way.number, FULL):
            return None
        self._sent += 1
        self.sending += 1
        return way


def tags(places: Places, messages: Iterable[tuple[int, Message]], sends: bool) -> dict[tuple[int, int], int]:
    """(rank, number of the message in its list) -> its number among all that go the same way between the same two
    nodes, messages inside a node left out. `messages`: (local rank, message), the messages of a rank in its order.
    """
    count: dict[int, int] = {}
    between: dict[int, list[tuple[int, int, int, int, int]]] = {}
    for rank, message in messages:
        number = count[rank] = count.get(rank, -1) + 1
        node = places.node_of(message.peer)
        if node != places.node_of(rank) and message.num_bytes:
            sender = rank if sends else message.peer
            between.setdefault(node, []).append((message.round, sender, message.part, rank, number))
    return {(rank, number): tag for listed in between.values() for tag, (*_, rank, number) in enumerate(sorted(listed))}


def neighbours(lanes: Mapping[int, Lanes], places: Places) -> dict[int, dict[int, tuple[int, int, int]]]:
    """For each local rank: {incoming message: (local sender, number of its outgoing message, offset in its ring)}.

    Raises ExchangeError where two ranks of this node do not agree on the messages between them.
    """
    packed = {
        (rank, m.peer, m.round, m.part): (number, ring.out_ring.offset[number], m.num_bytes)
        for rank, ring in lanes.items()
        for number, m in enumerate(ring.schedule.outgoing)
        if m.peer in lanes
    }
    result: dict[int, dict[int, tuple[int, int, int]]] = {}
    for rank, ring in lanes.items():
        result[rank] = {}
        for number, message in enumerate(ring.schedule.incoming):
            if places.node_of(message.peer) != places.node_of(rank):
                continue
            found = packed.pop((message.peer, rank, message.round, message.part), None)
            if found is None or found[2] != message.num_bytes:
                raise ExchangeError(
                    f"round {message.round}: rank {rank} expects {message.num_bytes} bytes from rank {message.peer}, "
                    f"which sends {found[2] if found else 'none'}"
                )
            result[rank][number] = (message.peer, *found[:2])
    if packed:
        (sender, receiver, round_, _), (_, _, size) = next(iter(packed.items()))
        raise ExchangeError(f"round {round_}: rank {sender} sends {size} bytes to rank {receiver}, which expects none")
    return result


def _buffer(view: memoryview) -> list:
    return [view, MPI.BYTE]
