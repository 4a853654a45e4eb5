"""An iteration in miniature, for tests of policies: the real ledger and the real decisions, on nodes whose work takes ticks.

One tick is one token of every running answer. Hand-outs are those of `dynarl.controller.hand_outs` to equal nodes when no
length is known: even shares of requests, two leases at a time, nothing for a node that is about to change its role; one
change at a time, `move_ticks` long.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from dynarl import wire
from dynarl.config.schema import Policy
from dynarl.dataflow.ledger import Ledger
from dynarl.scheduler.policy import View, capabilities, decide, start_roles

LEASES_PER_NODE = 2


@dataclass
class Work:
    """groups x size answers of 1 to max_length tokens; ticks to score and to train one group, and to change roles.

    verify_ticks: most that an answer waits for its verdict, on the node that made it, whatever role that has by then.
    """

    groups: int = 8
    size: int = 4
    max_length: int = 60
    verify_ticks: int = 1
    score_ticks: int = 2
    train_ticks: int = 6
    move_ticks: int = 4
    seed: int = 0


@dataclass
class Fault:
    """At `tick` the worker of `role` on the `node`-th node dies; a new one is there after `down` ticks."""

    tick: int
    node: int
    role: str
    down: int


@dataclass
class Model:
    policy: Policy
    home: dict[str, str]
    work: Work = field(default_factory=Work)
    faults: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.may = capabilities(self.policy, self.home)
        self.roles = start_roles(self.policy, self.home)
        self.needs_scoring = any("inference" in may for may in self.may.values())
        samples = [wire.sample_id(1, g, m) for g in range(self.work.groups) for m in range(self.work.size)]
        self.ledger = Ledger(samples, scored_by_inference=self.needs_scoring)
        source = random.Random(self.work.seed)
        self.left = {sample: source.randint(1, self.work.max_length) for sample in samples}
        self.verdict = {sample: source.choice([1, self.work.verify_ticks]) for sample in samples}
        self.verifying: list[list] = []  # [[sample, node, ticks left], ...]
        self.queues: dict[str, list[list]] = {node: [] for node in self.home}  # node -> [[lease, ticks left], ...]
        self.down: dict[tuple[str, str], int] = {}  # (node, role) -> tick at which it is back
        self.leaving: dict[str, str] = {}
        self.moved_at = 0
        self.flips: Counter[str] = Counter()
        self.history: list[dict[str, str]] = []
        self.tick = 0

    def run(self, limit: int = 4000) -> list[str]:
        """Ids of all samples, as trained. Raises AssertionError when the iteration does not end within `limit` ticks."""
        while not (self.ledger.done and not self.leaving):
            assert self.tick < limit, f"still at work after {limit} ticks: roles {self.roles}, {self.view()}"
            self._break_and_mend()
            self._hand_out()
            if self.leaving and self.tick >= self.moved_at:
                self.roles.update(self.leaving)
                self.leaving = {}
            elif not self.leaving and self.policy.name != "static":
                self._move(decide(self.policy, self.view()))
            self._work()
            self.tick += 1
        return self.ledger.trained(self.ledger.groups.values())

    def view(self) -> View:
        count = lambda *states: len(self.ledger.in_state(*states))  # noqa: E731
        roles = {n: r for n, r in self.roles.items() if (n, r) not in self.down}
        return View(
            roles=roles, may=self.may, waiting=self.ledger.num_waiting, generating=count("generating"),
            running={n: len(self.ledger.running_on(n)) for n, r in roles.items() if r == "rollout"},
            needs_scoring=self.needs_scoring, to_score=count("generated"), scoring=count("scoring"),
            to_train=count("scored"), training=count("training"))

    def _at_work(self, role: str) -> list[str]:
        return [n for n, r in self.roles.items() if r == role and n not in self.leaving and (n, role) not in self.down]

    def _hand_out(self) -> None:
        nodes = self._at_work("rollout")
        running = {node: len(self.ledger.running_on(node)) for node in nodes}
        for node in sorted(nodes, key=lambda n: running[n]):
            share = -(-(self.ledger.num_waiting + sum(running.values())) // len(nodes))
            running[node] += len(self.ledger.dispatch(node, self.ledger.waiting(max(0, share - running[node]))))
        for role, state, ticks in (("inference", "generated", self.work.score_ticks), ("training", "scored", self.work.train_ticks)):
            for group in self.ledger.in_state(state):
                node = min(self._at_work(role), key=lambda n: len(self.queues[n]), default=None)
                if node is None or len(self.queues[node]) >= LEASES_PER_NODE:
                    break
                self.queues[node].append([self.ledger.lease(group, node), ticks])

    def _work(self) -> None:
        for sample, node in self.ledger.running.items():
            if self.roles[node] == "rollout" and (node, "rollout") not in self.down and not self._is_verified(sample, node):
                self.left[sample] -= 1
                if self.left[sample] <= 0:
                    self.verifying.append([sample, node, self.verdict[sample]])
        for entry in self.verifying:
            entry[2] -= 1
            if entry[2] <= 0:
                self.ledger.finished(entry[0], entry[1], reward=1.0, tokens=1, finish="stop")
        self.verifying = [entry for entry in self.verifying if entry[2] > 0]
        for queue in self.queues.values():
            if queue:
                queue[0][1] -= 1
                if queue[0][1] <= 0:
                    lease, _ = queue.pop(0)
                    self.ledger.scored(lease) or self.ledger.accumulated(lease)

    def _is_verified(self, sample: str, node: str) -> bool:
        return any(entry[:2] == [sample, node] for entry in self.verifying)

    def _move(self, moves: dict[str, str]) -> None:
        moves = {node: role for node, role in moves.items() if (node, role) not in self.down}
        for node, role in moves.items():
            assert role in self.may[node] and role != self.roles[node], f"{node} cannot go to {role}"
            self.flips[node] += 1
            for sample in self.ledger.running_on(node):
                if not self._is_verified(sample, node):
                    self.ledger.returned(sample, node, holder=node)
            for lease, _ in self.queues[node][1:]:
                self.ledger.handed_back(lease)
            del self.queues[node][1:]
        if moves:
            self.history.append(dict(moves))
            self.leaving, self.moved_at = moves, self.tick + self.work.move_ticks

    def _break_and_mend(self) -> None:
        self.down = {key: until for key, until in self.down.items() if until > self.tick}
        for fault in self.faults:
            node = list(self.home)[fault.node % len(self.home)]
            if fault.tick == self.tick and fault.role in self.may[node]:
                self.down[node, fault.role] = self.tick + fault.down
                self.ledger.worker_lost(node, fault.role)
                if self.roles[node] == fault.role != "rollout":
                    self.queues[node].clear()
