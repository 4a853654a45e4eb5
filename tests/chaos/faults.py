"""What a cluster does to a job that runs: it kills workers, stops them, slows them down, cuts their agent off."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from dataclasses import dataclass

from job_harness import JobRun

SLOW_S = 6.0  # how long a worker runs at a tenth of its speed
PERIOD_S = 0.5
CUT_S = 5.0
# While it is cut off, an agent connects again every 0.1 s.
CUT = """end=$(($(date +%s) + {seconds}))
while [ $(date +%s) -lt $end ]; do ss -HK -tn dport = :{port}; sleep 0.05; done"""


@dataclass
class Struck:
    """A fault that was done. at: the number of journal records there were."""

    kind: str
    role: str
    node: str
    pid: int
    at: int

    def __str__(self) -> str:
        return f"{self.kind} {self.role} on {self.node}"


class Chaos:
    """Faults for one job, in an order that follows from `seed`."""

    def __init__(self, job: JobRun, nodes: list[str], seed: int):
        self.job, self._nodes, self._random = job, nodes, random.Random(seed)
        self._slowed: list[threading.Thread] = []

    def order(self, faults: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return self._random.sample(faults, len(faults))

    def strike(self, kind: str, role: str) -> Struck:
        """kind: "kill", "hang", "slow", or "cut" (which is about the agent, whatever the role)."""
        node, pid = self._random.choice(self._victims(role))
        struck = Struck(kind, role, node, pid, len(self.job.records()))
        if kind == "kill":
            os.kill(pid, signal.SIGKILL)
        elif kind == "hang":
            os.kill(pid, signal.SIGSTOP)
        elif kind == "slow":
            self._slowed.append(threading.Thread(target=slow_down, args=(pid, SLOW_S)))
            self._slowed[-1].start()
        else:
            self._cut(node)
        return struck

    def _victims(self, role: str) -> list[tuple[str, int]]:
        found = [(node, pid) for node in self._nodes for pid in self.job.worker_pids(role, node)]
        assert found, f"no {role} worker is there to be struck"
        return found

    def _cut(self, node: str) -> None:
        commands = self.job.cluster.job_processes(node).values()
        port = next(match[1] for c in commands if (match := re.search(r"--controller tcp://[\d.]+:(\d+)", c)))
        done = self.job.cluster.run_on(node, ["sh", "-c", CUT.format(seconds=int(CUT_S), port=port)])
        broken = done.stdout.count("ESTAB")
        assert broken > CUT_S, f"{broken} connections were broken: it was connected all the time"

    def mended(self, struck: Struck) -> bool:
        """The journal explains what became of it, and all workers that died are there again."""
        if struck.kind == "slow":
            return not self._slowed[-1].is_alive()
        if struck.kind == "cut":
            return True
        records = self.job.records()[struck.at:]
        if any(record["type"] == "resumed" for record in records):
            return True  # all training workers started afresh
        here = [r for r in records if (r.get("node"), r.get("role")) == (struck.node, struck.role)]
        if struck.role == "environment":  # its agent starts it again by itself
            return self._is_gone(struck.pid) and bool(self.job.worker_pids(struck.role, struck.node))
        return any(r["type"] == "worker_died" for r in here) and any(r["type"] == "worker_up" for r in here)

    def _is_gone(self, pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    def end(self) -> None:
        for thread in self._slowed:
            thread.join()


def slow_down(pid: int, seconds: float) -> None:
    """Run a process a tenth of the time."""
    until = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):  # it may die of something else meanwhile
        while time.monotonic() < until:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.9 * PERIOD_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.1 * PERIOD_S)
