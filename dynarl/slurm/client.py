"""Asking Slurm, behind one interface: the command line tools by default, pyslurm for reading where it works, a fake in
tests.

An answer about a job is one of three: present, absent, unknown. An outage of slurmctld is "unknown", never "finished".
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynarl.errors import SlurmError
from dynarl.slurm.version import Version

# States after which a job never runs again. Any other, also one not known here, counts as alive: new releases and sites
# add states, and a job wrongly taken for dead is started twice.
FINAL_STATES = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "RECONFIG_FAIL",
        "REVOKED",
        "TIMEOUT",
    }
)


class Presence(enum.Enum):
    """Does Slurm know the job? It forgets a finished one after MinJobAge (300 s by default)."""

    PRESENT = "present"
    ABSENT = "absent"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class JobInfo:
    """What Slurm says of a job. `state` is a word such as RUNNING; None unless present. `detail`: why pending, or why
    unknown.
    """

    id: str
    presence: Presence
    state: str | None = None
    nodes: tuple[str, ...] = ()
    detail: str = ""
    name: str = ""

    @property
    def alive(self) -> bool | None:
        """True while it waits or runs, False once it cannot run any more, None when unknown."""
        if self.presence is Presence.UNKNOWN:
            return None
        return self.presence is Presence.PRESENT and self.state not in FINAL_STATES


@dataclass(frozen=True)
class NodeInfo:
    name: str
    state: str


@dataclass(frozen=True)
class PartitionInfo:
    """`max_nodes` per job and `time_limit` (in Slurm's words) as the partition allows them; None: no limit."""

    name: str
    default: bool
    up: bool
    nodes: int
    max_nodes: int | None
    time_limit: str


@dataclass(frozen=True)
class Restarts:
    """Whether a job may be started again (Requeue), and how often it has been (0 in its first start)."""

    allowed: bool
    count: int


class TransientError(SlurmError):
    """Slurm did not answer, also after retries. What was asked may be true or not."""


class Client(ABC):
    """All methods raise SlurmError where Slurm refuses, TransientError where it stays silent."""

    name: str

    @abstractmethod
    def version(self) -> Version: ...

    @abstractmethod
    def submit(self, command: Sequence[str], environment: Mapping[str, str]) -> str:
        """Run this sbatch command line in this environment; the id of the job."""

    @abstractmethod
    def job(self, job_id: str) -> JobInfo:
        """Never raises for an absent job or an outage: both are answers."""

    @abstractmethod
    def cancel(self, job_id: str, signal: str | None = None, batch_only: bool = False) -> None:
        """End a job, or send it a signal ("USR1"); `batch_only`: to the batch script's process alone."""

    @abstractmethod
    def restarts(self, job_id: str) -> Restarts: ...

    @abstractmethod
    def requeue(self, job_id: str) -> None: ...

    @abstractmethod
    def nodes(self) -> list[NodeInfo]: ...

    @abstractmethod
    def partitions(self) -> list[PartitionInfo]: ...

    @abstractmethod
    def config(self) -> dict[str, str]:
        """The running configuration, keys as in slurm.conf."""

    @abstractmethod
    def mpi_plugins(self) -> list[str]:
        """Values that srun's --mpi takes here."""
