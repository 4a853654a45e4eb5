"""A cluster in the hands of a Python program: tests and benchmarks.

    with MiniSlurm.start(state_dir, nodes=2, cpu_quota=0.25) as cluster:
        job = cluster.submit("--nodes=2", "job.sh")
        assert cluster.wait_job(job) == "COMPLETED"
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import dynarl
from dynarl.slurm.mini import cluster as clusters
from dynarl.slurm.mini import record as records
from dynarl.slurm.mini.spec import Paths

# Variables by which an outer job or shell would speak into the commands that are given here.
FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "PMI", "OMPI_")
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}


class MiniSlurm:
    """A running cluster. `env` is the environment in which sbatch, srun, squeue speak to it."""

    def __init__(self, state_dir: str | os.PathLike):
        self.paths = Paths.of(state_dir)
        self.env: dict[str, str] = {}

    @classmethod
    def start(
        cls, state_dir: str | os.PathLike, nodes: int, cpus_per_node: int = 4, gpus_per_node: int = 0,
        cpu_quota: float | None = None, shares: tuple[str, ...] = (),
    ) -> MiniSlurm:  # fmt: skip
        """Bring up a cluster, or take the same one if it is up there. RuntimeError says what went wrong."""
        handle = cls(state_dir)
        options = [f"--nodes={nodes}", f"--cpus-per-node={cpus_per_node}", f"--gpus-per-node={gpus_per_node}"]
        options += [] if cpu_quota is None else [f"--cpu-quota={cpu_quota}"]
        options += [f"--share={directory}" for directory in shares]
        handle.command("up", *options)
        lines = handle.command("env").splitlines()
        exported = dict(shlex.split(line)[1].split("=", 1) for line in lines)
        handle.env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)} | exported
        return handle

    def __enter__(self) -> MiniSlurm:
        return self

    def __exit__(self, *exception: object) -> None:
        self.down()

    def command(self, name: str, *arguments: str) -> str:
        """Output of one minislurm command."""
        return _run(
            [sys.executable, "-P", "-m", "dynarl.slurm.mini", name, f"--state-dir={self.paths.root}", *arguments],
            env={**os.environ, "PYTHONPATH": str(Path(dynarl.__file__).parents[1])}, timeout=300,
        ).stdout  # fmt: skip

    def down(self) -> None:
        self.command("down")

    def status(self) -> dict:
        """What `minislurm status -o json` says."""
        return json.loads(self.command("status", "-o", "json"))

    def fail_node(self, name: str, wait: bool = True) -> None:
        """Take the power from a node; by default return when Slurm has noticed (8 to 15 s)."""
        self.command("fail-node", name, *([] if wait else ["--no-wait"]))

    def restore_node(self, name: str) -> None:
        self.command("restore-node", name)

    def run(
        self, argv: list[str], timeout: float = 120, check: bool = True, cwd: str | os.PathLike | None = None,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess:  # fmt: skip
        """Run a command as on a login node. RuntimeError with its output if it fails and `check` is set."""
        return _run(argv, env={**self.env, **(env or {})}, timeout=timeout, check=check, cwd=cwd)

    def run_on(
        self, node: str, argv: list[str], timeout: float = 120, check: bool = True
    ) -> subprocess.CompletedProcess:
        """Run a command on a node, outside of any job."""
        module = [sys.executable, "-P", "-m", "dynarl.slurm.mini", "exec", f"--state-dir={self.paths.root}", node, "--"]
        env = {**self.env, "PYTHONPATH": str(Path(dynarl.__file__).parents[1])}
        return _run([*module, *argv], env=env, timeout=timeout, check=check)

    def submit(self, *arguments: str, cwd: str | os.PathLike | None = None) -> str:
        """sbatch with these arguments; returns the job id."""
        return self.run(["sbatch", "--parsable", *arguments], cwd=cwd).stdout.strip().partition(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """The fields of `scontrol show job`, e.g. JobState, ExitCode, Restarts, NodeList."""
        words = self.run(["scontrol", "-o", "show", "job", job_id]).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_job(self, job_id: str, timeout: float = 300, states: set[str] = FINAL) -> str:
        """Wait until the job is in one of these states, by default has ended. TimeoutError with the job's fields.

        `sbatch --wait` would do, but looks only each 10 s or so.
        """
        deadline = time.monotonic() + timeout
        while (job := self.job(job_id))["JobState"] not in states:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} is {job['JobState']} after {timeout:.0f} s: {job}")
            time.sleep(0.2)
        return job["JobState"]

    def job_processes(self, node: str | None = None) -> dict[int, str]:
        """Processes of jobs, Slurm's own for them included, on one node or on all, as {pid: command line}."""
        record = records.load(self.paths)
        hosts = (node,) if node else record.spec.node_names
        daemons = {process.pid for host in hosts if (process := record.init(host))}
        found = {}
        for pid in clusters.members(record, None, hosts):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                name = Path(f"/proc/{pid}/comm").read_text().strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if pid not in daemons and name not in ("munged", "slurmd"):
                found[pid] = command
        return found


def _run(
    argv: list[str], env: dict[str, str], timeout: float, check: bool = True, cwd: str | os.PathLike | None = None
) -> subprocess.CompletedProcess:
    done = subprocess.run(
        argv, env=env, timeout=timeout, cwd=cwd, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    if check and done.returncode:
        raise RuntimeError(f"`{shlex.join(argv)}` ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done
