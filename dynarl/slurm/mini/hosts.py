"""Starting one host (a node or the head), stage by stage, from outside. node.py is the other side."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import dynarl
from dynarl.slurm.mini import MiniSlurmError
from dynarl.slurm.mini import record as records
from dynarl.slurm.mini.cgroup import Cgroup
from dynarl.slurm.mini.processes import Process
from dynarl.slurm.mini.record import Record
from dynarl.slurm.mini.spec import HEAD, Paths

STAGE_TIMEOUT_S = 60


class Starting:
    """A host on its way up. Nothing of it exists before it is in the record; until then its process only waits."""

    def __init__(self, paths: Paths, record: Record, cgroup: Cgroup | None, host: str):
        self.host = host
        spec = record.spec
        gpus = 0 if host == HEAD else spec.gpus_per_node
        if cgroup:
            cgroup.create(host, None if host == HEAD else spec.cpu_quota)
        checkout = str(Path(dynarl.__file__).parents[1])
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": checkout, "LANG": "C.UTF-8"}
        with open(paths.log / f"{host}.log", "a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-S", "-m", "dynarl.slurm.mini.node",
                 str(paths.root), record.id, host, str(gpus), *spec.shares],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd="/",
                start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid
        record.inits[host] = Process.of(self.pid)
        records.save(paths, record)
        if cgroup:
            cgroup.add(host, self.pid)

    def send(self, stage: str) -> None:
        try:
            self._process.stdin.write(stage + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; what it said last is read by `expect`

    def expect(self, answer: str) -> None:
        """Wait for the answer. MiniSlurmError with what the host said instead."""
        if not select.select([self._process.stdout], [], [], STAGE_TIMEOUT_S)[0]:
            raise MiniSlurmError(f"{self.host} has not answered {answer!r} for {STAGE_TIMEOUT_S} s")
        line = self._process.stdout.readline().strip()
        if line != answer:
            raise MiniSlurmError(line.removeprefix("error ") or f"{self.host} ended before {answer!r}; see its log")

    def close(self) -> None:
        """Let go of the pipes, and collect the process if it has ended."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.poll()
