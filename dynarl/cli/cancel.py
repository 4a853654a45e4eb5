"""`dynarl cancel`: end a run in good order, and by force where that does not work."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dynarl.cli import output

if TYPE_CHECKING:
    from dynarl.slurm.client import Client

POLL_S = 0.5
# Time for Slurm itself, on top of KillWait (30 s by default), after which a killed job should be gone.
FORCED_END_S = 90.0


@click.command("cancel", cls=output.Command)
@click.argument("run")
@click.option("--now", is_flag=True, help="No checkpoint, no last records: end the job at once.")
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="How long the run may take to save itself; default: its cluster.signal_before_s.",
)
@output.format_option()
def command(run: str, now: bool, grace_s: float | None, output_format: str) -> None:
    """End RUN: it saves a checkpoint, records that it was cancelled and ends its job.

    A run that does not react within the grace time is ended by force.
    """
    from dynarl import rundir
    from dynarl.config import load
    from dynarl.slurm import backend

    path = rundir.resolve(run)
    if grace_s is None:
        grace_s = float(load.load_layers(rundir.config(path)).config.cluster.signal_before_s)
    how, job_id = cancel(backend.client(), path, 0.0 if now else grace_s, say=output.note)
    if output_format == "json":
        output.print_json({"run": path.name, "job_id": job_id, "how": how})
    else:
        click.echo(f"{path.name}: job {job_id} has ended ({how})")


def cancel(
    client: Client,
    run: Path,
    grace_s: float,
    *,
    say: Callable[[str], None] = lambda text: None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[str, str]:
    """End the live job of a run; how it went ("graceful", "before it started", "forced") and the id of the job.

    Three knocks, each louder: a file that the controller looks for; USR1 to the controller, in case the file system
    keeps the file from it; scancel, which ends everything at once. Raises NotFoundError where nothing is left to
    cancel, WaitTimeout where Slurm does not get rid of the job.
    """
    from dynarl.errors import NotFoundError, WaitTimeout
    from dynarl.slurm.submission import live_job

    job = live_job(client, run)
    if job is None:
        raise NotFoundError(f"{run.name} has no job in Slurm any more: there is nothing to cancel")

    def gone_within(seconds: float) -> bool:
        deadline = clock() + seconds
        while client.job(job.id).alive is not False:
            if clock() >= deadline:
                return False
            sleep(POLL_S)
        return True

    if job.state == "PENDING":
        client.cancel(job.id)
        how = "before it started"
    elif grace_s > 0:
        say(f"asking job {job.id} to end; up to {grace_s:g} s")
        ask(run)
        if gone_within(grace_s / 2):
            return "graceful", job.id
        say("no end yet; sending the controller USR1")
        client.cancel(job.id, signal="USR1", batch_only=True)
        if gone_within(grace_s / 2):
            return "graceful", job.id
        say("no end yet; ending it by force")
        client.cancel(job.id)
        how = "forced"
    else:
        client.cancel(job.id)
        how = "forced"
    if not gone_within(FORCED_END_S):
        raise WaitTimeout(
            f"job {job.id} is still {client.job(job.id).state} {FORCED_END_S:g} s after scancel; "
            f"see `scontrol show job {job.id}`"
        )
    return how, job.id


def ask(run: Path) -> None:
    """Leave word for the controller, which looks twice a second."""
    file = run / "control" / "cancel"
    file.parent.mkdir(exist_ok=True)
    file.touch()
