"""One rank's end of a transition: packs what it sends into its mailbox, unpacks what arrives.

A worker drives its carrier itself (`run`). The agent drives that of its node's staged model between two looks at MPI,
one message at a time (`advance`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from dynarl.transport.endpoint import Endpoint
from dynarl.transport.mailbox import FULL, TAKEN, Mailbox, Patience, is_full, mark
from dynarl.transport.messages import Lanes


class Carrier:
    """Order of work: outgoing messages in order, each when its place is free and what it forwards is there; incoming
    ones in order, as they come. Rounds are matchings in one order on all ranks, so somebody can always go on.

    neighbours: {incoming message: (mailbox of the sender on this node, its message, its offset)}.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        lanes: Lanes,
        mailbox: Mailbox,
        neighbours: Mapping[int, tuple[Mailbox, int, int]],
        local: Any,
    ):
        self._endpoint, self._mailbox, self._neighbours, self._local = endpoint, mailbox, neighbours, local
        self._out, self._in = lanes.schedule.outgoing, lanes.schedule.incoming
        self._out_ring, self._in_ring = lanes.out_ring, lanes.in_ring
        self._packed = self._unpacked = self._taken = 0
        self._settled = False
        self.seconds = {"pack_s": 0.0, "unpack_s": 0.0, "local_s": 0.0, "wait_s": 0.0}

    @property
    def done(self) -> bool:
        """All packed, unpacked and copied. Others may still be reading what was packed last."""
        return self._settled

    def advance(self) -> bool:
        """Pack one message, unpack one, or do the local copies at the end. Returns whether anything was done."""
        moved = self._unpack_next()
        moved = self._pack_next() or moved
        if not moved and not self._settled and self._packed == len(self._out) and self._unpacked == len(self._in):
            began = time.perf_counter()
            self._endpoint.copy_local(self._local)
            self.seconds["local_s"] += time.perf_counter() - began
            self._settled = moved = True
        return moved

    def _pack_next(self) -> bool:
        number = self._packed
        if number == len(self._out):
            return False
        message, states = self._out[number], self._mailbox.outgoing
        while self._taken < number and states[self._taken] == TAKEN:
            self._taken += 1
        if self._taken < self._out_ring.freed[number] or self._unpacked < message.after:
            return False
        began = time.perf_counter()
        self._endpoint.pack(message.fragments, self._mailbox.out(self._out_ring.offset[number], message.num_bytes))
        mark(states, number, FULL)
        self._packed += 1
        self.seconds["pack_s"] += time.perf_counter() - began
        return True

    def _unpack_next(self) -> bool:
        number = self._unpacked
        if number == len(self._in):
            return False
        message = self._in[number]
        if number in self._neighbours:
            mailbox, theirs, offset = self._neighbours[number]
            states, data = mailbox.outgoing, mailbox.out(offset, message.num_bytes)
        else:
            theirs, states = number, self._mailbox.incoming
            data = self._mailbox.into(self._in_ring.offset[number], message.num_bytes)
        if not is_full(states, theirs):
            return False
        began = time.perf_counter()
        self._endpoint.unpack(message.fragments, data)
        mark(states, theirs, TAKEN)
        self._unpacked += 1
        self.seconds["unpack_s"] += time.perf_counter() - began
        return True

    def run(self, timeout_s: float) -> dict[str, float]:
        """Carry everything. Returns seconds spent packing, unpacking, copying and waiting.

        Raises Overdue, Aborted with the agent's reason, PeerDied when the agent is gone.
        """
        patience = Patience(timeout_s, "transition", [self._mailbox.check])
        while not self._settled:
            if self.advance():
                patience.moved()
            else:
                patience.sleep()
        self.seconds["wait_s"] = patience.waited_s
        return self.seconds
