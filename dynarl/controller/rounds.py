"""Iterations of a job, one after another: roles, samples, gradients, optimizer steps, new weights.

Reads like the algorithm, and knows nothing of what is on the other side of its collaborators: agents on a cluster, or
a simulated one.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynarl import wire
from dynarl.config.schema import Config
from dynarl.controller import metrics
from dynarl.controller.epochs import Epochs, Weights
from dynarl.controller.iteration import Iteration
from dynarl.controller.replicas import inside_nodes
from dynarl.controller.router import Router
from dynarl.controller.telemetry import Monitor
from dynarl.controller.training import Trainer
from dynarl.controller.workers import Workers
from dynarl.dataflow.ledger import Group, Ledger
from dynarl.rl.schedule import warmed_up_lr
from dynarl.scheduler.policy import capabilities

if TYPE_CHECKING:
    from dynarl.controller.fleet import Fleet
    from dynarl.controller.staging import Staging
    from dynarl.controller.warm_start import WarmStart
    from dynarl.hypergraph.journal import Journal
    from dynarl.report.metrics import MetricsWriter

log = logging.getLogger(__name__)

# A failed call comes before the report of the death that caused it.
DEATH_NOTICE_S = 0.3


@dataclass
class Progress:
    """How far the job is; what a checkpoint holds besides tensors. iteration: completed ones; step: optimizer steps in
    them.
    """

    iteration: int = 0
    step: int = 0
    warm_start_done: bool = False
    evaluated_start: bool = False
    layout: str = ""  # that the trainer is in, as `tp=2,pp=1`, once it has changed
    plan: dict[str, Any] = field(default_factory=dict)  # made while the job ran: {layout, inference (nodes), stage_s}


class Rounds:
    """What all iterations of a job share. `home`: {node: home role}; monitor: whose clock counts here.

    Who starts the job gives it `workers`, `staging` (new weights to the nodes), `trainer` and `epochs`, and says in
    `may` which roles each node can take.
    """

    workers: Workers
    staging: Staging
    trainer: Trainer
    epochs: Epochs
    lease_numbers: Iterator[int] = Ledger.LEASES

    def __init__(self, config: Config, home: dict[str, str], fleet: Fleet, journal: Journal, writer: MetricsWriter,
                 monitor: Monitor):
        self.config, self.home = config, home
        self.journal, self.writer = journal, writer
        self.fleet, fleet.listener = fleet, self
        self.progress = Progress()
        self.weights = Weights(0, "")
        self.may: dict[str, frozenset[str]] = {}
        self.offers = self.may  # roles that a node may be given; without training where no replica fits
        self.critical = asyncio.Lock()  # held while the optimizer steps: nothing may cut in between step and record
        self.is_sound = True  # no optimizer step has begun that is not on record
        self.stage: Iteration | WarmStart | None = None  # what the workers' events are for
        self.monitor, self.clock = monitor, monitor.clock
        self.router = Router(config, monitor.lengths, monitor.figures_gap_s)
        self.last_event = self.clock()

    async def iterate(self, number: int, *, samples: list[str] | None = None) -> None:
        """One GRPO iteration: generate, score, train, step, give everybody the new weights."""
        algorithm, began = self.config.algorithm, self.clock()
        samples = samples or self.draw(number)
        scored = any("inference" in may for may in self.may.values())
        roles = self.monitor.start_roles(
            self.config.policy, self.home, self.offers, algorithm.prompts_per_step, algorithm.group_size, scored)
        await self.enter(roles, f"iteration {number} begins")
        entered = self.clock()
        self.journal.append("iteration_started", iteration=number, version=self.weights.version, samples=samples)
        self.monitor.begin(number)
        self.stage = run = self._new_iteration(samples, temperature=algorithm.temperature, scored_by_inference=scored)
        stepped = []
        await self.trainer.begin(self.progress.step + 1, "grpo", self.away())
        for index in range(algorithm.minibatches):
            await run.accumulate(index)
            if index + 1 == algorithm.minibatches:
                self.monitor.conclude()
            batch = await run.awake(index, self.trainer.owner_nodes)
            async with run.going_on():
                stepped.append(await self._step(number, run, batch, last=index + 1 == algorithm.minibatches))
                if index + 1 < algorithm.minibatches:
                    # Inference still scores with the weights that generated.
                    await self.staging.refresh_trainers(
                        [n for n, r in self.epochs.roles.items() if r == "training"], run.weights.version
                    )
                    run.role_changes.training_weights = self.weights
                    await self.trainer.begin(self.progress.step + 1, "grpo", self.away())
        ended = self.clock()
        await self.staging.everywhere()
        self.stage = None
        await self.fleet.call_each(self.home, "forget", iteration=number)
        self.writer.trace(self.monitor.trace.line(
            iteration=number, policy=self.config.policy.name, roles=roles, enter_s=entered - began,
            step_s=[step["seconds"] for step in stepped], sync_s=self.clock() - ended, seconds=self.clock() - began,
            switches=[outcome.phases for outcome in run.tally.switches if outcome.committed]))
        figures = metrics.of_iteration(
            self.config, run, self.monitor.overhead, stepped, len(self.home), began, ended)
        self.writer.log(number, figures | self.noted(run, stepped))

    def noted(self, run: Iteration, steps: list[dict[str, Any]]) -> dict[str, float]:
        """An iteration is over. Returns metrics beyond those that every job has."""
        return {}

    def settle(self) -> None:
        """Home roles, and the roles that nodes are given, follow the trainer's layout: without training where none of
        its replicas fits."""
        self.home = self.epochs.home = self.trainer.home
        lent = {node for replica in self.trainer.replicas for node in replica.nodes}
        self.offers = {
            node: may if node in lent else may - {"training"}
            for node, may in capabilities(self.config.policy, self.home).items()
        }

    def _new_iteration(self, samples: list[str], **options: Any) -> Iteration:
        replicas = {
            "training": self.trainer.replicas,
            "inference": inside_nodes(self.may, self.config.cluster.devices_per_node, self.config.training.tp),
        }
        return Iteration(
            self.config, self.fleet, self.epochs, self.weights, self.offers, self.workers.down, samples,
            replicas=replicas, router=self.router, monitor=self.monitor, lease_numbers=self.lease_numbers, **options
        )

    def away(self) -> frozenset[str]:
        """Nodes whose training workers are not there now."""
        return frozenset(node for node, role in self.workers.down if role == "training")

    def draw(self, number: int) -> list[str]:
        """Sample ids of an iteration: the next prompts of the training split, each `group_size` times."""
        algorithm = self.config.algorithm
        first = (number - 1) * algorithm.prompts_per_step
        return [wire.sample_id(number, (first + p) % self.config.task.train_size, member)
                for p in range(algorithm.prompts_per_step) for member in range(algorithm.group_size)]

    async def _step(self, number: int, run: Iteration, batch: list[Group], last: bool) -> dict[str, float]:
        contributors = {group.node for group in batch}
        tokens = run.results.counted_tokens(batch)
        began = self.clock()
        async with self.critical:
            try:
                # Before the step: from here on a borrowed worker that dies takes nothing back that was summed.
                samples = run.ledger.trained(batch)
            except ValueError as error:  # it died while this waited for its turn
                raise wire.CallError(str(error)) from None
            lr = warmed_up_lr(self.config.training.lr, self.progress.step, self.config.training.lr_warmup_steps)
            self.is_sound = False
            if tokens:
                stepped = await self.trainer.step(contributors, tokens, lr)
            else:
                log.warning("iteration %d: no token counts (all answers are masked); the weights stay", number)
                stepped = {"grad_norm": 0.0, "lr": lr}
            self.progress.step += 1
            if last:
                # Here and not later: whoever waits to cut in does so at the first wait after this block.
                self.progress.iteration = number
            stats = run.results.stats(batch)
            self.journal.append(
                "step_committed",
                iteration=number,
                step=self.progress.step,
                samples=samples,
                loss=stats.get("loss", math.nan) / max(tokens, 1),
                grad_norm=stepped["grad_norm"],
                tokens=tokens,
                stages=run.tally.stage_ends(),
                durable=True,
            )
            self.is_sound = True
        self.last_event = self.clock()
        return {**stepped, "version": self.progress.step, "tokens": tokens, "seconds": self.clock() - began}

    # --- weights and roles

    async def wake_owners(self, joining: Iterable[str] = ()) -> None:
        """The devices of the trainer, and of nodes that join it, belong to it; they may have had another role."""
        wanted = [*self.trainer.owner_nodes, *joining]
        if asleep := [n for n in wanted if self.epochs.roles[n] != "training"]:
            await self.enter(dict.fromkeys(asleep, "training"), "the trainer's state is needed")

    async def enter(self, roles: dict[str, str], reason: str) -> None:
        """Change to these roles, all on the newest weights. A worker that dies on the way is waited for."""
        for last_try in (False, False, True):
            await self.workers.settled()
            try:
                outcome = await self.epochs.change(roles, self.weights, reason)
                if not outcome.committed:
                    raise wire.CallError(f"{reason}: roles could not be changed: {outcome.reason}")
                await self.fleet.call_each(self.home, "refresh", version=self.weights.version)
                return
            except wire.CallError as error:
                if last_try:
                    raise
                log.warning("%s; trying again", error)
                await asyncio.sleep(DEATH_NOTICE_S)

    # --- events

    def event_finished(self, node: str, **data: Any) -> None:
        self.last_event = self.clock()
        if self.stage is not None:
            self.stage.event_finished(node, **data)

    def event_scored(self, node: str, **data: Any) -> None:
        self.last_event = self.clock()
        if self.stage is not None:
            self.stage.event_scored(node, **data)

    def event_trained(self, node: str, *, lease: int, **data: Any) -> None:
        self.last_event = self.clock()
        if self.stage is not None:
            self.stage.event_trained(node, lease=lease, **data)

    def event_switched(self, node: str, **data: Any) -> None:
        if isinstance(self.stage, Iteration):
            self.stage.event_switched(node, **data)

    def event_worker_died(self, node: str, **death: Any) -> None:
        self.workers.died(node, **death)

    def event_figures(self, node: str, **data: Any) -> None:
        self.last_event = self.clock()
        with self.monitor.overhead("telemetry"):
            self.router.figures(node, self.clock(), **data)
            self.monitor.figures(node, **data)
