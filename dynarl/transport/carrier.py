"""One rank's end of a transition: hands out what it sends, takes what arrives.

A worker drives its carrier itself (`run`). The agent drives that of its node's staged model between two looks at MPI,
one message at a time (`advance`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from dynarl.transport.endpoint import Endpoint
from dynarl.transport.mailbox import (
    FULL,
    OFFERED,
    REFUSED,
    TAKEN,
    Mailbox,
    Patience,
    PeerDied,
    is_now,
    mark,
)
from dynarl.transport.memory import pieces
from dynarl.transport.messages import Lanes, Message
from dynarl.transport.offers import Offered, Offers
from dynarl.vps.steps import Local

# Smaller messages to the same node are packed: saying where they lie takes as long.
IN_PLACE_BYTES = 16 << 10


class Carrier:
    """Order of work: outgoing messages in order, each when its place is free and what it forwards is there; incoming
    ones in order, as they come. Rounds are matchings in one order on all ranks, so somebody can always go on.

    A message to a rank of this node is offered where it lies, which needs no place; the receiver copies it from there.

    neighbours: {incoming message: (mailbox of the sender on this node, its message, its offset)}.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        lanes: Lanes,
        mailbox: Mailbox,
        neighbours: Mapping[int, tuple[Mailbox, int, int]],
    ):
        self._endpoint, self._mailbox, self._neighbours = endpoint, mailbox, neighbours
        self._out, self._in = lanes.schedule.outgoing, lanes.schedule.incoming
        self._out_ring, self._in_ring = lanes.out_ring, lanes.in_ring
        self._local = deque(lanes.schedule.local)
        self._packed = self._unpacked = self._taken = 0
        # Outgoing messages that lie in place, and those of them that somebody may still be reading there.
        self._in_place = self._spans(lanes)
        self._offers = Offers(mailbox, self._in_place) if self._in_place else None
        self._open: deque[int] = deque()
        self._offered: dict[Mailbox, Offered | None] = {}
        self.seconds = {"pack_s": 0.0, "unpack_s": 0.0, "local_s": 0.0, "wait_s": 0.0}

    def _spans(self, lanes: Lanes) -> dict[int, list]:
        spans = {}
        for number in sorted(lanes.near):
            message = self._out[number]
            if message.num_bytes >= IN_PLACE_BYTES:
                found = self._endpoint.spans(message.fragments, arriving=False)
                if found is not None:
                    spans[number] = found
        return spans

    @property
    def done(self) -> bool:
        """All handed out, taken and copied, and nobody reads in this process's memory any more. Others may still be
        reading what was packed last."""
        return not (self._packed < len(self._out) or self._unpacked < len(self._in) or self._local or self._open)

    def advance(self) -> bool:
        """Hand out what can be, take one message, or where there is none copy a piece of what stays here. Returns
        whether anything was done.
        """
        moved = self._hand_out_next()
        moved = self._look_after_offers() or moved
        moved = self._take_next() or moved
        if not moved and self._local:
            self._copy([self._local.popleft()])
            moved = True
        return moved

    def _copy(self, local: Iterable[Local]) -> None:
        began = time.perf_counter()
        self._endpoint.copy_local(local)
        self.seconds["local_s"] += time.perf_counter() - began

    def _hand_out_next(self) -> bool:
        """Offer all messages that come next and lie in place; or pack one."""
        before, states = self._packed, self._mailbox.outgoing
        while self._packed in self._in_place and self._unpacked >= self._out[self._packed].after:
            mark(states, self._packed, OFFERED)
            self._open.append(self._packed)
            self._packed += 1
        number = self._packed
        if number > before:
            return True
        if number == len(self._out) or number in self._in_place or self._unpacked < self._out[number].after:
            return False
        if not self._pack(number):
            return False
        self._packed += 1
        return True

    def _pack(self, number: int) -> bool:
        """Pack a message, if its place is free."""
        message, states = self._out[number], self._mailbox.outgoing
        while self._taken < number and states[self._taken] == TAKEN:
            self._taken += 1
        if self._taken < self._out_ring.freed[number]:
            return False
        began = time.perf_counter()
        self._endpoint.pack(message.fragments, self._mailbox.out(self._out_ring.offset[number], message.num_bytes))
        mark(states, number, FULL)
        self.seconds["pack_s"] += time.perf_counter() - began
        return True

    def _look_after_offers(self) -> bool:
        """Forget what was taken, pack what was refused."""
        states = self._mailbox.outgoing
        while self._open and states[self._open[0]] == TAKEN:
            self._open.popleft()
        refused = states.tobytes().find(REFUSED) if self._open else -1
        return refused >= 0 and self._pack(refused)

    def _take_next(self) -> bool:
        number = self._unpacked
        if number == len(self._in):
            return False
        message = self._in[number]
        if number in self._neighbours:
            mailbox, theirs, offset = self._neighbours[number]
            states, data = mailbox.outgoing, mailbox.out(offset, message.num_bytes)
            if is_now(states, theirs, OFFERED):
                return self._read(message, mailbox, theirs)
        else:
            theirs, states = number, self._mailbox.incoming
            data = self._mailbox.into(self._in_ring.offset[number], message.num_bytes)
        if not is_now(states, theirs, FULL):
            return False
        began = time.perf_counter()
        self._endpoint.unpack(message.fragments, data)
        self._has_come(message, states, theirs, began)
        return True

    def _has_come(self, message: Message, states: np.ndarray, theirs: int, began: float) -> None:
        mark(states, theirs, TAKEN)
        self._unpacked += 1
        self.seconds["unpack_s"] += time.perf_counter() - began
        if message.then:
            self._copy(message.then)

    def _read(self, message: Message, mailbox: Mailbox, theirs: int) -> bool:
        """Take a message where it lies in the sender's memory, or refuse it."""
        began = time.perf_counter()
        offered = self._offers_of(mailbox)
        places = self._endpoint.spans(message.fragments, arriving=True) if offered is not None else None
        if places is None:
            self._refuse(mailbox)
            return True
        try:
            offered.read(theirs, pieces(places))
        except OSError as error:
            self._mailbox.check()
            raise PeerDied(f"{mailbox.path.name}: {error}") from None
        self._has_come(message, mailbox.outgoing, theirs, began)
        return True

    def _offers_of(self, mailbox: Mailbox) -> Offered | None:
        if mailbox not in self._offered:
            try:
                self._offered[mailbox] = Offered(mailbox)
            except OSError:
                self._offered[mailbox] = None
        return self._offered[mailbox]

    def _refuse(self, mailbox: Mailbox) -> None:
        """Have all packed that this sender offers at the moment."""
        for sender, theirs, _ in self._neighbours.values():
            if sender is mailbox and sender.outgoing[theirs] == OFFERED:
                mark(sender.outgoing, theirs, REFUSED)

    def run(self, timeout_s: float) -> dict[str, float]:
        """Carry everything. Returns seconds spent packing, unpacking (and reading in place), copying and waiting.

        Raises Overdue, Aborted with the agent's reason, PeerDied when the agent is gone, or a neighbour's memory.
        """
        patience = Patience(timeout_s, "transition", [self._mailbox.check])
        while not self.done:
            if self.advance():
                patience.moved()
            else:
                patience.sleep()
        self.seconds["wait_s"] = patience.waited_s
        return self.seconds
