"""What an iteration hands out, and to whom: requests to generate, groups to score, groups to train.

Nodes get work of their active role, unless they are about to leave it or its workers there are down; where the roles of
a node take turns by themselves, of the role that it is given (`Turns`). Every hand-out is a background call; what comes
back are events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from dynarl.config.schema import Config, Policy
from dynarl.controller.background import Background
from dynarl.controller.epochs import Epochs
from dynarl.controller.fleet import Fleet
from dynarl.controller.leases import Leases
from dynarl.controller.replicas import Replica
from dynarl.controller.requests import Requests
from dynarl.controller.router import Router
from dynarl.controller.telemetry import Monitor
from dynarl.controller.turns import Turns
from dynarl.dataflow import channels
from dynarl.dataflow.ledger import Group, Ledger
from dynarl.dataflow.minibatches import Minibatch
from dynarl.hypergraph import workflow
from dynarl.scheduler.policy import ROLES


@dataclass
class _Places:
    """Nodes at work by role, as long as `state`, on which they depend, is the same."""

    state: tuple = ()
    by_role: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class _Trainable:
    """Groups of a minibatch that training may take, as long as `state`, on which they depend, is the same."""

    batch: Minibatch
    state: tuple = ()
    groups: list[Group] = field(default_factory=list)


class HandOuts:
    """`requests`, `leases`: what is handed out; `turns`: who is given which role, where nodes switch by themselves;
    `leaving`: nodes that get nothing more, for they are about to change their role.

    down: {(node, role)} without workers; of_sample: what a trainer is told of a sample; train: whether groups go on to
    be scored and trained.
    """

    def __init__(self, config: Config, policy: Policy, fleet: Fleet, epochs: Epochs, ledger: Ledger,
                 down: set[tuple[str, str]], replicas: dict[str, list[Replica]], router: Router, monitor: Monitor,
                 background: Background, of_sample: Callable[[str], dict[str, float]], *, split: str,
                 temperature: float, train: bool, scored_by_inference: bool):
        self._policy, self._epochs, self._ledger, self._down, self._monitor = policy, epochs, ledger, down, monitor
        self._of_sample, self._train, self._needs_scoring = of_sample, train, scored_by_inference
        self.requests = Requests(
            config, fleet, ledger, router, split, temperature, self.at_work, background.spawn, monitor.stopwatch
        )
        self.leases = Leases(fleet, ledger, monitor, replicas, background.spawn)
        switching = policy.switching == "node" and train
        self.turns = Turns(fleet, epochs, ledger, self.leases, list(ROLES)) if switching else None
        self.leaving: set[str] = set()
        self._places, self._trainable = _Places(), _Trainable(Minibatch(0))
        self._into = {
            role: channels.into(
                workflow.declared(config.algorithm.workflow), role, config.dataflow.chunk, len(ledger.groups)
            )
            for role in ("inference", "training")
        }

    def at_work(self, role: str) -> list[str]:
        """Nodes that take work of `role` now."""
        turns = self.turns
        state = (
            self._epochs.num_changes, turns and turns.num_changes, frozenset(self.leaving), frozenset(self._down)
        )
        if state != self._places.state:
            self._places = _Places(state)
        if role not in self._places.by_role:
            away = self.leaving | {n for n, r in self._down if r == role}
            takers = [n for n, r in self._epochs.roles.items() if r == role] if turns is None else turns.take_work(role)
            self._places.by_role[role] = [node for node in takers if node not in away]
        return self._places.by_role[role]

    def hand_out(self, to_train: Minibatch, *, changing: bool = False) -> None:
        """All that can be. changing: roles are about to be others."""
        rebalance = self._policy.rebalance and not changing
        if self._ledger.num_waiting or rebalance:
            with self._monitor.overhead("routing"):
                self.requests.hand_out(rebalance=rebalance)
        if not self._train:
            return
        if self._needs_scoring and self._ledger.num_in_state("generated") and (takers := self.at_work("inference")):
            self.leases.hand_out("inference", self._to_score(), takers, lambda sample: {}, count=self.num_to_score)
        even = self._policy.shares == "even"
        # Shares are of the trainer as it is once a change is over.
        if self._ledger.num_in_state("scored") and not (even and changing):
            takers, among = self.at_work("training"), to_train.groups if even else None
            groups = self._to_train(to_train) if takers else []
            if not even:
                # Longest first, so that the last ones, for which all but a few nodes wait before a step, are short.
                groups = sorted(groups, key=lambda group: -group.num_tokens)
            self.leases.hand_out("training", groups, takers, self._of_sample, among)

    def worker_lost(self, node: str, role: str, held: Iterable[str]) -> None:
        """Offer again what a dead worker had. held: requests whose answer so far is recorded on its node."""
        if role == "rollout":
            self.requests.worker_lost(node, held)
        else:
            self._ledger.worker_lost(node, role)
        self.leases.worker_lost(node)

    # --- groups on their way from component to component

    def generated(self, group: Group) -> None:
        """All of its answers are there."""
        for name in self._into["inference"].put(group.name):
            if not self._needs_scoring:
                self._into["training"].put(name)

    def scored(self, group: Group) -> None:
        self._into["training"].put(group.name)

    def is_offered(self, group: Group) -> bool:
        """Whether the chunk is full in which a generated or scored group goes on."""
        return group.name in self._into["inference" if group.state == "generated" else "training"].offered

    @property
    def num_to_score(self) -> int:
        """Groups that inference may take now."""
        return self._ledger.num_in_state("generated") - self._into["inference"].num_gathered

    def num_to_train(self, batch: Minibatch) -> int:
        """Groups of a minibatch that training may take now."""
        return len(self._to_train(batch))

    def _to_score(self) -> Iterator[Group]:
        return (group for group in self._ledger.each_in_state("generated") if self.is_offered(group))

    def _to_train(self, batch: Minibatch) -> list[Group]:
        names, offered = batch.names, self._into["training"].offered
        state = len(names), len(offered), self._ledger.num_changes["scored"]
        if batch is not self._trainable.batch or state != self._trainable.state:
            found = [g for g in self._ledger.in_state("scored") if g.name in names and g.name in offered]
            self._trainable = _Trainable(batch, state, found)
        return self._trainable.groups
