"""A run as seen from outside: the hypergraph folded so far and the metrics, both read from files; Slurm is asked only
when the journal has been silent, since a controller that was killed could not write that it ended."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dynarl import rundir
from dynarl.config import load
from dynarl.errors import ConfigError, SlurmError
from dynarl.hypergraph.fold import fold
from dynarl.hypergraph.graph import Graph
from dynarl.hypergraph.journal import Reader, Record
from dynarl.report.metrics import MetricsReader
from dynarl.slurm.cli_client import CliClient
from dynarl.slurm.client import JobInfo, Presence

# A working controller writes several records per iteration; loading an engine may take longer, then Slurm is asked.
QUIET_S = 30.0
SLURM_TIMEOUT_S = 5.0

ENDED_WELL = ("completed",)
ENDED_BADLY = ("failed", "cancelled", "lost")


@dataclass(frozen=True)
class State:
    """pending, running, completed, failed, cancelled, requeued, lost (gone without saying so) or unknown; and why."""

    name: str
    reason: str | None = None

    @property
    def final(self) -> bool:
        return self.name in ENDED_WELL + ENDED_BADLY


class RunView:
    """`graph` and `metrics` are those after the last `poll`; before the first one they are empty."""

    def __init__(self, run: Path):
        self.run = run
        self.journal = Reader(rundir.journal(run))
        self.metrics = MetricsReader(run)
        self.graph = Graph(config=configuration(run))

    def poll(self) -> list[Record]:
        """Take in what was written since; returns the new records of the journal."""
        records = list(self.journal)
        fold(records, self.graph)
        self.metrics.poll()
        return records

    def state(self, ask: Callable[[str], JobInfo] | None = None, now: float | None = None) -> State:
        """How the run stands. `ask` is called only if the journal cannot tell; default: squeue, for 5 s at most."""
        jobs = rundir.job_ids(self.run)
        newer_job = jobs and self.graph.job_id is not None and jobs[-1] != self.graph.job_id and jobs[-1]
        job_id = newer_job or self.graph.job_id or (jobs[-1] if jobs else None)
        found = judge(
            self.graph, job_id, bool(newer_job), ask or ask_slurm, time.time() if now is None else now
        )
        if found.name == "lost" and not self.graph.attempt:
            return State(found.name, f"{found.reason}. {self._before_the_controller(job_id)}")
        return found

    def _before_the_controller(self, job_id: str) -> str:
        """Where to look when a job has ended without a word in the journal."""
        said = rundir.batch_output(self.run, job_id)
        if said.exists():
            return f"What it said is in {said}"
        return f"Not even its output is in {self.run}: do the nodes see that directory, and may you write there?"


def judge(graph: Graph, job_id: str | None, newer_job: bool, ask: Callable[[str], JobInfo], now: float) -> State:
    """State from the journal, and from Slurm about `job_id`. `newer_job`: it has not written to the journal yet."""
    written = _from_journal(graph)
    if written.final and not newer_job:
        return written
    quiet_s = now - graph.last_t if graph.last_t is not None else None
    if written.name == "running" and not newer_job and quiet_s < QUIET_S:
        return written
    silence = "nothing was written yet" if quiet_s is None else f"the journal has been silent for {quiet_s:.0f} s"
    if job_id is None:
        return State("unknown", f"{silence}, and no Slurm job is known for this run")
    job = ask(job_id)
    if job.alive is None:
        if written.final or written.name == "requeued":
            return written
        return State("unknown", f"{silence}; Slurm does not say how job {job_id} is: {job.detail}")
    if not job.alive:
        return written if written.final else _gone(job, silence)
    # COMPLETING: until Slurm has given up a node that does not answer (SlurmdTimeout, 300 s by default).
    waits = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
    if job.state in waits or (written.name, job.state) == ("requeued", "COMPLETING"):
        why = f"{written.reason}; " if written.name == "requeued" and written.reason else ""
        return State("requeued" if graph.attempt else "pending", f"{why}Slurm: {job.state} ({job.detail})")
    return State("running", f"{silence}; Slurm: {job.state}")


def _from_journal(graph: Graph) -> State:
    if graph.ended is not None:
        return State(graph.ended["state"], graph.ended["reason"] or None)
    return State("running" if graph.attempt else "pending")


def _gone(job: JobInfo, silence: str) -> State:
    if job.state == "CANCELLED":
        return State("cancelled", f"Slurm: job {job.id} was cancelled")
    known = f"Slurm: job {job.id} is {job.state}" if job.state else f"Slurm does not know job {job.id} any more"
    return State("lost", f"{silence}; {known}")


def ask_slurm(job_id: str) -> JobInfo:
    """What squeue says, at once or not at all."""
    try:
        return CliClient(run=_run_briefly).job(job_id)
    except SlurmError as error:
        return JobInfo(job_id, Presence.UNKNOWN, detail=str(error))


def _run_briefly(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=SLURM_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer within {SLURM_TIMEOUT_S:g} s") from None
    if done.returncode != 0 and b"nvalid job id" not in done.stderr:
        # Said here, not by the client: that one would ask again for a while.
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise SlurmError(said[-1] if said else f"{command[0]} ended with status {done.returncode}")
    return done


def configuration(run: Path) -> dict:
    """The run's configuration; empty where it is missing or of another version."""
    try:
        return msgspec.to_builtins(load.from_text(rundir.config(run).read_text()).config)
    except (FileNotFoundError, ConfigError):
        return {}
