"""One iteration's samples on their way through the roles: prompts out, answers in, scores, gradients.

The ledger says where each sample is. This loops until all are where they have to be: `HandOuts` hands out what can be
handed out, `RoleChanges` lets the policy change roles as the work shifts, and what comes back are events.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import AsyncIterator, Callable, Iterable, Iterator

from dynarl import wire
from dynarl.config.schema import Config, Policy
from dynarl.controller.background import Background, Bell
from dynarl.controller.epochs import Epochs, Weights
from dynarl.controller.fleet import Fleet
from dynarl.controller.hand_outs import HandOuts
from dynarl.controller.replicas import Replica, inside_nodes
from dynarl.controller.results import Results, Tally, add
from dynarl.controller.role_changes import RoleChanges
from dynarl.controller.router import Router
from dynarl.controller.telemetry import Monitor
from dynarl.dataflow.ledger import Group, Ledger
from dynarl.dataflow.minibatches import Minibatch, Minibatches
from dynarl.scheduler.policy import ROLES

# How often hand-outs and policy look when nothing happens, while something may change without being told: requests wait
# for a place, workers are down; and while all that can happen is told.
TICK_S, CALM_TICK_S = 0.1, 1.0


class Iteration:
    """Runs samples until each is trained (or, with `train=False`, only generated).

    may: roles each node can take; weights: the version that everything here is on; down: {(node, role)} without
    workers; replicas: role -> copies of its model (by default one per `training.tp` devices of each node); router: what
    the job has learned of its requests; lease_numbers: of a job whose leases must not be taken for another's.
    """

    def __init__(self, config: Config, fleet: Fleet, epochs: Epochs, weights: Weights, may: dict[str, frozenset[str]],
                 down: set[tuple[str, str]], samples: list[str], *, split: str = "train", temperature: float = 1.0,
                 train: bool = True, scored_by_inference: bool = True, policy: Policy | None = None,
                 replicas: dict[str, list[Replica]] | None = None, router: Router | None = None,
                 monitor: Monitor | None = None, lease_numbers: Iterator[int] = Ledger.LEASES):
        self._epochs, self.weights, self._down, self._train = epochs, weights, down, train
        self._policy, algorithm = policy or config.policy, config.algorithm
        self._monitor = monitor or Monitor(config)
        self._clock = self._monitor.clock
        self.ledger = Ledger(samples, scored_by_inference=scored_by_inference, leases=lease_numbers)
        self._num_minibatches = algorithm.minibatches
        self._minibatches = Minibatches(
            list(self.ledger.groups.values()), algorithm.minibatches, algorithm.membership == "completion"
        )
        self.tally, self.results = Tally(self._clock()), Results(algorithm)
        self._bell = Bell()
        self._background = Background(self._bell)
        replicas = replicas or {
            role: inside_nodes(may, config.cluster.devices_per_node, config.training.tp)
            for role in ("inference", "training")
        }
        self.hand_outs = HandOuts(
            config, self._policy, fleet, epochs, self.ledger, down, replicas,
            router or Router(config, self._monitor.lengths, self._monitor.figures_gap_s), self._monitor, self._background, self.results.of_sample,
            split=split, temperature=temperature, train=train, scored_by_inference=scored_by_inference)
        self.requests, self.leases = self.hand_outs.requests, self.hand_outs.leases
        self.role_changes = RoleChanges(
            self._policy, epochs, self.ledger, weights, may, down, self._monitor, self.tally, self._background,
            self.hand_outs, train=train, scored_by_inference=scored_by_inference)

    # --- running

    async def generate(self) -> None:
        """Until every answer is finished."""
        await self._until(lambda: not self.ledger.num_in_state("generating"), Minibatch(0))

    async def accumulate(self, index: int) -> list[Group]:
        """Until the gradients of a minibatch are in the trainers' buffers. Returns its groups."""
        changes, batch = self.role_changes, self._minibatches[index]
        if (turns := self.hand_outs.turns) is not None:
            weights = {role: changes.training_weights if role == "training" else self.weights for role in ROLES}
            await turns.begin(weights)
        changes.minibatch = index
        changes.consider(batch)  # before anything of it is handed out
        await self._until(lambda: self._is_accumulated(index), batch)
        return batch.groups

    async def awake(self, index: int, owners: Iterable[str]) -> list[Group]:
        """Until those that a step on this minibatch needs are in the training role: `owners`, and whoever holds
        gradients. What dies with a worker meanwhile is accumulated again. Returns the groups."""
        batch, turns = self._minibatches[index], self.hand_outs.turns

        def asleep() -> dict[str, str]:
            if not self._is_accumulated(index):
                return {}
            needed = {*owners, *(group.node for group in batch.groups)}
            return {node: "training" for node in sorted(needed) if self._epochs.roles[node] != "training"}

        if turns is None:
            await self._until(lambda: self._is_accumulated(index) and not asleep(), batch, asleep)
            return batch.groups

        def settled() -> bool:
            # Lost gradients may take roles that no node is in: not while all hold still.
            return not self._is_accumulated(index) or (not asleep() and turns.are_settled())

        while True:
            turns.hold_still()
            await self._until(settled, batch, lambda: turns.only_free(asleep()))
            if index + 1 == self._num_minibatches:
                await turns.end()
            if self._is_accumulated(index):
                return batch.groups
            await self.accumulate(index)

    def _is_accumulated(self, index: int) -> bool:
        batch = self._minibatches[index]
        # First what is counted already: minibatches are trained one after another.
        count = self.ledger.num_in_state
        return count("accumulated") + count("trained") >= (index + 1) * batch.size and batch.is_accumulated

    async def _until(self, reached: Callable[[], bool], to_train: Minibatch,
                     needed: Callable[[], dict[str, str]] = lambda: {}) -> None:
        """Hand out and move nodes until `reached`. needed: moves that it takes, whatever the policy wants."""
        changes = self.role_changes
        try:
            while True:
                self._background.raise_error()
                if reached() and changes.current is None:
                    return
                self.hand_outs.hand_out(to_train, changing=changes.current is not None)
                if (moves := needed()) and changes.current is None and changes.is_possible(moves):
                    changes.begin(moves)
                changes.consider(to_train)
                await self._bell.wait(self._pause_s())
        except BaseException:
            self._background.give_up()
            if self.hand_outs.turns is not None:
                await asyncio.shield(self.hand_outs.turns.end())
            raise
        finally:
            self._bell.silence()

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Around an optimizer step: requests and groups to be scored are handed out meanwhile, roles stay. When that
        fails the step is cancelled, and the failure raised: a step that is not on record yet never was."""
        failed: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                handing_out = group.create_task(self._keep_handing_out())
                yield
                handing_out.cancel()
        except BaseExceptionGroup as errors:
            failed = errors.exceptions[0]  # raised below, so that it keeps the cause that it has
        except BaseException:
            self._background.give_up()
            raise
        finally:
            self._bell.silence()
        if failed is not None:
            self._background.give_up()
            raise failed

    async def _keep_handing_out(self) -> None:
        while True:
            self._background.raise_error()
            self.hand_outs.hand_out(Minibatch(0))
            await self._bell.wait(self._pause_s())

    def _pause_s(self) -> float:
        """How long to wait when nothing happens."""
        changes = self.role_changes
        if self.ledger.num_waiting or self._down or changes.current is not None:
            return TICK_S
        now, pause_s = self._clock(), CALM_TICK_S
        due = (self.requests.rebalance_at, changes.last + self._policy.dwell_s, self._monitor.look_at)
        for at in due if self._policy.name != "static" else due[:1]:
            if 0.0 < at - now < pause_s:
                pause_s = at - now
        return max(TICK_S, pause_s)

    # --- what comes back

    def event_finished(self, node: str, *, sample: str, reward: float, correct: bool, timed_out: bool, tokens: int,
                       prompt_tokens: int, finish: str, version: int, masked_tokens: int = 0, tool_calls: int = 0,
                       tool_seconds: float = 0.0) -> None:
        group = self.ledger.groups.get(wire.group_of(sample))
        if group is None or self.ledger.running.get(sample) != node or version != self.weights.version:
            return
        full = self.ledger.finished(sample, node, reward=reward, tokens=tokens, finish=finish)
        if self._train:
            self._monitor.finished(
                sample, tokens, masked_tokens, prompt_tokens=prompt_tokens, tool_calls=tool_calls,
                tool_seconds=tool_seconds)
        self.tally.correct += correct
        self.tally.timed_out += timed_out
        self.tally.prompt_tokens += prompt_tokens
        self.requests.router.finished(sample, prompt_tokens)
        self.tally.tool_calls.append(tool_calls)
        self.tally.tool_seconds += tool_seconds
        self.results.finished(sample, masked_tokens)
        if full is not None:
            self._minibatches.completed(full)
            self.results.completed(full)
            self.hand_outs.generated(full)
        if not self.ledger.num_live:
            self.tally.generated_at = self._clock()
        self._bell.ring()

    def event_scored(self, node: str, *, lease: int, stats: dict[str, float] | None = None) -> None:
        self.leases.done(lease)
        if (group := self.ledger.scored(lease)) is not None:
            self.hand_outs.scored(group)
            add(self.tally.score_stats, stats or {})
            self.tally.scored_at = self._clock()
        self._bell.ring()

    def event_trained(self, node: str, *, lease: int, stats: dict[str, float]) -> None:
        if (whole := self.leases.part(node, lease, stats)) is None:
            return
        self.leases.done(lease)
        if (group := self.ledger.accumulated(lease)) is not None:
            self.results.trained(group, whole)
        self._bell.ring()

    def event_switched(self, node: str, *, source: str, target: str, phases: dict[str, float]) -> None:
        """A node has given its devices to another role by itself."""
        self.role_changes.switched(node, source, target, phases)

    def worker_lost(self, node: str, role: str, held: Iterable[str] = ()) -> None:
        """Offer again what a dead worker had. held: requests whose answer so far is recorded on its node."""
        if role != "environment":
            self.hand_outs.worker_lost(node, role, held)
            self._bell.ring()
