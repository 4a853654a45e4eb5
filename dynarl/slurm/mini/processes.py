"""Whose process is it, and killing exactly those.

A process belongs to node `n1` of cluster `ab12` if its mount namespace holds a file system that was mounted with the
source `minislurm-ab12-n1`: node.py does that first of all. No number is trusted that the kernel could have given to
somebody else since. Processes that left those mounts (a container that pivots its root) are found by the node's
cgroup or network namespace.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Set
from pathlib import Path


def label(cluster_id: str, host: str) -> str:
    return f"minislurm-{cluster_id}-{host}"


@dataclasses.dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken for a later one with the same pid.

    Attributes:
        start: when it started, in clock ticks since boot.
    """

    pid: int
    start: int

    @staticmethod
    def of(pid: int) -> Process:
        start = _start(pid)
        if start is None:
            raise ProcessLookupError(f"no process {pid}")
        return Process(pid, start)

    def alive(self) -> bool:
        return _start(self.pid) == self.start


def members(labels: Set[str], cgroup_pids: Set[int] = frozenset()) -> dict[int, str]:
    """Living processes of the hosts with these labels, as {pid: label}; those known by cgroup only have label ''."""
    mount_namespaces: dict[str, str] = {}
    networks: dict[str, set[int]] = {}
    found: dict[int, str] = {}
    pids_now = all_pids()
    for pid in pids_now:
        mounts, network = _namespace(pid, "mnt"), _namespace(pid, "net")
        if mounts is None or network is None:
            continue
        networks.setdefault(network, set()).add(pid)
        if mounts not in mount_namespaces:
            mount_namespaces[mounts] = next(iter(_mount_sources(pid) & labels), "")
        if mount_namespaces[mounts]:
            found[pid] = mount_namespaces[mounts]
    # A member may have gone back to the machine's network: that makes nobody else there a member.
    outside = {_namespace(pid, "net") for pid in (1, os.getpid())}
    for network, pids in networks.items():
        if network not in outside and (owner := next((found[pid] for pid in pids if pid in found), None)):
            found |= {pid: owner for pid in pids if pid not in found}
    # A cgroup may list threads; only numbers that /proc lists are processes.
    found |= {pid: "" for pid in cgroup_pids & set(pids_now) if pid not in found and _start(pid) is not None}
    return found


def kill_all(find: Callable[[], set[int]], timeout_s: float = 10.0) -> set[int]:
    """SIGKILL whatever `find` returns until it returns nothing. Returns what is left after `timeout_s`.

    A process is signalled through a handle taken before `find` named it again: the pid cannot have changed hands.
    """
    deadline = time.monotonic() + timeout_s
    while pids := find():
        if time.monotonic() > deadline:
            return pids
        handles = {}
        for pid in pids:
            try:
                handles[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
        confirmed = find()
        for pid, handle in handles.items():
            if pid in confirmed:
                try:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            os.close(handle)
        time.sleep(0.02)
    return set()


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _start(pid: int) -> int | None:
    """Start time in ticks since boot; None if there is no such process or only its remains (a zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold blanks and brackets
    return None if fields[0] in "ZX" else int(fields[19])


def _namespace(pid: int, kind: str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:  # gone, a zombie, or a kernel thread
        return None


def _mount_sources(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    except OSError:
        return set()
    return {line.partition(" - ")[2].split(" ")[1] for line in lines}
