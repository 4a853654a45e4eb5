"""A Slurm that is only in memory, with faults on demand. For tests of what talks to a Client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dynarl.errors import SlurmError
from dynarl.slurm.client import (
    FINAL_STATES,
    Client,
    JobInfo,
    NodeInfo,
    PartitionInfo,
    Presence,
    Restarts,
    TransientError,
)
from dynarl.slurm.version import Version


@dataclass
class FakeClient(Client):
    """`faults` is a script: {"submit": [error, None, ...]} makes the first submit raise and the second work.

    `calls` records what was asked: ("cancel", "1", "USR1", True). `on_signal` answers a signalled or cancelled job with
    the state it goes to; without an entry USR1 is ignored, as by a controller that hangs.
    """

    name = "fake"
    release: Version = Version(24, 5, 3)
    node_names: Sequence[str] = ("n1", "n2", "n3", "n4")
    settings: dict[str, str] = field(default_factory=dict)
    plugins: Sequence[str] = ("none", "pmix", "pmix_v4", "pmi2")
    faults: dict[str, list[SlurmError | None]] = field(default_factory=dict)
    on_signal: dict[str | None, str] = field(default_factory=lambda: {None: "CANCELLED"})
    jobs: dict[str, JobInfo] = field(default_factory=dict)
    starts_again: dict[str, Restarts] = field(default_factory=dict)
    calls: list[tuple] = field(default_factory=list)
    environments: list[dict[str, str]] = field(default_factory=list)

    def _enter(self, method: str, *arguments: object) -> None:
        self.calls.append((method, *arguments))
        script = self.faults.get(method)
        if script and (error := script.pop(0)) is not None:
            raise error

    def version(self) -> Version:
        self._enter("version")
        return self.release

    def submit(self, command: Sequence[str], environment: Mapping[str, str]) -> str:
        self._enter("submit", *command)
        self.environments.append(dict(environment))
        job_id = str(len(self.jobs) + 1)
        name = next((word.partition("=")[2] for word in command if word.startswith("--job-name=")), "")
        self.jobs[job_id] = JobInfo(job_id, Presence.PRESENT, "PENDING", (), "Priority", name)
        self.starts_again[job_id] = Restarts("--no-requeue" not in command, 0)
        return job_id

    def set_state(self, job_id: str, state: str) -> None:
        """Move a job along; one that runs gets all nodes."""
        nodes = tuple(self.node_names) if state == "RUNNING" else self.jobs[job_id].nodes
        self.jobs[job_id] = replace(self.jobs[job_id], state=state, nodes=nodes, detail="None")

    def job(self, job_id: str) -> JobInfo:
        try:
            self._enter("job", job_id)
        except TransientError as error:
            return JobInfo(job_id, Presence.UNKNOWN, detail=str(error))
        return self.jobs.get(job_id, JobInfo(job_id, Presence.ABSENT))

    def cancel(self, job_id: str, signal: str | None = None, batch_only: bool = False) -> None:
        self._enter("cancel", job_id, signal, batch_only)
        job = self.jobs.get(job_id)
        if job is not None and job.state not in FINAL_STATES and signal in self.on_signal:
            self.set_state(job_id, self.on_signal[signal])

    def restarts(self, job_id: str) -> Restarts:
        self._enter("restarts", job_id)
        self._require(job_id)
        return self.starts_again[job_id]

    def requeue(self, job_id: str) -> None:
        self._enter("requeue", job_id)
        self._require(job_id)
        if self.jobs[job_id].state == "PENDING":
            raise SlurmError(f"scontrol: Job is pending execution for job {job_id}")
        if not self.starts_again[job_id].allowed:
            raise SlurmError(f"scontrol: Requested operation is presently disabled for job {job_id}")
        self.set_state(job_id, "PENDING")
        self.starts_again[job_id] = Restarts(True, self.starts_again[job_id].count + 1)

    def _require(self, job_id: str) -> None:
        if job_id not in self.jobs:
            raise SlurmError(f"scontrol: Invalid job id specified {job_id}")

    def nodes(self) -> list[NodeInfo]:
        self._enter("nodes")
        return [NodeInfo(name, "idle") for name in self.node_names]

    def partitions(self) -> list[PartitionInfo]:
        self._enter("partitions")
        return [PartitionInfo("main", True, True, len(self.node_names), None, "infinite")]

    def config(self) -> dict[str, str]:
        self._enter("config")
        return {
            "JobRequeue": "1",
            "PreemptMode": "OFF",
            "KillWait": "30 sec",
            "SchedulerParameters": "(null)",
            "MaxStepCount": "40000",
            **self.settings,
        }

    def mpi_plugins(self) -> list[str]:
        self._enter("mpi_plugins")
        return list(self.plugins)
