"""Real processes under the supervisor. A worker program is a small script, given to it as the role's interpreter."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynarl.agent.supervisor import Supervisor, describe_status, tail, visible_device

ROOT = Path(__file__).parents[2]


def program(directory: Path, body: str) -> str:
    """An executable that runs `body` in Python, whatever arguments the supervisor gives it."""
    script = directory / "program.py"
    script.write_text(f"import os, signal, subprocess, sys, time\n{body}\n")
    path = directory / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -u {script} "$@"\n')
    path.chmod(0o755)
    return str(path)


class Watched:
    """A supervisor that notes the deaths it reports: (time, worker, status, tail)."""

    def __init__(self, directory: Path):
        self.deaths = []
        self.directory = directory
        self.supervisor = Supervisor("n1", f"ipc://{directory}/agent.sock", directory, lambda *death: self.deaths.append((time.monotonic(), *death)))

    def start(self, python: str | None, role: str = "rollout", device: int = 0, env: dict | None = None):
        return self.supervisor.start(role, device, python=python, env=env or {}, device_kind="cpu")

    async def log_has(self, worker, text: str) -> str:
        while text not in (content := worker.log_path.read_text()):
            await asyncio.sleep(0.01)
        return content

    async def until(self, reached, timeout_s: float = 50.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not reached():
                await asyncio.sleep(0.01)


def supervised(directory: Path, scenario) -> None:
    async def go():
        watched = Watched(directory)
        try:
            async with asyncio.timeout(120):
                await scenario(watched)
        finally:
            watched.supervisor.kill_all()
            await watched.until(lambda: not watched.supervisor.workers)

    asyncio.run(go())


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_worker_is_reported_at_once_with_its_last_lines(tmp_path):
    async def scenario(watched):
        worker = watched.start(program(tmp_path, "for i in range(40): print('line', i)\nprint('ready')\ntime.sleep(60)"))
        await watched.log_has(worker, "ready")
        killed = time.monotonic()
        os.kill(worker.process.pid, signal.SIGKILL)
        await watched.until(lambda: watched.deaths)
        when, dead, status, last = watched.deaths[0]
        assert when - killed < 50.0
        assert (dead, dead.name, dead.role, dead.device) == (worker, "n1-rollout-0", "rollout", 0)
        assert status == "killed by SIGKILL"
        assert last == [f"line {i}" for i in range(29, 40)] + ["ready"]
        assert watched.supervisor.workers == {}

    supervised(tmp_path, scenario)


def test_a_worker_that_ends_before_it_is_up_says_so_to_who_waits(tmp_path):
    async def scenario(watched):
        worker = watched.start(program(tmp_path, "sys.exit('no such model')"))
        with pytest.raises(RuntimeError, match="n1-rollout-0 ended before it was ready: exit status 1"):
            await worker.up
        assert watched.deaths[0][2:] == ("exit status 1", ["no such model"])

    supervised(tmp_path, scenario)


def test_children_of_a_worker_die_with_it(tmp_path):
    body = """
