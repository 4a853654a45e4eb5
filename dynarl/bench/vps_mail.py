"""A transition between processes of one node, through their mailboxes alone: no agent, no MPI."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynarl.transport.carrier import Carrier
from dynarl.transport.mailbox import Mailbox
from dynarl.transport.messages import Lanes
from dynarl.transport.mpi import neighbours
from dynarl.transport.planning import Request, plan_rank, schedule_of


class Mail:
    """One transition of this rank through mailboxes, all ranks on one node. Every rank makes one, in the same order."""

    def __init__(
        self, name: str, directory: Path, rank: int, request: Request, endpoint: Any, barrier: Callable[[], None]
    ):
        plans = {r: plan_rank(request, r) for r in request.ranks()}
        self._member, self.bytes_received = rank in plans, 0
        if not self._member:
            barrier()
            return
        places = request.places
        lanes = {r: Lanes.of(schedule_of(request, p), r, places, request.ring_bytes) for r, p in plans.items()}
        self._mailbox = Mailbox.create(directory / f"{name}-{rank}", *lanes[rank].needs())
        barrier()
        near = {
            k: (Mailbox.open(directory / f"{name}-{sender}"), theirs, at)
            for k, (sender, theirs, at) in neighbours(lanes, places)[rank].items()
        }
        opened = {m.path: m for m, _, _ in near.values()}
        near = {k: (opened[m.path], theirs, at) for k, (m, theirs, at) in near.items()}
        self._make = lambda: Carrier(endpoint, lanes[rank], self._mailbox, near)
        self.bytes_received = plans[rank].bytes_received

    def reset(self) -> None:
        if self._member:
            self._mailbox.reset()

    def run(self) -> None:
        if self._member:
            self._make().run(120.0)
