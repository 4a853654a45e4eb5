"""How the nodes of an iteration change roles as its work shifts: what the policy wants, one change at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from dynarl import wire
from dynarl.config.schema import Policy
from dynarl.controller.background import RETRY_PAUSE_S, Background
from dynarl.controller.epochs import Epochs, Outcome, Weights
from dynarl.controller.hand_outs import HandOuts
from dynarl.controller.results import Tally
from dynarl.controller.telemetry import Monitor
from dynarl.dataflow.ledger import Ledger
from dynarl.dataflow.minibatches import Minibatch
from dynarl.scheduler.policy import View, decide, take_turns
from dynarl.scheduler.published import Boundaries, in_turn

log = logging.getLogger(__name__)


class RoleChanges:
    """`current`: the change that is under way; `last`: when the last one ended; `minibatch`: index of the running one.
    weights: the version that everything here is on; `training_weights`: that of the trainers, who may be ahead.

    may: roles each node can take; down: {(node, role)} without workers; train: whether there is anything to change for.
    """

    def __init__(self, policy: Policy, epochs: Epochs, ledger: Ledger, weights: Weights,
                 may: Mapping[str, frozenset[str]], down: set[tuple[str, str]], monitor: Monitor, tally: Tally,
                 background: Background, hand_outs: HandOuts, *, train: bool, scored_by_inference: bool):
        self._policy, self._epochs, self._ledger, self._monitor, self._tally = policy, epochs, ledger, monitor, tally
        self._may, self._down, self._train, self._needs_scoring = may, down, train, scored_by_inference
        self._background, self._hand_outs = background, hand_outs
        self._weights = self.training_weights = weights
        self._num_samples = ledger.num_live
        self._boundaries = Boundaries(policy, epochs.home)
        self._clock = monitor.clock
        self._counted_at, self._counted_roles = self._clock(), dict(epochs.roles)
        self._taken, self._taken_at = frozenset(), -1  # roles that some node has, after so many changes of them
        self.current: asyncio.Task | None = None
        self.last = 0.0
        self.minibatch = 0

    # --- what is wanted

    def consider(self, to_train: Minibatch) -> None:
        """Begin the change that the policy wants now, if it wants one."""
        if self.current is not None:
            return
        # Once all answers are there nodes go one way, and nothing can swing.
        if self._ledger.num_live and self._clock() - self.last < self._policy.dwell_s:
            return
        if not self._train or self._policy.name == "static":
            return
        if (turns := self._hand_outs.turns) is not None:
            moves = take_turns(self.view(to_train), turns.free())
            if given := {n: r for n, r in moves.items() if (n, r) not in self._down}:
                turns.give(given)
                self._hand_outs.hand_out(to_train)  # now: no event says that they take work
            return
        with self._monitor.overhead("decisions"):
            moves = self._wanted(to_train)
        # A role without living workers on that node is no destination.
        moves = {node: role for node, role in moves.items() if (node, role) not in self._down}
        if moves:
            self.begin(moves)

    def _wanted(self, to_train: Minibatch) -> dict[str, str]:
        if self._policy.name == "adaptive":
            return self._monitor.consult(
                self._policy, self._ledger, self._epochs.roles, self._may, self._down,
                lambda group: self._hand_outs.is_offered(group)
                and (group.state == "generated" or group.name in to_train.names),
                self._needs_scoring, self._hand_outs.leases.replicas, self._clock() - self.last, self._bound)
        if self._policy.name == "published":
            return self._boundaries.decide(self.view(to_train))
        if self._policy.name == "in_turn":
            return in_turn(self.view(to_train))
        return decide(self._policy, self.view(to_train))

    def view(self, to_train: Minibatch) -> View:
        """What policies other than the adaptive one see."""
        count, turns = self._ledger.num_in_state, self._hand_outs.turns
        roles, taken = self._epochs.roles if turns is None else turns.given, None
        num_groups, generating = len(self._ledger.groups), count("generating")
        if self._down:
            roles = {n: r for n, r in roles.items() if (n, r) not in self._down}
        elif turns is None:
            if self._taken_at != self._epochs.num_changes:
                self._taken_at, self._taken = self._epochs.num_changes, frozenset(roles.values())
            taken = self._taken
        return View(
            roles=roles, taken=taken, may=self._may, waiting=self._ledger.num_waiting, generating=generating,
            running=self._ledger.num_running, num_running=len(self._ledger.running),
            needs_scoring=self._needs_scoring, to_score=self._hand_outs.num_to_score, scoring=count("scoring"),
            to_train=self._hand_outs.num_to_train(to_train), training=count("training"),
            minibatch=self.minibatch, num_samples=self._num_samples, num_groups=num_groups,
            num_complete=num_groups - generating)

    def _bound(self) -> frozenset[str]:
        """Nodes that the next optimizer step needs: its owners, and who has gradients of it or is about to."""
        owners = {node for node, role in self._epochs.home.items() if role == "training"}
        return frozenset(owners | {group.node for group in self._ledger.in_state("training", "accumulated")})

    def is_possible(self, moves: Mapping[str, str]) -> bool:
        """Whether the workers live, and somebody goes on generating while there is something to generate; nodes that
        switch by themselves come back to that after the step."""
        roles = self._epochs.roles
        generating = any(role == "rollout" and node not in moves for node, role in roles.items())
        safe = self._hand_outs.turns is not None or generating or not self.num_to_generate()
        return self._down.isdisjoint(moves.items()) and safe

    def num_to_generate(self) -> int:
        """Requests that need a rollout node. One that a node has finished while it left is not among them, though its
        report is still on its way.
        """
        at_work = [node for node, role in self._epochs.roles.items() if role == "rollout"]
        running = sum(self._ledger.num_running_on(node) for node in at_work)
        return self._ledger.num_waiting + running + len(self._ledger.stranded(at_work))

    # --- carrying it out

    def begin(self, moves: dict[str, str]) -> None:
        self._hand_outs.leaving |= set(moves)
        self.current = asyncio.ensure_future(self.carry_out(moves))

    async def carry_out(self, moves: dict[str, str]) -> None:
        """Change to these roles; what fails for good ends the iteration."""
        try:
            if self._hand_outs.turns is not None:
                await self._take(moves)
                return
            reason = self._work()
            for weights, part in self.by_weights(moves):
                if part and not self._background.is_given_up:
                    sources = dict(self._epochs.roles)
                    with self._hand_outs.requests.asking(part):
                        outcome = await self._epochs.change(
                            part, weights, reason, self.take_back, self.num_to_generate)
                    self._tally.switches.append(outcome)
                    self._monitor.moved(sources, part, outcome)
                    if not outcome.committed:
                        # One that is refused takes no time, and the next look would want the same.
                        await asyncio.sleep(RETRY_PAUSE_S)
        except asyncio.CancelledError as error:
            self._background.fail(error)
            raise
        except Exception as error:
            self._background.fail(error)  # which raises it in the iteration; nobody waits for this task
        finally:
            self.count_node_seconds()
            self._hand_outs.leaving -= set(moves)
            self.last = self._clock()
            self.current = None
            self._background.bell.ring()

    def _work(self) -> str:
        """What there is of it, as the reason of a change: "3 requests live, 1 group scored"."""
        counts = [(self._ledger.num_live, "request", "live")]
        counts += [(self._ledger.num_in_state(s), "group", s) for s in ("generated", "scored", "accumulated")]
        parts = [f"{count} {noun}{'s' * (count > 1)} {state}" for count, noun, state in counts if count]
        return ", ".join(parts) or "no work is waiting"

    async def _take(self, moves: dict[str, str]) -> None:
        try:
            await self._hand_outs.turns.take(moves)
        except wire.CallError as error:  # it is wanted again as long as it is needed
            log.warning("a node did not switch: %s", error)
            await asyncio.sleep(RETRY_PAUSE_S)

    def by_weights(self, moves: dict[str, str]) -> list[tuple[Weights, dict[str, str]]]:
        """These moves as changes of roles: one, where all need the same weights."""
        if self.training_weights == self._weights:
            return [(self._weights, moves)]
        # After the first minibatch trainers are ahead of the weights that generated and score.
        return [(self.training_weights, {n: r for n, r in moves.items() if r == "training"}),
                (self._weights, {n: r for n, r in moves.items() if r != "training"})]

    def take_back(self, outcome: Outcome) -> None:
        """What moving nodes have given up or not started is offered again."""
        for node, given_up in outcome.given_up.items():
            for partial in given_up:
                if self._hand_outs.requests.returned(node, partial):
                    self._monitor.given_up(**partial)
        for leases in outcome.unstarted.values():
            for lease in leases:
                self._hand_outs.leases.back(lease)
        self._background.bell.ring()

    def switched(self, node: str, source: str, target: str, phases: dict[str, float]) -> None:
        """A node has given its devices to another role by itself."""
        outcome = self._epochs.switched(node, target, phases)
        self._tally.switches.append(outcome)
        self._monitor.moved({node: source}, {node: target}, outcome)
        self.count_node_seconds()
        self._background.bell.ring()

    def count_node_seconds(self) -> None:
        """Add the time since the last call to the roles that the nodes have had since then."""
        now = self._clock()
        for role in self._counted_roles.values():
            self._tally.node_seconds[role] = self._tally.node_seconds.get(role, 0.0) + now - self._counted_at
        self._counted_at, self._counted_roles = now, dict(self._epochs.roles)