child = subprocess.Popen(["sh", "-c", "trap '' TERM HUP; sleep 60 & wait"])
print("child", child.pid)
time.sleep(60)"""

    async def scenario(watched):
        worker = watched.start(program(tmp_path, body))
        while not (text := worker.log_path.read_text()).endswith("\n"):
            await asyncio.sleep(0.01)
        child = int(text.split()[1])
        assert alive(child)
        os.kill(worker.process.pid, signal.SIGKILL)
        await watched.until(lambda: watched.deaths)
        await watched.until(lambda: not alive(child))

    supervised(tmp_path, scenario)


def test_a_restarted_worker_has_a_log_and_an_attempt_of_its_own(tmp_path):
    async def scenario(watched):
        python = program(tmp_path, "print('hello'); time.sleep(60)")
        first = watched.start(python)
        with pytest.raises(RuntimeError, match=f"n1-rollout-0 is already running .pid {first.process.pid}"):
            watched.start(python)
        watched.supervisor.kill(first.name)
        await watched.until(lambda: watched.deaths)
        second = watched.start(python)
        other = watched.start(python, role="training", device=1)
        assert [w.log_path.name for w in (first, second, other)] == ["n1-rollout-0.1.log", "n1-rollout-0.2.log", "n1-training-1.1.log"]
        assert (first.attempt, second.attempt, other.attempt) == (1, 2, 1)

    supervised(tmp_path, scenario)


def test_a_worker_that_was_expected_to_end_is_not_reported(tmp_path):
    async def scenario(watched):
        worker = watched.start(program(tmp_path, "time.sleep(60)"))
        worker.expected_to_end = True
        watched.supervisor.kill(worker.name)
        await watched.until(lambda: not watched.supervisor.workers)
        assert watched.deaths == []

    supervised(tmp_path, scenario)


def test_no_trace_of_slurm_or_mpi_reaches_a_worker(tmp_path, monkeypatch):
    for name in ("SLURM_PROCID", "SLURM_JOB_ID", "SLURMD_NODENAME", "PMI_RANK", "PMI2_x", "PMIX_RANK", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK",
                 "OMPI_MCA_orte_x", "RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("SITE_SETTING", "kept")

    async def scenario(watched):
        body = "print(*(f'{k}={v}' for k, v in os.environ.items()), *sys.argv[1:], 'end', sep='\\n')\ntime.sleep(60)"
        worker = watched.start(program(tmp_path, body), device=3, env={"OMP_NUM_THREADS": "2"})
        lines = (await watched.log_has(worker, "end\n")).splitlines()
        assert [line for line in lines if line.startswith(("SLURM", "PMI", "OMPI_", "RANK=", "WORLD_", "MASTER_"))] == []
        assert {"SITE_SETTING=kept", "OMP_NUM_THREADS=2", "DYNARL_ROLE=rollout", "DYNARL_DEVICE=3"} <= set(lines)
        assert lines[-9:-3] == ["-m", "dynarl.roles.rollout.worker", "--socket", f"ipc://{tmp_path}/agent.sock", "--name", "n1-rollout-3"]

    supervised(tmp_path, scenario)


def test_stop_all_ends_a_worker_that_ignores_term(tmp_path):
    async def scenario(watched):
        stubborn = watched.start(program(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf')\ntime.sleep(60)"))
        await watched.log_has(stubborn, "deaf")
        (tmp_path / "other").mkdir()
        polite = watched.start(program(tmp_path / "other", "print('up')\ntime.sleep(60)"), role="training")
        await watched.log_has(polite, "up")
        began = time.monotonic()
        await watched.supervisor.stop_all(grace_s=2.0)
        assert 2.0 <= time.monotonic() - began < 50.0
        assert watched.supervisor.workers == {}
        assert not alive(stubborn.process.pid) and not alive(polite.process.pid)
        assert (stubborn.process.returncode, polite.process.returncode) == (-signal.SIGKILL, -signal.SIGTERM)
        assert watched.deaths == []

    supervised(tmp_path, scenario)


def test_nothing_starts_while_the_agent_stops(tmp_path):
    async def scenario(watched):
        python = program(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up')\ntime.sleep(60)")
        await watched.log_has(watched.start(python), "up")
        stopping = asyncio.create_task(watched.supervisor.stop_all(grace_s=0.2))
        await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError, match="n1-training-0 is not started: the agent is stopping"):
            watched.start(python, role="training")
        await stopping

    supervised(tmp_path, scenario)


AGENT = """
import asyncio, sys, zmq, zmq.asyncio
from pathlib import Path
from dynarl.agent.supervisor import Supervisor

async def main(directory, wait):
    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    address = f"ipc://{directory}/agent.sock"
    socket.bind(address)
    worker = Supervisor("n1", address, Path(directory), print).start("environment", 0, python=None, env={}, device_kind="cpu")
    if wait == "up":
        await socket.recv_multipart()
    print(worker.process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("when", ["up", "starting"])
def test_a_worker_does_not_outlive_an_agent_that_is_killed(tmp_path, when):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path), when], stdout=subprocess.PIPE, text=True, env=environment) as agent:
        worker = int(agent.stdout.readline())
        agent.kill()
    deadline = time.monotonic() + 50.0
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    outlived = alive(worker)
    if outlived:
        os.killpg(worker, signal.SIGKILL)
    assert not outlived, (tmp_path / "n1-environment-0.1.log").read_text()


@pytest.mark.parametrize("code, text", [(0, "exit status 0"), (3, "exit status 3"), (-9, "killed by SIGKILL"), (-15, "killed by SIGTERM"),
                                        (-60, "killed by signal 60")])
def test_statuses_in_words(code, text):
    assert describe_status(code) == text


def test_the_tail_of_a_log_is_its_last_lines(tmp_path):
    log = tmp_path / "log"
    assert tail(log) == []
    log.write_bytes(b"x" * 10_000 + b"\nlast but one\n\xff last")
    assert tail(log, 2) == ["last but one", "\ufffd last"]


def test_a_worker_sees_one_of_the_devices_that_its_node_was_given():
    assert visible_device({}, 2) == "2"
    assert visible_device({"CUDA_VISIBLE_DEVICES": "3,GPU-5e"}, 0) == "3"
    with pytest.raises(ValueError, match="device 2 asked for, but CUDA_VISIBLE_DEVICES='3,4' has 2 entries"):
        visible_device({"CUDA_VISIBLE_DEVICES": "3,4"}, 2)
    with pytest.raises(ValueError, match="has 0 entries"):
        visible_device({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0)
