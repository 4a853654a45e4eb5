"""What becomes of a job whose controller is gone.

Because of --no-kill Slurm (22.05) leaves a job RUNNING when it loses the first node, with the batch script on it. Nobody
is left who would ever end it, so each agent that gives up asks Slurm to start the job again, or else to end it. All find
the same and ask at about the same time; the first one's request counts, the others see that it was made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from dynarl.errors import SlurmError
from dynarl.slurm.client import Client, Presence, TransientError

log = logging.getLogger(__name__)

# slurmctld may have gone down together with the node.
ASK_TIMES = 20
PAUSE_S = 30.0


@dataclass(frozen=True)
class Orphan:
    """The job as one of its agents knows it: its own node, and how often the job had been started again before this
    start. max_requeues: 0 where it must not be started again. cancel_asked: the user wants its end.
    """

    job_id: str
    node: str
    restarts: int
    max_requeues: int
    cancel_asked: bool = False


@dataclass(frozen=True)
class Outcome:
    """How the run stands. `state`: requeued; cancelled by the user or failed, with the job ended; None where nothing was
    to be done.
    """

    state: str | None
    text: str


def settle(
    client: Client,
    orphan: Orphan,
    runs_on: Callable[[], bool],
    pause: Callable[[float], None] = time.sleep,
) -> Outcome:
    """Have the job requeued or cancelled. `runs_on`: whether the controller is there all the same, and does without this
    agent.

    Raises SlurmError where Slurm refuses both, or stays silent for long.
    """
    for left in reversed(range(ASK_TIMES)):
        try:
            return _ask(client, orphan, runs_on)
        except TransientError as error:
            if not left:
                raise
            log.warning("%s; asking again in %g s", error, PAUSE_S)
            pause(PAUSE_S)
    raise AssertionError("unreachable")


def _ask(client: Client, orphan: Orphan, runs_on: Callable[[], bool]) -> Outcome:
    job_id = orphan.job_id
    if (why := _needs_nothing(client, orphan)) or runs_on():
        return Outcome(None, why or f"job {job_id} goes on without this node")
    # After the state: a job that was started again in between is seen by its count.
    found = client.restarts(job_id)
    if found.count != orphan.restarts:
        return Outcome(None, f"job {job_id} has been started again")
    if orphan.cancel_asked:
        why = "a cancel was asked for"
    elif not found.allowed or not orphan.max_requeues:
        why = "it is not to be requeued"
    elif orphan.restarts >= orphan.max_requeues:
        why = f"it was requeued {orphan.restarts} times (cluster.max_requeues)"
    else:
        try:
            client.requeue(job_id)
            return Outcome("requeued", f"asked Slurm to requeue job {job_id}")
        except TransientError:
            raise
        except SlurmError as error:
            if already := _needs_nothing(client, orphan):
                return Outcome(None, already)
            why = str(error)
    client.cancel(job_id)
    return Outcome("cancelled" if orphan.cancel_asked else "failed", f"cancelled job {job_id}, since {why}")


def _needs_nothing(client: Client, orphan: Orphan) -> str:
    """Why the job is none that somebody has to end; empty if it is one. Raises TransientError where Slurm is silent."""
    job = client.job(orphan.job_id)
    if job.presence is Presence.UNKNOWN:
        raise TransientError(job.detail)
    if job.state != "RUNNING":
        return f"job {job.id} is {job.state or 'gone'} already"
    if orphan.node not in job.nodes:
        return f"job {job.id} goes on without this node"
    return ""
