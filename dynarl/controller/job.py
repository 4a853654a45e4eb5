"""The job from top to bottom: start the step, warm start, evaluate, iterate, evaluate, end.

Reads like the algorithm. What can interrupt it (time limit, cancel, a lost step, a dead owner) ends the body at a safe
place; `run` then decides how to go on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynarl import rundir, wire
from dynarl.config import degrees
from dynarl.config.schema import Config
from dynarl.controller import initial_model, metrics
from dynarl.controller.checkpoints import Checkpoints
from dynarl.controller.epochs import Epochs, Weights
from dynarl.controller.fleet import AgentInfo, Fleet
from dynarl.controller.iteration import Iteration
from dynarl.controller.nodes import all_homes
from dynarl.controller.recut import Recut
from dynarl.controller.replicas import inside_nodes
from dynarl.controller.router import Router
from dynarl.controller.staging import Staging
from dynarl.controller.telemetry import Monitor
from dynarl.controller.training import Trainer
from dynarl.controller.transitions import Transitions
from dynarl.controller.warm_start import WarmStart
from dynarl.controller.workers import JobFailed, Workers
from dynarl.dataflow.ledger import Group
from dynarl.errors import ConfigError
from dynarl.hypergraph.journal import Journal
from dynarl.report.metrics import MetricsWriter
from dynarl.rl.schedule import warmed_up_lr
from dynarl.scheduler.policy import capabilities
from dynarl.transport.planning import Request, describe
from dynarl.vps.layout import Layout

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


class Job:
    """The job in one step. `home`: {node: home role}; first_epoch: epochs and decisions have higher numbers."""

    def __init__(self, config: Config, run: Path, attempt: int, home: dict[str, str], fleet: Fleet, journal: Journal,
                 writer: MetricsWriter, resume_from: Path | None, first_epoch: int = 0):
        self.config, self.run_dir, self.attempt = config, run, attempt
        self._first_home = self.home = home
        self.journal, self.writer = journal, writer
        self.fleet, fleet.listener = fleet, self
        self.progress = Progress()
        self.weights = Weights(0, "")
        self.may: dict[str, frozenset[str]] = {}
        self.offers = self.may  # roles that a node may be given; without training where no replica fits
        self.critical = asyncio.Lock()  # held while the optimizer steps: nothing may cut in between step and record
        self._resume_from, self._first_epoch = resume_from, first_epoch
        self.stage: Iteration | WarmStart | None = None  # what the workers' events are for
        self.workers = Workers(self)
        self.staging, self.checkpoints, self._recut = Staging(self), Checkpoints(self), Recut(self)
        self.monitor = Monitor(config, journal, first_epoch)
        self.router = Router(config, self.monitor.lengths)
        self.last_event = self.step_started = time.monotonic()

    # --- start

    async def set_up(self) -> None:
        """Step, workers, model: everything is there and on the same weights when this returns."""
        config = self.config
        homes = [capabilities(config.policy, home) for home in all_homes(config, self._first_home)]
        self.may = {node: frozenset().union(*(may[node] for may in homes)) for node in self.home}
        self._rewind(self._resume_from)
        argv = await self.fleet.launch(self.home)
        self.step_started = time.monotonic()
        self.journal.append("step_launched", step=self.attempt, command=argv, nodes=sorted(self.home))
        self.epochs = Epochs(self.fleet, self.journal, self.home, config.policy.vote_timeout_s, self._first_epoch,
                             config.failure.give_back_s)
        self.transitions = Transitions(self.fleet, list(self.home), self._first_epoch)
        await self.workers.start_all()
        await self._load_state(self._resume_from)
        await self.epochs.go_home()

    def _rewind(self, checkpoint: Path | None) -> None:
        """Progress, the trainer's layout and home roles as in `checkpoint`; without one, those of the beginning."""
        self.progress = Progress()
        if checkpoint:
            self.progress = Progress(**json.loads((checkpoint / "progress.json").read_text()))
        # A layout that was refused is not forced upon the trainer here either.
        was = self.progress.layout
        start = degrees.parse(was) if was else degrees.first(self.config.training)
        try:
            self.trainer = Trainer(self.config, self.fleet, self._first_home, start)
        except ConfigError as error:
            log.warning("the trainer starts in the first layout: %s", error)  # nodes were lost
            self.trainer = Trainer(self.config, self.fleet, self._first_home, degrees.first(self.config.training))
        self.home = self.trainer.home

    async def _load_state(self, checkpoint: Path | None) -> None:
        """Models and optimizer state as in `checkpoint`; without one, from the beginning. Comes after `_rewind`."""
        await initial_model.write(self)
        version = self.weights.version + 1
        await self.staging.load(str(self.model_dir), version)
        self.settle()
        await self.trainer.build(version)
        if checkpoint:
            self.journal.append("resumed", iteration=self.progress.iteration, checkpoint=str(checkpoint), durable=True)
            await self.trainer.restore(checkpoint)
        self.weights = Weights(version, "")
        # The weights leave the trainer once before anything else, so that every node has the trainer's own digest of
        # them.
        await self.staging.everywhere()
        config = self.config
        if config.algorithm.kl_loss_coef > 0 and config.warm_start.steps and self.progress.warm_start_done:
            await self.workers.make_reference()
        await asyncio.gather(
            *(
                self.workers.prepare(node, role, self.weights.version)
                for node in self.home
                for role in sorted(self.may[node])
            )
        )

    async def recover_owners(self) -> None:
        """An owner's worker died, or the trainer failed in the middle of a step: all training workers start afresh,
        from the newest checkpoint. The step lives on. Raises JobFailed after failure.max_restarts."""
        self.stage = None
        self._give_up_background()
        self.workers.count_restart("the trainer has to start again")
        checkpoint = rundir.newest_checkpoint(self.run_dir)
        self._rewind(checkpoint)
        self.settle()
        await self.workers.start_afresh()
        if checkpoint is None:
            self.journal.append("resumed", iteration=0, checkpoint=None, durable=True)
        await self._load_state(checkpoint)

    @property
    def model_dir(self) -> Path:
        """The initial model; its config.json and tokenizer are those of all later ones."""
        return self.run_dir / "model"

    # --- the body

    async def body(self) -> None:
        """All stages that are still to do."""
        config, progress = self.config, self.progress
        if config.warm_start.steps and not progress.warm_start_done:
            await self.warm_start()
        if config.task.eval_size and not progress.evaluated_start:
            await self.evaluate("start")
        while progress.iteration < config.run.iterations:
            await self._recut.before(progress.iteration + 1)
            await self.iterate(progress.iteration + 1)
            if config.checkpoint.every and progress.iteration % config.checkpoint.every == 0:
                await self.checkpoints.begin()
        if config.task.eval_size:
            await self.evaluate("end")
        await self.checkpoints.begin()
        await self.checkpoints.written()

    async def warm_start(self) -> None:
        """Supervised steps on the task's own demonstrations."""
        self.stage = stage = WarmStart(self)
        loss = await stage.run()
        self.stage = None
        self.progress.warm_start_done = True
        self.journal.append("warm_start_done", steps=self.config.warm_start.steps, loss=loss, durable=True)
        await self.staging.everywhere()
        await self.checkpoints.begin()
        if self.config.algorithm.kl_loss_coef > 0:
            await self.workers.make_reference()
            await self.workers.load_reference()

    async def evaluate(self, when: str) -> None:
        """Held-out accuracy of the current weights."""
        await self.enter({n: "rollout" for n, may in self.may.items() if "rollout" in may}, "evaluation")
        samples = [wire.sample_id(0, index, 0) for index in range(self.config.task.eval_size)]
        self.stage = run = self._new_iteration(
            samples, split="eval", temperature=self.config.task.eval_temperature, train=False
        )
        await run.generate()
        self.stage = None
        accuracy = run.tally.correct / len(samples)
        self.journal.append(
            "evaluated",
            when=when,
            iteration=self.progress.iteration,
            accuracy=accuracy,
            size=len(samples),
            timeouts=run.tally.timed_out,
            durable=True,
        )
        self.writer.log(self.progress.iteration, {"eval/accuracy": accuracy, "eval/timeouts": run.tally.timed_out})
        self.progress.evaluated_start = True
        await self.fleet.call_each(self.home, "forget", iteration=0)

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
            replicas=replicas, router=self.router, monitor=self.monitor, **options
        )

    async def iterate(self, number: int, *, samples: list[str] | None = None) -> None:
        """One GRPO iteration: generate, score, train, step, give everybody the new weights."""
        algorithm, began = self.config.algorithm, time.monotonic()
        samples = samples or self.draw(number)
        scored = any("inference" in may for may in self.may.values())
        roles = self.monitor.start_roles(
            self.config.policy, self.home, self.offers, algorithm.prompts_per_step, algorithm.group_size, scored)
        await self.enter(roles, f"iteration {number} begins")
        self.journal.append("iteration_started", iteration=number, version=self.weights.version, samples=samples)
        self.monitor.begin(number)
        self.stage = run = self._new_iteration(samples, temperature=algorithm.temperature, scored_by_inference=scored)
        stepped = []
        for index in range(algorithm.minibatches):
            await self.trainer.begin(self.progress.step + 1, "grpo", self.away())
            await run.accumulate(index)
            if index + 1 == algorithm.minibatches:
                self.monitor.conclude()
            batch = await run.awake(index, self.trainer.owner_nodes)
            stepped.append(await self._step(number, run, batch))
            if index + 1 < algorithm.minibatches:
                # Inference still scores with the weights that generated.
                await self.staging.refresh_trainers(
                    [n for n, r in self.epochs.roles.items() if r == "training"], run.weights.version
                )
                run.training_weights = self.weights
        ended = time.monotonic()
        self.progress.iteration = number
        await self.staging.everywhere()
        self.stage = None
        await self.fleet.call_each(self.home, "forget", iteration=number)
        self.writer.log(number, metrics.of_iteration(self.config, run, stepped, len(self.home), began, ended))

    def away(self) -> frozenset[str]:
        """Nodes whose training workers are not there now."""
        return frozenset(node for node, role in self.workers.down if role == "training")

    def draw(self, number: int) -> list[str]:
        """Sample ids of an iteration: the next prompts of the training split, each `group_size` times."""
        algorithm = self.config.algorithm
        first = (number - 1) * algorithm.prompts_per_step
        return [wire.sample_id(number, (first + p) % self.config.task.train_size, member)
                for p in range(algorithm.prompts_per_step) for member in range(algorithm.group_size)]

    async def _step(self, number: int, run: Iteration, batch: list[Group]) -> dict[str, float]:
        contributors = {group.node for group in batch}
        tokens = run.counted_tokens(batch)
        began = time.monotonic()
        async with self.critical:
            try:
                # Before the step: from here on a borrowed worker that dies takes nothing back that was summed.
                samples = run.ledger.trained(batch)
            except ValueError as error:  # it died while this waited for its turn
                raise wire.CallError(str(error)) from None
            lr = warmed_up_lr(self.config.training.lr, self.progress.step, self.config.training.lr_warmup_steps)
            if tokens:
                stepped = await self.trainer.step(contributors, tokens, lr)
            else:
                log.warning("iteration %d: no token counts (all answers are masked); the weights stay", number)
                stepped = {"grad_norm": 0.0, "lr": lr}
            self.progress.step += 1
            stats = run.stats()
            self.journal.append(
                "step_committed",
                iteration=number,
                step=self.progress.step,
                samples=samples,
                loss=stats.get("loss", math.nan) / max(tokens, 1),
                grad_norm=stepped["grad_norm"],
                tokens=tokens,
                stages=run.stage_ends(),
                durable=True,
            )
        self.last_event = time.monotonic()
        return {**stepped, "version": self.progress.step, "tokens": tokens, "seconds": time.monotonic() - began}

    # --- weights and roles

    async def wake_owners(self, joining: Iterable[str] = ()) -> None:
        """The devices of the trainer, and of nodes that join it, belong to it; they may have had another role."""
        wanted = [*self.trainer.owner_nodes, *joining]
        if asleep := [n for n in wanted if self.epochs.roles[n] != "training"]:
            await self.enter(dict.fromkeys(asleep, "training"), "the trainer's state is needed")

    def transition(self, destination: Layout, kinds: list[str]) -> Request:
        """From the trainer's layout to another one."""
        model = json.loads((self.model_dir / "config.json").read_text())
        dtype = self.config.model.dtype
        return Request(
            model=model | {"dtype": dtype, "torch_dtype": dtype},
            source=describe(self.trainer.layout),
            destination=describe(destination),
            kinds=kinds,
            num_nodes=self.trainer.places.num_nodes,
            devices_per_node=self.trainer.places.devices_per_node,
        )

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

    def event_agent_up(self, agent: AgentInfo) -> None:
        self.journal.append("agent_up", node=agent.node, rank=agent.rank, home=agent.home, mpi=agent.mpi_library)

    def event_finished(self, node: str, **data: Any) -> None:
        self.last_event = time.monotonic()
        if self.stage is not None:
            self.stage.event_finished(node, **data)

    def event_scored(self, node: str, **data: Any) -> None:
        self.last_event = time.monotonic()
        if self.stage is not None:
            self.stage.event_scored(node, **data)

    def event_trained(self, node: str, *, lease: int, **data: Any) -> None:
        self.last_event = time.monotonic()
        if self.stage is not None:
            self.stage.event_trained(node, lease=lease, **data)

    def event_worker_died(self, node: str, **death: Any) -> None:
        self.workers.died(node, **death)

    def event_figures(self, node: str, **data: Any) -> None:
        self.last_event = time.monotonic()
        self.router.figures(node, asyncio.get_running_loop().time(), **data)
        self.monitor.figures(node, **data)

    async def fault(self) -> None:
        """Raises the first fault that ends the body."""
        raise await self.workers.faults.get()

    async def silence(self) -> None:
        """Raises when nothing has moved for failure.no_progress_s."""
        limit = self.config.failure.no_progress_s
        while (quiet := time.monotonic() - self.last_event) < limit:
            await asyncio.sleep(min(5.0, limit - quiet + 0.1))
        raise JobFailed(f"nothing has moved for {quiet:.0f} s (failure.no_progress_s); the logs of the workers are in "
                        f"{rundir.logs(self.run_dir, self.attempt)}")

    async def close(self) -> None:
        self.workers.cancel()
        self._give_up_background()
        await self.fleet.stop()

    def _give_up_background(self) -> None:
        self.checkpoints.give_up()
        self._recut.give_up()
