"""What an agent does when model state moves between two layouts.

    prepare   local workers and the staged model of this node plan their part; mailboxes get their memory
    reserve   so does the new state (otherwise at the start of run)
    run       workers pack and unpack, this agent moves the messages between nodes by MPI
    verify    digests of what arrived
    finish    the staged file gets its name, workers switch             abort   everything new is dropped

The controller asks all members for each phase and goes on when all have answered; an error anywhere makes it abort
everywhere. What was prepared is kept under the key of the request, so that weights, which go the same way at every
iteration, are not planned again.

A run that failed half-way may leave a message on the wire that still lands in a mailbox or on a communicator. So after
a failure neither is used again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Awaitable, Callable, Mapping

import msgspec

from dynarl.agent.remapper import PhaseTimeout, Remapper
from dynarl.transport.carrier import Carrier
from dynarl.transport.mailbox import Mailbox, Overdue
from dynarl.transport.memory import Span
from dynarl.transport.messages import Lanes, Schedule
from dynarl.transport.mpi import Exchange, Lane, neighbours
from dynarl.transport.planning import RankPlan, Request, plan_rank, schedule_of
from dynarl.transport.staged import StagedModel
from dynarl.vps.train_layout import TrainLayout

log = logging.getLogger(__name__)

# A worker that was told to stop answers within its longest sleep, unless it is in the middle of one message.
STOP_S = 10.0
# What the event loop may look through by itself.
LOOP_BYTES = 8 << 20


class StagingEnd:
    """Endpoint of a node's staging rank: read from one staged model, written to another."""

    def __init__(self, source: StagedModel | None, destination: StagedModel | None):
        self.source, self.destination = source, destination

    def pack(self, fragments: Any, out: memoryview) -> None:
        # What a node forwards it has received before, into its own destination.
        model = self.source or self.destination
        model.pack(fragments, out)

    def unpack(self, fragments: Any, data: memoryview) -> None:
        self.destination.unpack(fragments, data)

    def spans(self, fragments: Any, arriving: bool) -> list[Span] | None:
        # Workers have no business in the agent's memory: what they get is packed.
        return self.destination.spans(fragments) if arriving else None

    def copy_local(self, local: Any) -> None:
        (self.destination or self.source).copy_local(local)

    def digests(self) -> dict[str, int]:
        return (self.destination or self.source).digests()


@dataclass
class _Prepared:
    request: Request
    digest: int
    exchange: Exchange
    lanes: list[Lane]
    workers: dict[int, str]  # rank -> name
    receivers: list[str]  # the workers that hold some of the destination
    verifiers: list[str]  # those, and where the trainer changes its layout who holds some of the source: to compare
    pids: dict[str, int | None]
    local: dict[int, dict[int, tuple[int, int, int]]]
    staging: RankPlan | None
    answer: dict[str, Any]
    staged: StagedModel | None = None
    spoilt: bool = False  # a run failed: messages may still be on their way


