"""What a cluster is: its shape (ClusterSpec) and where its files are (Paths)."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from dynarl.slurm.mini import MiniSlurmError

HEAD = "head"
MAX_NODES = 200  # a /24 holds 254 addresses, of which the head and the login node take one each
MIN_QUOTA = 0.05  # cores: 1 ms in each period of 20 ms; the kernel refuses less than 1 ms
# Unix sockets are addressed by paths of at most 107 bytes. The longest under the state directory is that of Slurm's
# PMIx server, /local/spool/stepd.slurm.pmix.<job>.<step>, with up to 45 bytes.
MAX_STATE_DIR_BYTES = 60


@dataclasses.dataclass(frozen=True)
class ClusterSpec:
    """Shape of a cluster.

    >>> ClusterSpec(nodes=2, gpus_per_node=1).node_names
    ('n1', 'n2')

    Attributes:
        cpus_per_node: CPUs that Slurm believes in. They may be more than the machine has.
        cpu_quota: cores of compute that all processes of a node get together; None is no limit.
        shares: directories under /tmp or /dev/shm that nodes see as the machine does; the rest of both is private.
    """

    nodes: int
    gpus_per_node: int = 0
    cpus_per_node: int = 1
    cpu_quota: float | None = None
    name: str = "mini"
    slurmd_timeout_s: int = 10
    shares: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check("--nodes", self.nodes, 1, MAX_NODES)
        _check("--gpus-per-node", self.gpus_per_node, 0, 64)
        _check("--cpus-per-node", self.cpus_per_node, 1, 4096)
        _check("--slurmd-timeout", self.slurmd_timeout_s, 3, 65533)
        if self.cpu_quota is not None:
            _check("--cpu-quota", self.cpu_quota, MIN_QUOTA, 4096)
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,30}", self.name):
            raise MiniSlurmError(f"--name {self.name!r}: a lower-case letter, then at most 30 of a-z, 0-9, '-' and '_'")

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{i}" for i in range(1, self.nodes + 1))

    def differences(self, other: ClusterSpec) -> list[str]:
        """One line per attribute that is not the same in `other`."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return [f"{key}: {mine[key]} here, {theirs[key]} asked for" for key in mine if mine[key] != theirs[key]]

    @staticmethod
    def from_dict(data: dict) -> ClusterSpec:
        return ClusterSpec(**{**data, "shares": tuple(data["shares"])})


def _check(option: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise MiniSlurmError(f"{option} {value}: must be from {low} to {high}")


@dataclasses.dataclass(frozen=True)
class Paths:
    """Files of the cluster whose state directory is `root`. The same paths hold on the machine and in every node."""

    root: Path

    @staticmethod
    def of(state_dir: str | os.PathLike) -> Paths:
        root = Path(os.path.realpath(state_dir))
        if len(os.fsencode(root)) > MAX_STATE_DIR_BYTES:
            raise MiniSlurmError(
                f"state directory {root} is too long ({len(os.fsencode(root))} bytes, at most {MAX_STATE_DIR_BYTES}): "
                "paths of Unix sockets under it would not fit; choose a shorter --state-dir"
            )
        if re.search(r"[\s,=#\"'\\:%]", str(root)):
            raise MiniSlurmError(f"state directory {str(root)!r}: slurm.conf takes no blanks, quotes or any of ,=#:%\\")
        return Paths(root)

    @property
    def lock(self) -> Path:
        """Also the mark of a state directory: one without it that is not empty is left alone."""
        return self.root / "minislurm.lock"

    @property
    def record(self) -> Path:
        return self.root / "state.json"

    @property
    def etc(self) -> Path:
        """slurm.conf and what belongs beside it."""
        return self.root / "etc"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def task_prolog(self) -> Path:
        """Takes batch scripts out of their node's quota."""
        return self.etc / "task_prolog"

    @property
    def hosts(self) -> Path:
        """/etc/hosts of every node."""
        return self.etc / "hosts"

    @property
    def munge_key(self) -> Path:
        return self.etc / "munge.key"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def state_save(self) -> Path:
        """slurmctld's memory of jobs and nodes."""
        return self.root / "slurmctld"

    @property
    def local(self) -> Path:
        """Private to each node: a memory file system is mounted here. On the machine it is the head's."""
        return self.root / "local"

    @property
    def munge_socket(self) -> Path:
        return self.local / "munge" / "socket"

    @property
    def spool(self) -> Path:
        return self.local / "spool"

    @property
    def devices(self) -> Path:
        return self.local / "dev"
