"""A fixed amount of compute per node: one cgroup per host of a cluster, below the top of the cpu hierarchy.

    <cpu hierarchy>/minislurm-<cluster id>/<host>       cpu.cfs_quota_us (cgroup v1) or cpu.max (v2)
"""

from __future__ import annotations

import dataclasses
import errno
import time
from pathlib import Path

from dynarl.slurm.mini import MiniSlurmError

# The kernel gives the quota out per period and stops the whole group when it is used up. With the usual 100 ms and a quarter
# core a node whose threads have eaten their 25 ms stands still for up to 75 ms, which looks like a network that hangs (a
# collective waits for its slowest node). 20 ms keeps the stops under 20 ms. The kernel refuses a quota under 1 ms.
PERIOD_US = 20_000
MIN_QUOTA_US = 1_000


def quota_us(cores: float) -> int:
    """Microseconds of CPU time per period for this many cores.

    >>> quota_us(0.25), quota_us(0.01)
    (5000, 1000)
    """
    return max(MIN_QUOTA_US, round(cores * PERIOD_US))


@dataclasses.dataclass(frozen=True)
class Cgroup:
    """The cgroups of one cluster. `root` is the top of the hierarchy of the cpu controller as this machine shows it."""

    root: Path
    version: int
    cluster_id: str

    @property
    def base(self) -> Path:
        return self.root / f"minislurm-{self.cluster_id}"

    def host(self, name: str) -> Path:
        return self.base / name

    def create(self, name: str, cores: float | None) -> None:
        """Make the group of a host and set its quota. MiniSlurmError says what the kernel refused."""
        try:
            self._create_base()
            group = self.host(name)
            group.mkdir(exist_ok=True)
            if self.version == 2:
                if _kind(self.base) != "domain":
                    (group / "cgroup.type").write_text("threaded")
                if cores is not None:
                    (group / "cpu.max").write_text(f"{quota_us(cores)} {PERIOD_US}")
            elif cores is not None:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota_us(cores)))
        except OSError as error:
            raise MiniSlurmError(f"cgroup v{self.version} {self.base}: {error.strerror} ({error.filename})") from error

    def _create_base(self) -> None:
        if self.base.is_dir():
            return
        self.base.mkdir()
        if self.version == 1:
            return
        if "cpu" not in (self.root / "cgroup.subtree_control").read_text().split():
            try:
                (self.root / "cgroup.subtree_control").write_text("+cpu")
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                # In a container the top has processes in it, and then the kernel lets its children have the cpu controller
                # only as threaded groups (cgroup-v2.rst, "Threads").
                (self.base / "cgroup.type").write_text("threaded")
                (self.root / "cgroup.subtree_control").write_text("+cpu")
        (self.base / "cgroup.subtree_control").write_text("+cpu")

    def add(self, name: str, pid: int) -> None:
        (self.host(name) / "cgroup.procs").write_text(str(pid))

    def pids(self, name: str) -> set[int]:
        """Processes in the group of a host; of no host if the group is not there."""
        group = self.host(name)
        # A threaded group of v2 cannot list processes, only threads; the first thread of a process has the process's number.
        threaded = self.version == 2 and group.is_dir() and _kind(group) != "domain"
        try:
            return {int(line) for line in (group / ("cgroup.threads" if threaded else "cgroup.procs")).read_text().split()}
        except FileNotFoundError:
            return set()

    def remove_all(self, timeout_s: float = 5.0) -> list[Path]:
        """Remove the groups of all hosts and the one above them. Returns those that could not be."""
        if not self.base.is_dir():
            return []
        groups = sorted((p for p in self.base.rglob("*") if p.is_dir()), reverse=True) + [self.base]
        return [group for group in groups if not _rmdir(group, timeout_s)]


def _rmdir(path: Path, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            path.rmdir()
            return True
        except FileNotFoundError:
            return True
        except OSError as error:
            # A killed process leaves its group a moment after it was seen to be gone.
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                return False
        time.sleep(0.02)


def _kind(group: Path) -> str:
    """cgroup.type without its qualifiers: "domain" also for the top, which has no such file."""
    try:
        text = (group / "cgroup.type").read_text().strip()
    except FileNotFoundError:
        return "domain"
    return "domain" if text == "domain" else "threaded"


def find_hierarchy(mountinfo: str) -> tuple[Path, int] | None:
    """Top of the cpu controller's hierarchy and its cgroup version, from /proc/self/mountinfo; None if it has none."""
    unified = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        mount_point = before.split(" ")[4]
        fstype, _, options = after.split(" ", 2)
        if fstype == "cgroup" and "cpu" in options.split(","):
            return Path(mount_point), 1
        if fstype == "cgroup2":
            unified = Path(mount_point)
    if unified is not None and "cpu" in _controllers(unified):
        return unified, 2
    return None


def _controllers(top: Path) -> list[str]:
    try:
        return (top / "cgroup.controllers").read_text().split()
    except OSError:
        return []


def for_cluster(cluster_id: str) -> Cgroup | None:
    """The cgroups of a cluster on this machine; None where there is no cpu controller to use."""
    found = find_hierarchy(Path("/proc/self/mountinfo").read_text())
    return Cgroup(*found, cluster_id) if found else None
