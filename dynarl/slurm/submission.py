"""Giving a run to Slurm. On any error nothing has been submitted and the disk is as it was before."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dynarl import rundir
from dynarl.config import load, validate
from dynarl.config.schema import Config
from dynarl.errors import DynarlError, NotFoundError, SlurmError
from dynarl.slurm import environ, jobscript, preflight
from dynarl.slurm.client import Client, JobInfo, Presence

POLL_S = 5.0


class RunBusy(DynarlError):
    """A job of the run is still in Slurm's hands."""


@dataclass(frozen=True)
class Submitted:
    """`notes`: what preflight found worth saying."""

    run: Path
    job_id: str
    notes: tuple[str, ...]


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """What sbatch is called in, and what the job therefore starts with."""
    return environ.for_sbatch(os.environ if base is None else base) | jobscript.environment()


def submit_new(client: Client, config: Config) -> Submitted:
    """Submit a checked configuration as a new run."""
    notes = _notes(preflight.require(client, config))
    root = rundir.runs_root(config.run.root)
    root_is_new = not root.exists()
    run = rundir.create(root, config.run.name)
    try:
        rundir.config(run).write_text(load.dump(config))
        job_id = client.submit(jobscript.sbatch_command(config, run), environment())
    except BaseException:
        shutil.rmtree(run)
        if root_is_new:
            root.rmdir()
        raise
    return _noted(run, job_id, notes)


def submit_resume(client: Client, run: Path, overrides: Iterable[str] = ()) -> Submitted:
    """Submit a run again; it goes on from its newest complete checkpoint. `overrides` change its configuration for
    good.
    """
    path = rundir.config(run)
    if not path.is_file():
        raise NotFoundError(f"{run} has no config.yaml, so there is nothing to resume")
    config = load.load_layers(path, overrides).config
    validate.check(config)
    _refuse_if_busy(client, run)
    notes = _notes(preflight.require(client, config))
    if rundir.newest_checkpoint(run) is None:
        notes += ("this run has no complete checkpoint: it starts from the beginning",)
    before = path.read_bytes()
    try:
        _replace(path, load.dump(config).encode())
        job_id = client.submit(jobscript.sbatch_command(config, run, resume=True), environment())
    except BaseException:
        _replace(path, before)
        raise
    return _noted(run, job_id, notes)


def live_job(client: Client, run: Path) -> JobInfo | None:
    """The newest job of the run that waits or runs. Raises SlurmError where Slurm does not say."""
    for job_id in reversed(rundir.job_ids(run)):
        info = client.job(job_id)
        if info.alive is None:
            raise SlurmError(f"cannot tell whether job {job_id} of {run.name} is still there: {info.detail}")
        if info.alive:
            return info
    return None


def wait(client: Client, job_id: str, sleep: Callable[[float], None] = time.sleep) -> JobInfo:
    """The job once it can never run again. One that is requeued is waited for; so is one that Slurm is silent about."""
    while True:
        info = client.job(job_id)
        if info.alive is False:
            return info
        sleep(POLL_S)


def succeeded(info: JobInfo) -> bool | None:
    """How a job ended; None where Slurm has forgotten it already (MinJobAge) and the journal has to say."""
    return None if info.presence is Presence.ABSENT else info.state == "COMPLETED"


def _refuse_if_busy(client: Client, run: Path) -> None:
    job = live_job(client, run)
    if job is not None:
        raise RunBusy(
            f"job {job.id} of {run.name} is {job.state}: two jobs must not work on one run. "
            f"End it first: dynarl cancel {run.name}"
        )


def _notes(findings: list[preflight.Finding]) -> tuple[str, ...]:
    return tuple(finding.text for finding in findings if finding.level is preflight.Level.NOTE)


def _noted(run: Path, job_id: str, notes: tuple[str, ...]) -> Submitted:
    # The job may have started by now, and notes the same.
    if job_id not in rundir.job_ids(run):
        rundir.add_job(run, job_id)
    rundir.set_latest(run)
    return Submitted(run, job_id, notes)


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(content)
    fresh.replace(path)
