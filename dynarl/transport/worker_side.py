"""What a worker does for a transition when its agent tells it to: plan, attach, run, verify, finish or abort.

    plan      make this rank's part of the plan; the agent learns the messages from the answer
    attach    map the mailboxes
    run       pack, unpack, copy; nothing of the old state is changed. Who only sends is done with it
    finish    the new state is the one that counts          abort    it is dropped, the old one goes on

A subclass says what moves: `open_endpoint`. Plans and mailboxes are kept, because the weights go the same way at every
iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynarl.transport.carrier import Carrier
from dynarl.transport.mailbox import Mailbox
from dynarl.transport.messages import Lanes, Schedule
from dynarl.transport.planning import RankPlan, Request, plan_rank, schedule_of


@dataclass
class _Known:
    request: Request
    rank: int
    plan: RankPlan
    schedule: Schedule
    mailbox: Mailbox | None = None
    lanes: Lanes | None = None
    neighbours: dict[int, tuple[Mailbox, int, int]] = field(default_factory=dict)
    endpoint: Any = None
    receives: bool = True


class TransitionSide:
    """Mixin of role workers. Keeps what it knows of each transition under its key."""

    def open_endpoint(self, request: Request, rank: int, plan: RankPlan) -> Any:
        """What this rank holds of the source and will hold of the destination (a transport endpoint), for one run.

        Memory that the destination needs is taken here: failing is cheap now.
        """
        raise NotImplementedError

    def endpoint_done(self, request: Request, endpoint: Any, committed: bool) -> None:
        """The destination counts from here on (committed), or is to be dropped."""

    def make_plan(self, request: Request, rank: int) -> RankPlan:
        return plan_rank(request, rank)

    @property
    def _known(self) -> dict[str, _Known]:
        return self.__dict__.setdefault("_known_transitions", {})

    def _transition(self, key: str) -> _Known:
        if key not in self._known:
            raise RuntimeError(f"transition {key} has not been planned here")
        return self._known[key]

    def do_plan_transition(self, request: dict[str, Any], rank: int) -> dict[str, Any]:
        """Returns {digest, sizes, peak_bytes, bytes_received}."""
        asked = msgspec.convert(request, Request)
        plan = self.make_plan(asked, rank)
        schedule = schedule_of(asked, plan)
        receives = rank in asked.layouts()[1].ranks
        self._known[asked.key] = _Known(asked, rank, plan, schedule, receives=receives)
        return {
            "digest": plan.digest,
            "sizes": schedule.sizes(),
            "peak_bytes": plan.peak_bytes,
            "bytes_received": plan.bytes_received,
        }

    def do_attach_transition(
        self, key: str, mailbox: str, neighbours: dict[str, str], local: list[tuple[int, str, int, int]]
    ) -> None:
        """mailbox: path of this worker's; neighbours: rank -> path, of senders on this node; local: (incoming message,
        rank of its sender, its number there, its offset there).
        """
        known = self._transition(key)
        known.mailbox = Mailbox.open(mailbox)
        known.mailbox.watch_parent()
        known.lanes = Lanes.of(known.schedule, known.rank, known.request.places, known.request.ring_bytes)
        opened = {rank: Mailbox.open(path) for rank, path in neighbours.items()}
        known.neighbours = {number: (opened[str(rank)], theirs, at) for number, rank, theirs, at in local}

    def do_reserve_transition(self, key: str) -> None:
        """Take the memory of the destination. `run` does it where this was not called."""
        known = self._transition(key)
        if known.endpoint is None:
            known.endpoint = self.open_endpoint(known.request, known.rank, known.plan)

    def do_run_transition(self, key: str, limit_s: float) -> dict[str, float]:
        """Move everything. Returns seconds spent in each part."""
        self.do_reserve_transition(key)
        known = self._transition(key)
        if known.mailbox is None or known.lanes is None:
            raise RuntimeError(f"transition {key} has no mailbox here")
        carrier = Carrier(known.endpoint, known.lanes, known.mailbox, known.neighbours)
        seconds = carrier.run(limit_s)
        if not known.receives:
            self._end(key, True)
        return seconds

    def do_verify_transition(self, key: str) -> dict[str, int]:
        """Positional digests by kind of what this rank holds of the destination."""
        return self._transition(key).endpoint.digests()

    def do_finish_transition(self, key: str) -> None:
        self._end(key, True)

    def do_abort_transition(self, key: str) -> None:
        """Back to the old state. The mailbox is not used again."""
        if key in self._known:
            self._end(key, False)
            del self._known[key]

    def _end(self, key: str, committed: bool) -> None:
        known = self._transition(key)
        endpoint, known.endpoint = known.endpoint, None
        if endpoint is not None:
            self.endpoint_done(known.request, endpoint, committed)
