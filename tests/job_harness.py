"""A whole job on a real Slurm, as tests want it: submit, look into its journal while it runs, wait, count."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Callable

from dynarl import rundir
from dynarl.config import load
from dynarl.hypergraph import journal
from dynarl.slurm import jobscript
from dynarl.slurm.mini.handle import FINAL, MiniSlurm

ROOT = Path(__file__).resolve().parents[1]
SMOKE = ROOT / "configs" / "jobs" / "smoke.yaml"
# Limits in tests are ample on an idle machine. They only end what has gone wrong, so a busy or slow one has more.
PATIENCE = 3


class JobRun:
    """A submitted run on a mini Slurm."""

    def __init__(self, cluster: MiniSlurm, run: Path, job_id: str):
        self.cluster, self.run, self.job_id = cluster, run, job_id

    @classmethod
    def submit(cls, cluster: MiniSlurm, root: Path, *overrides: str, config: Path = SMOKE, options: tuple[str, ...] = ()) -> JobRun:
        """sbatch the shipped job script with `config` and `a.b=c` overrides, and more time than it takes anywhere."""
        settings = load.load(config, ("cluster.time=1:00:00", *overrides))
        run = rundir.create(root, settings.run.name)
        rundir.config(run).write_text(load.dump(settings))
        command = jobscript.sbatch_command(settings, run)
        done = cluster.run([command[0], *options, *command[1:]], env=jobscript.environment() | {"DYNARL_RUNS": str(root)})
        return cls(cluster, run, done.stdout.strip())

    def records(self, type_: str | None = None) -> list[dict[str, Any]]:
        """The journal so far, or its records of one type."""
        path = rundir.journal(self.run)
        return [r for r in journal.read(path) if type_ in (None, r["type"])] if path.exists() else []

    def until(self, reached: Callable[[], Any], timeout_s: float, what: str) -> Any:
        """Poll until `reached()` is truthy and return that; AssertionError with the end of the logs otherwise."""
        limit_s = PATIENCE * timeout_s
        began = asked_slurm = time.monotonic()
        while time.monotonic() - began < limit_s:
            if value := reached():
                return value
            if time.monotonic() - asked_slurm > 2.0:  # that costs as much CPU time as a process more
                if self.ended() and not reached():
                    raise AssertionError(f"the job ended before {what}\n{self.story()}")
                asked_slurm = time.monotonic()
            time.sleep(0.1)
        raise AssertionError(f"not within {limit_s:g} s: {what}\n{self.story()}")

    def ended(self) -> bool:
        """Slurm says, twice, that the job has ended (a job that is being requeued shows an end for a moment)."""
        for _ in range(2):
            if self.cluster.job(self.job_id).get("JobState") not in FINAL:
                return False
            time.sleep(0.5)
        return True

    def wait(self, timeout_s: float = 150) -> dict[str, Any]:
        """The last `run_ended` record, once Slurm has ended the job; AssertionError with the end of the logs otherwise."""
        try:
            state = self.cluster.wait_job(self.job_id, PATIENCE * timeout_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.story()}") from error
        ended = self.records("run_ended")
        assert ended, f"no end in the journal; Slurm says {state}\n{self.story()}"
        return ended[-1]

    def story(self) -> str:
        """What a person would look at first."""
        parts = [f"journal: {[r['type'] for r in self.records()][-12:]}"]
        for path in sorted(self.run.glob("slurm-*.out")) + sorted(self.run.glob("logs/*/*.log")):
            lines = path.read_text(errors="replace").splitlines()
            if lines:
                parts.append(f"--- {path.relative_to(self.run)}\n" + "\n".join(lines[-12:]))
        return "\n".join(parts)

    def worker_pids(self, role: str, node: str) -> list[int]:
        """Processes of a role's workers on a node, from the outside."""
        return [pid for pid, command in self.workers(node).items() if f"dynarl.roles.{role}.worker" in command]

    def workers(self, node: str | None = None) -> dict[int, str]:
        """All workers there, by process. Each leads a session of its own: a child that it has just forked, which has the
        same command line until it runs its program, does not."""
        found = self.cluster.job_processes(node)
        return {pid: command for pid, command in found.items() if "dynarl.roles." in command and leads_session(pid)}


def leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def gone(cluster: MiniSlurm, timeout_s: float = 20) -> dict[int, str]:
    """Processes of jobs that are still there after a while: empty is good."""
    deadline = time.monotonic() + PATIENCE * timeout_s
    while (left := cluster.job_processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def kill(pid: int) -> float:
    """SIGKILL; returns the unix time of it."""
    os.kill(pid, 9)
    return time.time()
