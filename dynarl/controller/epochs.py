"""One change of roles, from proposal to commit: the protocol that either happens everywhere or nowhere.

    PREPARE   members take note of the plan, wake what it needs; what runs goes on
    vote      over MPI: all ready, same plan?                           no -> cancelled, nothing was touched
    QUIESCE   moving nodes stop: partial answers and unstarted leases are handed back
    TRANSFER  moving nodes give their new role the weights, from the copy their own node holds
    vote      over MPI: did everybody read what the trainer wrote?      no -> rolled back to the old roles
    COMMIT    one record in the journal; only then do the nodes count in their new roles

Members are the moving nodes and the owners of the optimizer; nobody else takes part.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Callable

from dynarl.controller.fleet import Fleet, StepLost
from dynarl.hypergraph.check import check_proposal
from dynarl.hypergraph.graph import Move
from dynarl.hypergraph.journal import Journal
from dynarl.wire import CallError

log = logging.getLogger(__name__)


@dataclass
class Weights:
    """The newest weights: their version, digest (of the tensors), and bytes of the file."""

    version: int
    digest: str
    num_bytes: int = 0


@dataclass
class Outcome:
    """committed, or why not; phases in milliseconds; pause_ms from the first stop to the commit."""

    epoch: int
    committed: bool
    reason: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    pause_ms: float = 0.0
    given_up: dict[str, list[dict]] = field(default_factory=dict)
    unstarted: dict[str, list[int]] = field(default_factory=dict)


class Epochs:
    """The map of active roles, and the only code that changes it. `home`: home roles."""

    def __init__(
        self, fleet: Fleet, journal: Journal, home: dict[str, str], vote_timeout_s: float, first_epoch: int = 0,
        give_back_s: float = 60.0,
    ):
        self._fleet, self._journal = fleet, journal
        self.home, self._timeout_s, self._give_back_s = home, vote_timeout_s, give_back_s
        self._in_transit = False
        self.roles = dict(home)
        self.num_changes = 0  # of `roles`
        self.epoch = first_epoch
        self._turn = asyncio.Lock()
        self._refused: tuple[Any, ...] = ()  # moves and reasons of the last refusal

    async def go_home(self) -> None:
        """Every node has its home role again, without a protocol: at a start, and after a fault. A change under way
        ends first.
        """
        async with self._turn:
            self.roles = dict(self.home)
            self.num_changes += 1
            self._journal.append(
                "epoch_committed", epoch=self.epoch, roles=self.roles, moves=[], phases={}, pause_ms=0.0
            )

    @asynccontextmanager
    async def weights_in_transit(self) -> AsyncIterator[None]:
        """Around a weight sync: a change under way ends first, and none begins before the new weights are there."""
        async with self._turn:
            self._in_transit = True
            try:
                yield
            finally:
                self._in_transit = False

    async def change(
        self,
        moves: dict[str, str],
        weights: Weights,
        reason: str,
        on_quiesced: Callable[[Outcome], None] = lambda outcome: None,
        live: Callable[[], int] = lambda: 0,
    ) -> Outcome:
        """Carry out `moves` ({node: new role}), unless they would break a rule of the hypergraph. `on_quiesced` takes
        back what the moving nodes gave up; `live` counts the requests that are not finished. Raises StepLost when a
        commit reached some members only."""
        if self._in_transit:
            return Outcome(self.epoch, False, "weights are on their way to the nodes")
        async with self._turn:
            moves = {node: role for node, role in moves.items() if self.roles[node] != role}
            if not moves:
                return Outcome(self.epoch, True)
            if broken := self._broken(moves, reason, live()):
                return Outcome(self.epoch, False, broken)
            return await self._change(moves, weights, reason, on_quiesced, live)

    def switched(self, node: str, role: str, phases: dict[str, float]) -> Outcome:
        """A node whose roles take turns by themselves is in `role` now: on record as an epoch of its own, that nobody
        voted on. phases: milliseconds. The record is a short one: every node writes several in every iteration."""
        self.epoch += 1
        moves = [{"node": node, "source": self.roles[node], "target": role}]
        self.roles[node] = role
        self.num_changes += 1
        outcome = Outcome(self.epoch, True, phases=phases, pause_ms=sum(phases.values()))
        self._journal.append(
            "role_switched", epoch=self.epoch, moves=moves, pause_ms=round(outcome.pause_ms, 2),
            phases={name: round(each_ms, 2) for name, each_ms in phases.items()},
        )  # fmt: skip
        return outcome

    def _broken(self, moves: dict[str, str], reason: str, live_requests: int) -> str:
        """The rules that these moves would break. On record once: the same moves may be asked for again and again."""
        proposed = [Move(node, self.roles[node], role) for node, role in sorted(moves.items())]
        broken = check_proposal(self._journal.graph, proposed, live_requests)
        if broken and (proposed, broken) != self._refused:
            self._refused = proposed, broken
            log.warning("a change of roles was refused: %s", "; ".join(broken))
            self._journal.append(
                "epoch_refused", moves=[move._asdict() for move in proposed], reason=reason, broken=broken
            )
        return "; ".join(broken)

    async def _change(
        self,
        moves: dict[str, str],
        weights: Weights,
        reason: str,
        on_quiesced: Callable[[Outcome], None],
        live: Callable[[], int],
    ) -> Outcome:
        self.epoch += 1
        outcome = Outcome(self.epoch, False)
        members = sorted({*moves, *(node for node, role in self.home.items() if role == "training")})
        plan = {"epoch": self.epoch, "ranks": [self._fleet.agents[n].rank for n in members], "moves": moves,
                "version": weights.version, "digest": weights.digest}
        listed = [{"node": n, "source": self.roles[n], "target": r} for n, r in sorted(moves.items())]
        self._journal.append("epoch_proposed", epoch=self.epoch, moves=listed, reason=reason)
        now = asyncio.get_running_loop().time
        laps = _Laps(outcome.phases, now)
        quiesced = False
        try:
            answers = await self._ask(members, "prepare", plan=plan)
            laps.lap("prepare_ms")
            if refusals := [a["reason"] for a in answers.values() if not a["ready"]]:
                raise CallError("; ".join(refusals))
            self._check(await self._ask(members, "vote", epoch=self.epoch, limit_s=self._timeout_s), "before the move")
            laps.lap("vote_ms")
            stopped = now()
            quiesced = True
            await self._quiesce(sorted(moves), outcome, on_quiesced)
            laps.lap("drain_ms")
            await self._ask(sorted(moves), "transfer", epoch=self.epoch)
            laps.lap("transfer_ms")
            self._check(
                await self._ask(members, "vote", epoch=self.epoch, limit_s=self._timeout_s), "after the transfer"
            )
            laps.lap("verify_ms")
        except (CallError, TimeoutError) as error:
            return await self._cancel(outcome, members, str(error), quiesced)
        try:
            await self._ask(members, "commit", epoch=self.epoch)
        except (CallError, TimeoutError) as error:
            # Some have changed by now, so there is no way back; and the others no longer know their role.
            raise StepLost(f"epoch {self.epoch} was agreed on, but not everybody heard of it: {error}") from None
        self.roles.update(moves)
        self.num_changes += 1
        laps.lap("commit_ms")
        outcome.committed, outcome.pause_ms = True, 1e3 * (now() - stopped)
        self._journal.append(
            "epoch_committed",
            epoch=self.epoch,
            roles=self.roles,
            moves=listed,
            phases=outcome.phases,
            pause_ms=outcome.pause_ms,
            live_requests=live(),
            given_up=sum(len(g) for g in outcome.given_up.values()),
        )
        return outcome

    async def _quiesce(self, nodes: list[str], outcome: Outcome, on_quiesced: Callable[[Outcome], None]) -> None:
        """Stop the moving nodes. What they gave up is taken back also when one of them could not: nobody else has it
        now. A node ends a worker that keeps its work for longer than `give_back_s`.
        """
        answers = await asyncio.gather(
            *(self._fleet.call(node, "quiesce", epoch=self.epoch, limit_s=self._give_back_s) for node in nodes),
            return_exceptions=True,
        )
        stopped = {node: answer for node, answer in zip(nodes, answers) if not isinstance(answer, BaseException)}
        outcome.given_up = {node: answer["given_up"] for node, answer in stopped.items()}
        outcome.unstarted = {node: answer["unstarted"] for node, answer in stopped.items()}
        on_quiesced(outcome)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def _ask(self, nodes: list[str], method: str, **args: Any) -> dict[str, Any]:
        return await self._fleet.call_each(nodes, method, timeout_s=2 * self._timeout_s + 1, **args)

    def _check(self, votes: dict[str, dict], when: str) -> None:
        verdict = next(iter(votes.values()))
        if not verdict["ready"]:
            raise CallError(f"a member was not ready {when}")
        if not verdict["same_digest"]:
            raise CallError(f"members disagree on the plan {when}")

    async def _cancel(self, outcome: Outcome, members: list[str], reason: str, quiesced: bool) -> Outcome:
        outcome.reason = reason
        log.warning("epoch %d cancelled: %s", outcome.epoch, reason)
        await asyncio.gather(
            *(self._fleet.call(node, "rollback", timeout_s=self._timeout_s, epoch=outcome.epoch) for node in members),
            return_exceptions=True,
        )
        self._journal.append("epoch_cancelled", epoch=outcome.epoch, reason=reason, rolled_back=quiesced)
        return outcome


class _Laps:
    """Writes the milliseconds between laps into a dict."""

    def __init__(self, into: dict[str, float], clock: Callable[[], float]):
        self._into, self._clock, self._last = into, clock, clock()

    def lap(self, name: str) -> None:
        now = self._clock()
        self._into[name] = round(1e3 * (now - self._last), 2)
        self._last = now
