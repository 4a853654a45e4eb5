"""Starts, watches and ends the role workers of one node.

A worker is a process group of its own: what it starts dies with it. It gets a clean environment (a nested MPI or Slurm
client would otherwise take the agent's place in the step) and a log file of its own. Its end is noticed through a
pidfd, at once, without polling and without a thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from collections import Counter
from pathlib import Path
from typing import Any, Callable

import dynarl
from dynarl.agent.pulse import Pulse
from dynarl.slurm.environ import for_other_interpreter, for_worker, identity

log = logging.getLogger(__name__)

TAIL_LINES = 12


@dataclass
class WorkerProcess:
    """One role worker. `name` is its socket identity: n1-rollout-0.

    calls: open ones, by method; done: changes whenever it gets something done; reason: why the agent has ended it.
    """

    name: str
    role: str
    device: int
    attempt: int
    process: subprocess.Popen
    log_path: Path
    up: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    expected_to_end: bool = False
    pulse: Pulse | None = None
    calls: Counter[str] = field(default_factory=Counter)
    done: Any = 0
    reason: str = ""


def describe_status(code: int) -> str:
    """`exit status 1`, or `killed by SIGKILL`.

    >>> describe_status(-9)
    'killed by SIGKILL'
    """
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log, [] when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


class Supervisor:
    """The workers of one node. `on_death(worker, status, tail)` is called for every end nobody asked for.

    address: of the agent's socket, ipc://PATH; the directory of PATH is the agent's own.
    """

    def __init__(
        self, node: str, address: str, log_dir: Path, on_death: Callable[[WorkerProcess, str, list[str]], None]
    ):
        self._node, self._address, self._log_dir, self._on_death = node, address, log_dir, on_death
        self._attempts: dict[str, int] = {}
        self._stopping = False
        self.workers: dict[str, WorkerProcess] = {}

    def name_of(self, role: str, device: int) -> str:
        return f"{self._node}-{role}-{device}"

    def start(
        self, role: str, device: int, *, python: str | None, env: dict[str, str], device_kind: str, hang_s: float = 0.0
    ) -> WorkerProcess:
        """Start `python -m dynarl.roles.<role>.worker` for one device. Returns at once; await `.up` for readiness.

        hang_s: how long it may give no sign of life; 0: for ever.
        """
        name = self.name_of(role, device)
        if self._stopping:
            raise RuntimeError(f"{name} is not started: the agent is stopping")
        if name in self.workers:
            raise RuntimeError(f"{name} is already running (pid {self.workers[name].process.pid})")
        attempt = self._attempts[name] = self._attempts.get(name, 0) + 1
        path = self._log_dir / f"{name}.{attempt}.log"
        environment = for_worker(os.environ, identity(role, device) | env)
        if python is not None:
            environment = for_other_interpreter(environment, self._package_dir(), env)
        # Empty for the CPU: Megatron uses a GPU whenever torch sees one.
        environment["CUDA_VISIBLE_DEVICES"] = visible_device(os.environ, device) if device_kind == "cuda" else ""
        command = [
            python or sys.executable,
            "-m",
            f"dynarl.roles.{role}.worker",
            "--socket",
            self._address,
            "--name",
            name,
            "--parent",
            str(os.getpid()),
        ]
        with path.open("ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        worker = self.workers[name] = WorkerProcess(name, role, device, attempt, process, path)
        worker.pulse = Pulse(hang_s, time.monotonic()) if hang_s else None
        descriptor = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(descriptor, self._ended, worker, descriptor)
        log.info("started %s, attempt %d, pid %d", name, attempt, process.pid)
        return worker

    def _package_dir(self) -> str:
        """A directory with this very dynarl in it and nothing else, for interpreters of other environments."""
        directory = Path(self._address.removeprefix("ipc://")).parent / "package"
        directory.mkdir(exist_ok=True)
        if not (link := directory / "dynarl").exists():
            link.symlink_to(Path(dynarl.__file__).resolve().parent)
        return str(directory)

    def _ended(self, worker: WorkerProcess, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        # The children that it left behind; before it is reaped, for until then nobody else can get its number.
        kill_group(worker.process.pid)
        code = worker.process.wait()
        self.workers.pop(worker.name, None)
        status = describe_status(code)
        if not worker.up.done():
            worker.up.set_exception(RuntimeError(f"{worker.name} ended before it was ready: {status}"))
            worker.up.exception()  # mark as seen: nobody may be waiting
        log.info("%s (attempt %d) ended: %s", worker.name, worker.attempt, status)
        if not worker.expected_to_end:
            self._on_death(worker, status, tail(worker.log_path))

    def kill(self, name: str, reason: str = "") -> None:
        """End a worker and its children now. Its death is reported like any other, together with `reason`."""
        if (worker := self.workers.get(name)) is not None:
            if reason:
                log.error("ending %s: %s", name, reason)
                worker.reason = worker.reason or reason
            kill_group(worker.process.pid)

    async def stop_all(self, grace_s: float = 2.0) -> None:
        """End every worker: TERM to its group, KILL after `grace_s`. Returns when all are gone; none can be started any
        more.
        """
        self._stopping = True
        for worker in self.workers.values():
            worker.expected_to_end = True
            kill_group(worker.process.pid, signal.SIGTERM)
        deadline = asyncio.get_running_loop().time() + grace_s
        while self.workers and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        for worker in self.workers.values():
            kill_group(worker.process.pid)
        while self.workers:
            await asyncio.sleep(0.02)

    def kill_all(self) -> None:
        """KILL every worker without waiting, for the way out."""
        self._stopping = True
        for worker in self.workers.values():
            worker.expected_to_end = True
            kill_group(worker.process.pid)


def kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal the process group that a worker leads; a group that is gone already is fine."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass


def visible_device(environ: dict[str, str], device: int) -> str:
    """The `device`-th entry of CUDA_VISIBLE_DEVICES, an opaque string (it may be an index, a GPU or a MIG uuid).

    >>> visible_device({"CUDA_VISIBLE_DEVICES": "3,GPU-5e"}, 1)
    'GPU-5e'
    """
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return str(device)
    entries = [entry for entry in mask.split(",") if entry and entry != "NoDevFiles"]
    if device >= len(entries):
        raise ValueError(f"device {device} asked for, but CUDA_VISIBLE_DEVICES={mask!r} has {len(entries)} entries")
    return entries[device]