class Transitions:
    """The transitions of one node. Ranks of MPI are world ranks.

    call(name, method, timeout_s=..., **args): to a local worker; name_of(device): of the worker that holds state;
    pid_of(name): of its process, None if it is not running; directory: for mailboxes, below the staging directory.
    """

    def __init__(
        self,
        mpi_rank: int,
        remapper: Remapper,
        call: Callable[..., Awaitable[Any]],
        name_of: Callable[[int], str],
        pid_of: Callable[[str], int | None],
        directory: Path,
        plan: Callable[[Request, int], RankPlan] = plan_rank,
    ):
        self._rank, self._remapper, self._call = mpi_rank, remapper, call
        self._name_of, self._pid_of = name_of, pid_of
        self._directory, self._plan = directory, plan
        self._prepared: dict[str, _Prepared] = {}
        self._mailboxes: dict[int, Mailbox] = {}
        self._stop: str | None = None
        # Mailboxes that a late message may still write into: their memory must stay mapped.
        self._retired: list[Mailbox] = []

    async def prepare(self, request: dict[str, Any], nodes: list[int], timeout_s: float) -> dict[str, Any]:
        """nodes: the MPI rank of each node's agent, in the order of the request's places.

        Returns {key, digest, peak_bytes, bytes_received, bytes_sent, cached, seconds}; bytes: from and to other
        nodes.
        Raises NoStagingMemory, ExchangeError, CallError.
        """
        began = time.perf_counter()
        asked = msgspec.convert(request, Request)
        key = asked.key
        if (known := self._prepared.get(key)) is not None:
            if not known.spoilt and all(self._pid_of(name) == pid for name, pid in known.pids.items()):
                return known.answer | {"cached": True, "seconds": time.perf_counter() - began}
            self._drop_all(late=known.spoilt)
        places, here = asked.places, nodes.index(self._rank)
        mine = [rank for rank in asked.ranks() if places.node_of(rank) == here]
        workers = {r: self._name_of(places.device_of(r)) for r in mine if not places.is_staging(r)}
        answers = dict(
            zip(
                workers,
                await asyncio.gather(
                    *(
                        self._call(name, "plan_transition", timeout_s=timeout_s, request=request, rank=rank)
                        for rank, name in workers.items()
                    )
                ),
            )
        )
        schedules = {rank: Schedule.from_sizes(answer["sizes"]) for rank, answer in answers.items()}
        digests = {rank: answer["digest"] for rank, answer in answers.items()}
        peak = sum(answer["peak_bytes"] for answer in answers.values())
        staging = None
        for rank in mine:
            if places.is_staging(rank):
                staging = self._plan(asked, rank)
                schedules[rank] = schedule_of(asked, staging)
                digests[rank] = staging.digest
                peak += staging.peak_bytes
        if len(set(digests.values())) > 1:
            raise ValueError(f"ranks of one node made different plans: {digests}")
        lanes = {rank: Lanes.of(schedule, rank, places, asked.ring_bytes) for rank, schedule in schedules.items()}
        local = neighbours(lanes, places)
        pids = {name: self._pid_of(name) for name in workers.values()}
        self._make_mailboxes(lanes)
        for rank, name in workers.items():
            if (pid := pids[name]) is not None:
                self._mailboxes[rank].watch(pid)
        agent_of = {node: sorted(nodes).index(rank) for node, rank in enumerate(nodes)}
        listed = [Lane(rank, lanes[rank], self._mailboxes[rank]) for rank in mine]
        exchange = Exchange(listed, places, agent_of)
        await asyncio.gather(*(self._attach(key, name, rank, local[rank], timeout_s) for rank, name in workers.items()))
        answer = {
            "key": key,
            "digest": next(iter(digests.values()), 0),
            "peak_bytes": peak,
            "bytes_received": exchange.bytes_received,
            "bytes_sent": exchange.bytes_sent,
        }
        _, destination = asked.layouts()
        receivers = [name for rank, name in workers.items() if rank in destination.ranks]
        self._prepared[key] = _Prepared(
            asked,
            answer["digest"],
            exchange,
            listed,
            workers,
            receivers,
            list(workers.values()) if isinstance(destination, TrainLayout) else receivers,
            pids,
            local,
            staging,
            answer,
        )
        return answer | {"cached": False, "seconds": time.perf_counter() - began}

    def _make_mailboxes(self, lanes: Mapping[int, Lanes]) -> None:
        """A mailbox for each rank that is large enough. When one has become too small all are made anew, and what was
        prepared goes: the workers have the old ones mapped.
        """
        needs = {rank: ring.needs() for rank, ring in lanes.items()}
        old = {r: (m.out_bytes, m.in_bytes, m.num_states) for r, m in self._mailboxes.items()}
        if any(rank in old and not self._mailboxes[rank].fits(*need) for rank, need in needs.items()):
            self._drop_all(late=False)
            needs = {rank: tuple(map(max, need, old.get(rank, need))) for rank, need in needs.items()}
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for rank, need in needs.items():
            if rank not in self._mailboxes:
                self._mailboxes[rank] = Mailbox.create(self._directory / f"rank-{rank}.mailbox", *need)

    async def _attach(
        self, key: str, name: str, rank: int, local: Mapping[int, tuple[int, int, int]], timeout_s: float
    ) -> None:
        senders = {sender for sender, _, _ in local.values()}
        await self._call(
            name,
            "attach_transition",
            timeout_s=timeout_s,
            key=key,
            mailbox=str(self._mailboxes[rank].path),
            neighbours={str(sender): str(self._mailboxes[sender].path) for sender in senders},
            local=[(number, *where) for number, where in local.items()],
        )

    async def reserve(self, key: str, timeout_s: float, destination: str | None = None) -> None:
        """Take the memory of the new state: on the workers, and of the staged model `destination` (a path)."""
        known = self._known(key)
        await self._open_destination(known, destination)
        await asyncio.gather(
            *(self._call(name, "reserve_transition", timeout_s=timeout_s, key=key) for name in known.workers.values())
        )

    async def _open_destination(self, known: _Prepared, destination: str | None) -> None:
        if destination is None or known.staging is None:
            return
        path = Path(destination)
        if known.staged is not None and known.staged.path != path:  # of a run that was given up
            known.staged.discard()
            known.staged = None
        if known.staged is None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            spec = known.request.spec
            if spec.parameters * spec.itemsize("param") < LOOP_BYTES:
                known.staged = StagedModel.create(path, spec)
            else:
                known.staged = await asyncio.to_thread(StagedModel.create, path, spec)

    async def run(
        self,
        key: str,
        number: int,
        nodes: list[int],
        timeout_s: float,
        source: str | None = None,
        destination: str | None = None,
        verify: bool = False,
    ) -> dict[str, Any]:
        """Transition `number` (counted by the controller) of what was prepared. source, destination: paths of this
        node's staged models where it takes part with one; nodes: MPI ranks of all agents, as in `prepare`.

        Returns {seconds, wire_s, pack_s, unpack_s, local_s, wait_s, digests}: of the slowest worker, and digests
        if `verify`.
        Raises PhaseTimeout, PeerDied, CallError; then `abort` is to follow.
        """
        known = self._known(key)
        began = time.perf_counter()
        self._stop = None
        known.spoilt = True  # until it has gone well
        try:
            await self._open_destination(known, destination)
            for lane in known.lanes:
                lane.mailbox.reset()
            self._staging_carrier(known, source)
            communicator = self._remapper.communicator(number, nodes)
            phases = await self._move(known, communicator, number, timeout_s)
            digests = await self.verify(key, timeout_s) if verify else {}
        except BaseException as error:
            self._remapper.forget(nodes)
            if isinstance(error, Overdue):
                raise PhaseTimeout(str(error)) from None
            raise
        known.spoilt = False
        return phases | {"seconds": time.perf_counter() - began, "digests": digests}

    def _staging_carrier(self, known: _Prepared, source: str | None) -> None:
        if known.staging is None:
            return
        read = StagedModel.open(Path(source), known.request.spec) if source is not None else None
        end = StagingEnd(read, known.staged)
        for lane in known.lanes:
            if lane.rank == known.staging.rank:
                near = {k: (self._mailboxes[r], *where) for k, (r, *where) in known.local[lane.rank].items()}
                lane.carrier = Carrier(end, lane.lanes, lane.mailbox, near)

    async def _move(self, known: _Prepared, communicator: Any, number: int, timeout_s: float) -> dict[str, float]:
        calls = [
            asyncio.ensure_future(
                # The agent's deadline comes first, and ends the worker's wait through the mailbox.
                self._call(
                    name,
                    "run_transition",
                    timeout_s=timeout_s + STOP_S,
                    key=known.request.key,
                    limit_s=timeout_s + STOP_S / 2,
                )
            )
            for name in known.workers.values()
        ]
        wire = asyncio.ensure_future(known.exchange.run(communicator, number, timeout_s, [self._check_stopped]))
        try:
            await _all_or_first_error([wire, *calls])
        except BaseException as error:
            for lane in known.lanes:
                lane.mailbox.abort(f"given up: {error}")
            wire.cancel()
            await asyncio.wait([wire, *calls], timeout=STOP_S)
            raise
        parts = [call.result() for call in calls]
        parts += [lane.carrier.seconds for lane in known.lanes if lane.carrier is not None]
        names = ("pack_s", "unpack_s", "local_s", "wait_s")
        return {n: max((part[n] for part in parts), default=0.0) for n in names} | wire.result()

    def _check_stopped(self) -> None:
        if self._stop is not None:
            raise PhaseTimeout(self._stop)

    async def verify(self, key: str, timeout_s: float, positional: bool = False) -> dict[str, Any]:
        """{worker: its digests by kind}, and under "staged" the digest of the staged model: the CRC-32 of its
        data, or `positional` digests by kind, whose sum over the owners is the same (dearer: some passes over it).
        """
        known = self._known(key)
        answers = await asyncio.gather(
            *(self._call(name, "verify_transition", timeout_s=timeout_s, key=key) for name in known.verifiers)
        )
        digests: dict[str, Any] = dict(zip(known.verifiers, answers, strict=True))
        if (staged := known.staged) is not None:
            compute = staged.digests if positional else staged.digest
            small = staged.num_bytes < LOOP_BYTES
            digests["staged"] = compute() if small else await asyncio.to_thread(compute)
        return digests

    async def finish(self, key: str, timeout_s: float) -> None:
        """The new state counts: the staged model gets its name, the workers switch."""
        known = self._known(key)
        if known.staged is not None:
            known.staged.complete()
            known.staged = None
        await asyncio.gather(
            *(self._call(name, "finish_transition", timeout_s=timeout_s, key=key) for name in known.receivers)
        )

    def stages(self, key: str) -> bool:
        """Whether the transition ends, or begins, in what is staged on this node."""
        return self._known(key).staging is not None

    async def abort(self, key: str, reason: str, nodes: list[int], timeout_s: float) -> None:
        """End a phase that is under way and drop everything new. Workers that are gone are left alone.

        The communicator of `nodes` goes on all of them, also on those whose own part went well: to make a new one they
        have to meet.
        """
        self._remapper.forget(nodes)
        known = self._prepared.get(key)
        if known is None:
            return
        self._stop = reason
        for lane in known.lanes:
            lane.mailbox.abort(reason)
        answers = await asyncio.gather(
            *(self._call(name, "abort_transition", timeout_s=timeout_s, key=key) for name in known.workers.values()),
            return_exceptions=True,
        )
        for name, answer in zip(known.workers.values(), answers):
            if isinstance(answer, BaseException):
                log.warning("%s did not take back transition %s: %s", name, key, answer)
        if known.staged is not None:
            known.staged.discard()
        self._drop_all(late=known.spoilt)

    def close(self) -> None:
        """Drop everything, on the way out."""
        for known in self._prepared.values():
            if known.staged is not None:
                known.staged.discard()
        self._drop_all(late=False)

    def _known(self, key: str) -> _Prepared:
        if key not in self._prepared:
            raise ValueError(f"transition {key} is not prepared on this node")
        return self._prepared[key]

    def _drop_all(self, late: bool) -> None:
        """Forget what was prepared, mailboxes included; late: a message may still arrive in one."""
        self._prepared.clear()
        for mailbox in self._mailboxes.values():
            mailbox.remove()
        if late:
            self._retired += self._mailboxes.values()
        self._mailboxes.clear()


async def _all_or_first_error(tasks: list[asyncio.Future]) -> None:
    """Wait until all are done, or raise the first error as soon as there is one."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()
