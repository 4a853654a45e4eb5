"""The job from top to bottom: start the step, warm start, evaluate, iterate, evaluate, end.

Reads like the algorithm. What can interrupt it (time limit, cancel, a lost step, a dead owner) ends the body at a safe
place; `run` then decides how to go on.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

from dynarl import rundir, wire
from dynarl.config import degrees
from dynarl.config.schema import Config
from dynarl.controller import initial_model
from dynarl.controller.checkpoints import Checkpoints
from dynarl.controller.epochs import Epochs, Weights
from dynarl.controller.fleet import AgentInfo, Fleet
from dynarl.controller.iteration import Iteration
from dynarl.controller.nodes import all_homes, with_inference
from dynarl.controller.recut import Recut
from dynarl.controller.replan import Replanner
from dynarl.controller.rounds import Progress, Rounds
from dynarl.controller.staging import Staging
from dynarl.controller.telemetry import Monitor
from dynarl.controller.training import Trainer
from dynarl.controller.transitions import Transitions
from dynarl.controller.warm_start import WarmStart
from dynarl.controller.workers import JobFailed, Workers
from dynarl.errors import ConfigError
from dynarl.hypergraph.journal import Journal
from dynarl.report.metrics import MetricsWriter
from dynarl.scheduler.policy import capabilities
from dynarl.transport.planning import Request, describe
from dynarl.vps.layout import Layout

log = logging.getLogger(__name__)


class Job(Rounds):
    """The job in one step. `home`: {node: home role}; first_epoch: epochs and decisions have higher numbers."""

    def __init__(self, config: Config, run: Path, attempt: int, home: dict[str, str], fleet: Fleet, journal: Journal,
                 writer: MetricsWriter, resume_from: Path | None, first_epoch: int = 0):
        super().__init__(config, home, fleet, journal, writer, Monitor(config, journal, first_epoch))
        self.run_dir, self.attempt = run, attempt
        self._first_home = home
        self._resume_from, self._first_epoch = resume_from, first_epoch
        self.workers = Workers(self)
        self.staging, self.checkpoints, self.recut = Staging(self), Checkpoints(self), Recut(self)
        self.step_started = self.last_event

    # --- start

    async def set_up(self) -> None:
        """Step, workers, model: everything is there and on the same weights when this returns."""
        config = self.config
        homes = [capabilities(config.policy, home) for home in all_homes(config, self._first_home)]
        self.may = {node: frozenset().union(*(may[node] for may in homes)) for node in self.home}
        self._rewind(self._resume_from)
        argv = await self.fleet.launch(self.home)
        self.step_started = self.clock()
        self.journal.append("step_launched", step=self.attempt, command=argv, nodes=sorted(self.home))
        self.epochs = Epochs(self.fleet, self.journal, self.home, config.policy.vote_timeout_s, self._first_epoch,
                             config.failure.give_back_s)
        self.transitions = Transitions(self.fleet, list(self.home), self._first_epoch)
        await self.workers.start_all()
        await self._load_state(self._resume_from)
        await self.epochs.go_home()

    def _rewind(self, checkpoint: Path | None) -> None:
        """Progress, the trainer's layout and home roles as in `checkpoint`; without one, those of the beginning."""
        self.progress, self.is_sound = Progress(), True
        if checkpoint:
            self.progress = Progress(**json.loads((checkpoint / "progress.json").read_text()))
        self.replanner = Replanner(self)
        home = self._first_home
        if "inference" in self.progress.plan:
            try:
                home = with_inference(home, self.progress.plan["inference"])
            except ConfigError as error:
                log.warning("inference has as many nodes as at first: %s", error)  # nodes were lost
        # A layout that was refused is not forced upon the trainer here either.
        was = self.progress.layout
        start = degrees.parse(was) if was else degrees.first(self.config.training)
        try:
            self.trainer = Trainer(self.config, self.fleet, home, start)
        except ConfigError as error:
            log.warning("the trainer starts in the first layout: %s", error)  # nodes were lost
            self.trainer = Trainer(self.config, self.fleet, home, degrees.first(self.config.training))
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
            await self.replanner.before(progress.iteration + 1)
            await self.recut.before(progress.iteration + 1)
            await self.iterate(progress.iteration + 1)
            if config.checkpoint.every and progress.iteration % config.checkpoint.every == 0:
                await self.checkpoints.begin()
        if config.task.eval_size:
            await self.evaluate("end")
        await self.checkpoints.begin()
        await self.checkpoints.written()

    def noted(self, run: Iteration, steps: list[dict[str, Any]]) -> dict[str, float]:
        return self.replanner.note(run, steps)

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

    # --- events

    def event_agent_up(self, agent: AgentInfo) -> None:
        self.journal.append("agent_up", node=agent.node, rank=agent.rank, home=agent.home, mpi=agent.mpi_library)

    async def fault(self) -> None:
        """Raises the first fault that ends the body."""
        raise await self.workers.faults.get()

    async def silence(self) -> None:
        """Raises when nothing has moved for failure.no_progress_s."""
        limit = self.config.failure.no_progress_s
        while (quiet := self.clock() - self.last_event) < limit:
            await asyncio.sleep(min(5.0, limit - quiet + 0.1))
        raise JobFailed(f"nothing has moved for {quiet:.0f} s (failure.no_progress_s); the logs of the workers are in "
                        f"{rundir.logs(self.run_dir, self.attempt)}")

    async def close(self) -> None:
        self.workers.cancel()
        self._give_up_background()
        await self.fleet.stop()

    def _give_up_background(self) -> None:
        self.checkpoints.give_up()
        self.recut.give_up()
