"""Checkpoints of a job: the state is copied while everything stands still, and written while the job goes on.

    begin -> (owners write what they copied) -> marked complete      settle, written: wait for that

One at a time. A write that fails is recorded and costs nothing but this checkpoint: the next one is the next chance.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from dynarl import rundir
from dynarl.transport.files import write_durably
from dynarl.transport.hf import copy_small_files
from dynarl.wire import CallError

if TYPE_CHECKING:
    from dynarl.controller.job import Job

log = logging.getLogger(__name__)


class Checkpoints:
    """Those that the job writes; which there are says rundir."""

    def __init__(self, job: Job):
        self._job = job
        self._writing: asyncio.Future | None = None

    async def begin(self) -> None:
        """Copy everything that the next start needs, and begin to write it. Does nothing where this iteration has a
        checkpoint."""
        await self.settle()
        path = rundir.checkpoint(self._job.run_dir, self._job.progress.iteration)
        if (path / rundir.COMPLETE).exists():
            return
        if path.exists():
            shutil.rmtree(path)
        (path / "model").mkdir(parents=True)
        await self._job.wake_owners()
        await self._job.trainer.snapshot(path)
        self._writing = asyncio.ensure_future(self._write(path, json.dumps(vars(self._job.progress))))

    async def _write(self, path: Path, progress: str) -> None:
        job, began = self._job, self._job.clock()
        await asyncio.to_thread(copy_small_files, job.model_dir, path / "model")
        write_durably(path / "progress.json", progress.encode())
        await job.trainer.saved()
        rundir.mark_complete(path)
        job.journal.append(
            "checkpoint_saved", iteration=rundir.checkpoint_iteration(path), path=str(path), durable=True
        )
        rundir.prune_checkpoints(job.run_dir, job.config.checkpoint.keep)
        log.info("checkpoint %s written in %.2f s", path.name, job.clock() - began)

    async def written(self) -> None:
        """Wait for a checkpoint that is being written. Raises CallError, TimeoutError or OSError where that failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def settle(self) -> None:
        """As `written`, but a failure is recorded and otherwise left: the state itself is sound."""
        try:
            await self.written()
        except (CallError, TimeoutError, OSError) as error:
            self._job.journal.append("checkpoint_failed", reason=str(error), durable=True)
            log.error("a checkpoint could not be written: %s", error)

    async def save_interrupted(self) -> None:
        """Checkpoint of the last completed iteration. With several minibatches an iteration may be half done, and a step
        may have failed half way: then the weights are ahead of any whole iteration, and the newest older checkpoint
        stays what the next start uses."""
        if self._job.is_sound and (self._job.config.algorithm.minibatches == 1 or self._job.stage is None):
            await self.begin()
        await self.written()

    def give_up(self) -> None:
        """Stop waiting for what is being written; it is never marked complete."""
        if self._writing is not None:
            self._writing.cancel()
        self._writing = None
