"""A fixed amount of compute per node: one cgroup per host of a cluster, below the top of the cpu hierarchy.

    <cpu hierarchy>/minislurm-<cluster id>/<host>       cpu.cfs_quota_us (cgroup v1) or cpu.max (v2)
    <cpu hierarchy>/minislurm-<cluster id>/batch        batch scripts, without a quota

A quota stands for the devices of a node. A batch script and what it runs by itself would use the cores beside them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

from dynarl.slurm.mini import MiniSlurmError

# The kernel gives the quota out per period and stops the whole group when it is used up. With the usual 100 ms and a
# quarter core a node whose threads have eaten their 25 ms stands still for up to 75 ms, which looks like a network
# that hangs (a collective waits for its slowest node). 20 ms keeps the stops under 20 ms. The kernel refuses a quota
# under 1 ms.
PERIOD_US = 20_000
MIN_QUOTA_US = 1_000
BATCH = "batch"


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

    def prepare(self, quotas: bool) -> None:
        """Make the group above the hosts', fit for quotas if asked. MiniSlurmError says what the kernel refused."""
        with _explained(self):
            self.base.mkdir()
            if quotas and self.version == 2:
                self._enable_cpu()

    def _enable_cpu(self) -> None:
        top = self.root / "cgroup.subtree_control"
        if "cpu" not in top.read_text().split():
            top.write_text("+cpu")
        _make_usable(self.base)
        (self.base / "cgroup.subtree_control").write_text("+cpu")

    def create(self, name: str, cores: float | None) -> None:
        """Make the group of a host and set its quota."""
        group = self.host(name)
        with _explained(self):
            group.mkdir(exist_ok=True)
            if self.version == 2:
                _make_usable(group)
            if cores is None:
                return
            if self.version == 2:
                (group / "cpu.max").write_text(f"{quota_us(cores)} {PERIOD_US}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota_us(cores)))

    def create_batch(self) -> None:
        """Make the group that `task_prolog` puts batch scripts into."""
        self.create(BATCH, None)

    def task_prolog(self) -> str:
        """What slurmd runs before a task, as a child of the process that becomes the task. Steps of srun have a number."""
        return f"""\
#!/bin/sh
[ -n "$SLURM_STEP_ID" ] || echo "$PPID" > {self.host(BATCH)}/cgroup.procs
"""

    def add(self, name: str, pid: int) -> None:
        (self.host(name) / "cgroup.procs").write_text(str(pid))

    def pids(self, name: str) -> set[int]:
        """Processes in the group of a host; of no host if the group is not there."""
        group = self.host(name)
        try:
            # A threaded group lists only threads; the first thread of a process has the process's number.
            threaded = self.version == 2 and (group / "cgroup.type").read_text().strip() == "threaded"
            listing = (group / ("cgroup.threads" if threaded else "cgroup.procs")).read_text()
            return {int(line) for line in listing.split()}
        except FileNotFoundError:
            return set()

    def remove_all(self, timeout_s: float = 5.0) -> list[Path]:
        """Remove the groups of all hosts and the one above them. Returns those that could not be."""
        if not self.base.is_dir():
            return []
        groups = sorted((p for p in self.base.rglob("*") if p.is_dir()), reverse=True) + [self.base]
        return [group for group in groups if not _rmdir(group, timeout_s)]


@contextlib.contextmanager
def _explained(cgroup: Cgroup) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MiniSlurmError(f"cgroup v{cgroup.version} {cgroup.base}: {error.strerror} ({error.filename})") from error


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


def _make_usable(group: Path) -> None:
    """In a container the top of the hierarchy has processes in it. The groups below such a one are of use only as
    threaded groups (cgroup-v2.rst, "Threads"); the kernel marks them "domain invalid" until they are told so."""
    if (group / "cgroup.type").read_text().strip() == "domain invalid":
        (group / "cgroup.type").write_text("threaded")


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
    """The cgroups of a cluster on this machine; None where no hierarchy with the cpu controller can be written."""
    found = find_hierarchy(Path("/proc/self/mountinfo").read_text())
    # In a container it is often mounted read-only.
    return Cgroup(*found, cluster_id) if found and os.access(found[0], os.W_OK) else None
