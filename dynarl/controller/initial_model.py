"""The model that a run begins with, in Hugging Face form: a copy of model.path, or a fresh small one."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dynarl import rundir
from dynarl.transport.hf import export_model

if TYPE_CHECKING:
    from dynarl.controller.job import Job


async def write(job: Job) -> None:
    """Write it to `job.model_dir`, unless it is there. It appears by a rename, so it is whole."""
    target = job.model_dir
    if target.exists():
        return
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    if job.config.model.path:
        await asyncio.to_thread(_copy, Path(job.config.model.path).expanduser(), part)
    else:
        await _create(job, part)
    part.rename(target)


def _copy(given: Path, target: Path) -> None:
    if rundir.config_dir(given) != given:  # a checkpoint of ours
        export_model(given, target)
        return
    target.mkdir()
    for path in given.iterdir():
        if path.is_file():
            shutil.copyfile(path, target / path.name)


async def _create(job: Job, target: Path) -> None:
    target.mkdir()
    node, device = job.trainer.leader
    await job.fleet.worker(node, "environment", 0, "save_tokenizer", dir=str(target))
    await job.fleet.worker(
        node,
        "training",
        device,
        "create_model",
        model_dir=str(target),
        model=msgspec.to_builtins(job.config.model),
        tokenizer_dir=str(target),
        seed=job.config.run.seed,
    )
