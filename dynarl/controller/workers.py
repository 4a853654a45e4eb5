"""The role workers of all nodes: starting them, giving them a model, and starting those again that died."""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dynarl import rundir
from dynarl.config import interpreters
from dynarl.controller.iteration import Iteration
from dynarl.slurm import environ
from dynarl.transport.hf import export_model
from dynarl.wire import CallError

if TYPE_CHECKING:
    from dynarl.controller.job import Job

log = logging.getLogger(__name__)

# Before fresh workers are started once more; also, a failed call comes before the report of the death that caused it.
RETRY_PAUSE_S = 0.5
# Iterations without a restart after which those before are forgotten: failure.max_restarts is there to end a job that
# gets nowhere, and one that has got so far since is none.
FORGIVEN_AFTER = 5


class JobFailed(RuntimeError):
    """The job cannot go on; the message is for the person who reads the status."""


class OwnerLost(RuntimeError):
    """A worker that owned optimizer state died: the trainer goes back to the newest checkpoint."""


class Workers:
    """`down`: the (node, role) whose workers died and are not back yet. `faults`: what ends the job's body."""

    def __init__(self, job: Job):
        self._job = job
        self.down: set[tuple[str, str]] = set()
        self.faults: asyncio.Queue[BaseException] = asyncio.Queue()
        self._restarts = self._restarted_in = 0  # and the iteration in which the last one was
        self._deaths: Counter[tuple[str, str]] = Counter()
        self._reviving: set[asyncio.Task] = set()
        self._worlds = itertools.count(1)

    async def start_all(self) -> None:
        """All roles that each node may take, and its environment."""
        job = self._job
        await asyncio.gather(
            *(self.start(node, role) for node in job.home for role in sorted(job.may[node])),
            *(self._start_environment(node) for node in job.home),
        )

    async def start(self, node: str, role: str) -> None:
        """The workers of one role on one node, one per device."""
        await asyncio.gather(
            *(self._start_worker(node, role, device) for device in range(self._job.config.cluster.devices_per_node))
        )

    async def settled(self) -> None:
        """Wait until no worker is being started again."""
        await asyncio.gather(*self._reviving)

    def cancel(self) -> None:
        for task in self._reviving:
            task.cancel()

    def count_restart(self, why: str) -> None:
        """One more restart. Raises JobFailed when that is more than failure.max_restarts, those before the last
        `FORGIVEN_AFTER` iterations without one not counted."""
        iteration = self._job.progress.iteration
        if iteration - self._restarted_in >= FORGIVEN_AFTER:
            self._restarts = 0
        self._restarted_in = iteration
        self._restarts += 1
        most = self._job.config.failure.max_restarts
        if self._restarts > most:
            raise JobFailed(f"{why}; that was restart {self._restarts} of at most {most} (failure.max_restarts)")

    async def start_afresh(self) -> None:
        """New training workers everywhere, and new ones for all that are down."""
        job = self._job
        self.cancel()
        await asyncio.gather(*self._reviving, return_exceptions=True)
        training = [node for node in job.home if "training" in job.may[node]]
        lost = {(n, r) for n, r in self.down if r != "training"}
        await job.epochs.go_home()
        # First: a training worker may sit in a collective with one that died, and would answer nobody.
        await job.fleet.call_each(training, "kill_workers", role="training")
        await asyncio.gather(*(job.fleet.call(node, "halt", role=role) for node, role in job.home.items()))
        for role, nodes in [("training", training)] + [(r, [n]) for n, r in sorted(lost)]:
            await job.fleet.call_each(nodes, "kill_workers", role=role)
            await asyncio.gather(*(self.start(n, role) for n in nodes))
        self.down.clear()

    async def _start_worker(self, node: str, role: str, device: int) -> None:
        python = interpreters.of_role(self._job.config, role)
        env = environ.model_settings(self._job.config.cluster.interface) | self._job.config.cluster.env
        started = await self._job.fleet.call(
            node,
            "start_worker",
            role=role,
            device=device,
            python=python,
            env=env,
            device_kind=self._job.config.cluster.device,
            limit_s=self._job.config.rollout.start_timeout_s,
            hang_s=self._job.config.failure.hang_s.get(role, 0.0),
        )
        self._job.journal.append("worker_up", node=node, role=role, device=device, attempt=started["attempt"])

    async def _start_environment(self, node: str) -> None:
        started = await self._job.fleet.call(
            node,
            "start_worker",
            role="environment",
            device=0,
            python=None,
            env=self._job.config.cluster.env,
            device_kind="cpu",
            limit_s=self._job.config.rollout.start_timeout_s,
            hang_s=self._job.config.failure.hang_s.get("environment", 0.0),
        )
        await self._job.fleet.call(
            node,
            "open_environment",
            task=msgspec.to_builtins(self._job.config.task),
            seed=self._job.config.run.seed,
            limit_s=self._job.config.task.verify_timeout_s,
            # Prompts are written in the vocabulary of the model that is trained; a fresh model takes the task's.
            tokenizer_dir=str(rundir.config_dir(given)) if (given := self._job.config.model.path) else None,
        )
        self._job.journal.append("worker_up", node=node, role="environment", device=0, attempt=started["attempt"])

    async def prepare(self, node: str, role: str, version: int) -> None:
        """Models of the roles that do not own them: build inference, load rollout."""
        places = range(self._job.config.cluster.devices_per_node)
        directory = self._job.trainer.staged(node, version)
        if role == "rollout":
            await asyncio.gather(
                *(
                    self._job.fleet.worker(
                        node,
                        role,
                        d,
                        "load",
                        timeout_s=self._job.config.rollout.start_timeout_s,
                        model_dir=directory,
                        version=version,
                        config=msgspec.to_builtins(self._job.config),
                    )
                    for d in places
                )
            )
            await self._job.fleet.call(node, "loaded", role=role, version=version)
        elif role == "inference":
            await self._build_inference(node, directory, version)
        if self._job.epochs.roles[node] != role:
            await asyncio.gather(*(self._job.fleet.worker(node, role, d, "sleep") for d in places))

    async def _build_inference(self, node: str, directory: str, version: int) -> None:
        width = self._job.config.training.tp
        for first in range(0, self._job.config.cluster.devices_per_node, width):
            host = self._job.fleet.agents[node].host
            store = await self._job.fleet.worker(node, "inference", first, "serve_store", host=host)
            world = f"inference-{node}-{first}-{next(self._worlds)}"
            await asyncio.gather(
                *(
                    self._job.fleet.worker(
                        node,
                        "inference",
                        first + rank,
                        "build",
                        config=msgspec.to_builtins(self._job.config),
                        store=store,
                        world=world,
                        rank=rank,
                        size=width,
                        model_dir=directory,
                        version=version,
                    )
                    for rank in range(width)
                )
            )
            if self._job.config.algorithm.kl_loss_coef > 0:
                reference = str(self._reference_dir())
                await asyncio.gather(
                    *(
                        self._job.fleet.worker(node, "inference", first + rank, "ref_load", model_dir=reference)
                        for rank in range(width)
                    )
                )
        await self._job.fleet.call(node, "loaded", role="inference", version=version)

    def _reference_dir(self) -> Path:
        warm = self._job.run_dir / "reference"
        return warm if warm.exists() else self._job.run_dir / "model"

    async def make_reference(self) -> None:
        """The reference of the KL term is the model after the warm start. It appears by a rename, so it is whole."""
        await self._job.checkpoints.written()
        target, part = self._job.run_dir / "reference", self._job.run_dir / "reference.part"
        if target.exists():
            return
        warm = rundir.checkpoint(self._job.run_dir, 0)
        if not (warm / rundir.COMPLETE).exists():
            raise JobFailed(f"the model after the warm start, reference of the KL term, is neither in {target} nor in {warm}")
        shutil.rmtree(part, ignore_errors=True)
        await asyncio.to_thread(export_model, warm, part)
        part.rename(target)

    async def load_reference(self) -> None:
        """Give it to the inference workers that are there already."""
        await asyncio.gather(
            *(
                self._job.fleet.worker(n, "inference", d, "ref_load", model_dir=str(self._reference_dir()))
                for n, may in self._job.may.items()
                if "inference" in may
                for d in range(self._job.config.cluster.devices_per_node)
            )
        )

    # --- workers that die

    def died(self, node: str, *, role: str, device: int, attempt: int, status: str, tail: list[str], reason: str = "",
             held: list[str] | None = None) -> None:
        """Record it; then the job ends, the trainer goes back, or fresh workers take over, as the configuration says.

        reason: why its agent has ended it; held: requests whose answer so far is recorded on the node.
        """
        worker = {"node": node, "role": role, "device": device, "attempt": attempt}
        if reason:
            self._job.journal.append("worker_rebooted", **worker, reason=reason)
        self._job.journal.append("worker_died", **worker, status=status, tail=tail)
        log.error(
            "%s worker %d on %s (attempt %d) died: %s\n    %s", role, device, node, attempt, status, "\n    ".join(tail)
        )
        text = f"{role} worker {device} on {node} died: {reason or status}"
        self._deaths[node, role] += 1
        try:
            if getattr(self._job.config.failure, role) == "end":
                raise JobFailed(f"{text}; failure.{role} is 'end'")
            self.count_restart(text)
        except JobFailed as fault:
            self.faults.put_nowait(fault)
            return
        if role == "training" and self._job.home[node] == "training":
            self.faults.put_nowait(OwnerLost(text))
        elif role != "environment":
            if self._job.stage is not None:
                self._job.stage.worker_lost(node, role, held or ())
            if (node, role) not in self.down:
                self.down.add((node, role))
                task = asyncio.ensure_future(self._revive(node, role))
                self._reviving.add(task)
                task.add_done_callback(self._revived)

    def _revived(self, task: asyncio.Task) -> None:
        self._reviving.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.faults.put_nowait(JobFailed(f"a worker could not be started again: {task.exception()}"))

    async def _revive(self, node: str, role: str) -> None:
        """Fresh workers of a role on one node, on the weights of its role; these do not change before it is done. If it
        fails, once more, as long as failure.max_restarts allows."""
        while True:
            deaths = self._deaths[node, role]
            try:
                await self._job.fleet.call(node, "kill_workers", role=role)  # what is left of a replica is of no use
                await self.start(node, role)
                async with self._job.staging.lock:  # the version that is read stays meanwhile
                    await self._load_again(node, role)
                break
            except (CallError, TimeoutError) as error:
                log.warning("%s on %s could not be started again: %s", role, node, error)
                await asyncio.sleep(RETRY_PAUSE_S)
                if deaths == self._deaths[node, role]:  # else counted when it died
                    self.count_restart(f"{role} on {node} could not be started again: {error}")
        self.down.discard((node, role))

    async def _load_again(self, node: str, role: str) -> None:
        if role == "training":
            version = self._job.staging.versions[node]  # may be an older one than the newest; that comes when the node is entered
            await self._job.trainer.build_node(node, version)
            await self._job.fleet.call(node, "loaded", role=role, version=version)
            if self._job.epochs.roles[node] != role:
                for device in range(self._job.config.cluster.devices_per_node):
                    await self._job.fleet.worker(node, role, device, "sleep")
            # Not beside a reduction: one worker would wait for the old group and another for the new one.
            async with self._job.critical:
                await self._job.trainer.join(without=frozenset(n for n, r in self.down if r == "training" and n != node))
        else:
            # After the first minibatch trainers are ahead of the weights that generate and score.
            weights = self._job.stage.weights if isinstance(self._job.stage, Iteration) else self._job.weights
            await self.prepare(node, role, min(weights.version, self._job.staging.versions[node]))
