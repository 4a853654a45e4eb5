"""What a cluster has started, kept in state.json. It is written before a thing is made, so a crash leaves nothing
unknown."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from dynarl.slurm.mini import MiniSlurmError
from dynarl.slurm.mini.processes import Process, all_pids, label
from dynarl.slurm.mini.spec import HEAD, ClusterSpec, Paths

SCHEMA = 1


@dataclasses.dataclass
class Record:
    """Attributes:
    id: made anew by every `up`; part of the name of everything that is not a file.
    state: "starting" until all nodes were idle once, then "up".
    boot_id: of the kernel's run in which it was started; after a reboot nothing of it can be left.
    subnet: index of the subnet, -1 until one was won.
    inits: first process of each host; None where a node was made to fail.
    """

    id: str
    state: str
    boot_id: str
    spec: ClusterSpec
    subnet: int = -1
    inits: dict[str, Process | None] = dataclasses.field(default_factory=dict)

    @property
    def hosts(self) -> tuple[str, ...]:
        return (HEAD, *self.spec.node_names)

    @property
    def labels(self) -> set[str]:
        return {label(self.id, host) for host in self.hosts}

    def init(self, host: str) -> Process | None:
        """The host's first process if it lives."""
        process = self.inits.get(host)
        return process if process and process.alive() else None


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def save(paths: Paths, record: Record) -> None:
    """Replace state.json at once: a reader sees the old one or the new one."""
    data = {"schema": SCHEMA, **dataclasses.asdict(record)}
    temporary = paths.record.with_suffix(".new")
    temporary.write_text(json.dumps(data, indent=1))
    os.replace(temporary, paths.record)


def load(paths: Paths) -> Record | None:
    """The record, or None if there is no cluster."""
    try:
        data = json.loads(paths.record.read_text())
    except FileNotFoundError:
        return None
    if data.pop("schema") != SCHEMA:
        raise MiniSlurmError(f"{paths.record} was written by another version of minislurm; use that one's `down`")
    inits = {host: Process(**entry) if entry else None for host, entry in data.pop("inits").items()}
    return Record(**{**data, "spec": ClusterSpec.from_dict(data["spec"])}, inits=inits)


def recover(paths: Paths) -> Record | None:
    """The record as far as living processes tell it, for a state directory whose record was deleted under a running
    cluster."""
    found: dict[str, dict[str, Process]] = {}
    for pid in all_pids():
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "dynarl.slurm.mini.node" in arguments:
                root, cluster_id, host = arguments[arguments.index("dynarl.slurm.mini.node") + 1 :][:3]
                if root == str(paths.root):
                    found.setdefault(cluster_id, {})[host] = Process.of(pid)
        except OSError:
            continue
    if not found:
        return None
    cluster_id, inits = next(iter(found.items()))
    nodes = max((int(host[1:]) for host in inits if host != HEAD), default=1)
    return Record(cluster_id, "starting", boot_id(), ClusterSpec(nodes), inits=inits)


@contextlib.contextmanager
def locked(paths: Paths, timeout_s: float = 120.0) -> Iterator[None]:
    """Hold the state directory alone. MiniSlurmError if another command has it for longer than `timeout_s`."""
    with open(paths.lock, "a") as file:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise MiniSlurmError(
                        f"another minislurm command has been working on {paths.root} for {timeout_s:.0f} s"
                    ) from None
            time.sleep(0.1)
        yield
