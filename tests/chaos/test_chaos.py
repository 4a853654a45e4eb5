"""Jobs on a real Slurm whose workers are killed, stopped, slowed down and cut off: every sample counts once."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from faults import Chaos
from job_harness import JobRun, gone, kill

from dynarl.hypergraph.fold import fold

pytest.importorskip("torch")
pytest.importorskip("mpi4py")

SETTINGS = (
    "run.iterations=100000", "cluster.nodes=4", "split.rollout=2", "split.inference=1",
    "policy.dwell_s=0.0", "checkpoint.every=2", "failure.max_restarts=100",
)
ROLES = ("rollout", "inference", "training", "environment")
# Longer than the slowest recovery: a hang that is noticed, all training workers started afresh, a checkpoint read.
MENDED_S = 120


def submit(minislurm, tmp_path: Path, hang_s: int, seed: int) -> tuple[JobRun, Chaos]:
    limits = f"{{{', '.join(f'{role}: {hang_s}' for role in ROLES)}}}"
    job = JobRun.submit(minislurm(nodes=4), tmp_path / "runs", *SETTINGS, f"failure.hang_s={limits}", f"failure.give_back_s={hang_s}")
    return job, Chaos(job, ["n1", "n2", "n3", "n4"], seed)


def survive(job: JobRun, chaos: Chaos, faults: list[tuple[str, str]], every: int, iterations: int) -> None:
    """Strike with each of `faults`, `every` iterations apart, until `iterations` are done; then check everything."""
    def done() -> int:
        return max((r["iteration"] for r in job.records("step_committed")), default=0)

    struck = []
    try:
        job.until(lambda: done() >= 1, 150, "the first iteration")
        for kind, role in faults:
            struck.append(chaos.strike(kind, role))
            job.until(lambda: chaos.mended(struck[-1]), MENDED_S, f"the journal explains {struck[-1]} and all are back")
            target = done() + every
            job.until(lambda: done() >= target, MENDED_S, f"{every} iterations after {struck[-1]}")
        job.until(lambda: done() >= iterations, 10 * MENDED_S, f"{iterations} iterations")
    finally:
        chaos.end()
    (job.run / "control" / "cancel").touch()
    ended = job.wait(60)
    assert (ended["state"], ended["exit_code"]) == ("cancelled", 0), job.story()
    records = job.records()
    graph = fold(records)
    tally = asdict(graph.samples.tally())
    assert (tally["lost"], tally["doubled"]) == (0, 0) and tally["trained"] >= 16 * iterations, tally
    # A fault takes all nodes home without a change that was voted on.
    assert [fault for fault in graph.faults if "without a move" not in fault] == []
    assert len(job.records("step_launched")) == 1, "the step has to live on"
    slowed = {(s.node, s.role) for s in struck if s.kind == "slow"}
    hung = {(s.node, s.role) for s in struck if s.kind == "hang"}
    rebooted = {(r["node"], r["role"]) for r in job.records("worker_rebooted")}
    assert not (slowed - hung) & rebooted, "a slow worker was taken for a hung one"
    for fault in struck:
        if fault.kind == "hang" and fault.role != "environment":
            after = [r for r in records[fault.at:] if r["type"] in ("worker_rebooted", "resumed")]
            assert any(r.get("node") in (fault.node, None) for r in after), fault
    assert gone(job.cluster) == {}


def test_one_fault_of_each_kind_loses_and_doubles_no_sample(minislurm, tmp_path: Path):
    job, chaos = submit(minislurm, tmp_path, hang_s=10, seed=1)
    faults = [("kill", "rollout"), ("cut", "inference"), ("slow", "rollout"), ("hang", "inference")]
    survive(job, chaos, faults, every=1, iterations=8)


def kill_after_a_record(pid: int) -> None:
    """Kill a rollout worker that has just told what it has sampled of its answers, as it does in the first step after a
    second."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.1)
    clock = ~pid << 3 | 2  # CPU time of that process
    stopped_at = time.clock_gettime(clock)
    os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + 10.0
    while time.clock_gettime(clock) < stopped_at + 0.02 and time.monotonic() < deadline:  # some steps
        time.sleep(0.001)
    kill(pid)


def test_answers_of_killed_workers_are_what_they_would_have_been(minislurm, tmp_path: Path):
    """With weights that stay as they are, the number of tokens in each step says that all answers are the same."""
    settings = (
        "run.iterations=3", "cluster.nodes=3", "split.rollout=2", "policy.name=static", "warm_start.steps=0", "task.eval_size=0",
        "training.lr=0", "algorithm.truncated=keep", "algorithm.max_response_tokens=440", "model.max_position=512",
        "model.hidden_size=64", "model.layers=4", "algorithm.prompts_per_step=48", "rollout.max_running=16",  # several waves
    )
    cluster, tokens, begun_elsewhere = minislurm(nodes=3), {}, 0
    for disturbed in (False, True):
        job = JobRun.submit(cluster, tmp_path / "runs", *settings)
        for number, node in ((1, "n2"), (2, "n3")) if disturbed else ():
            job.until(lambda: len(job.records("iteration_started")) >= number, 120, f"iteration {number}")
            kill_after_a_record(job.worker_pids("rollout", node)[0])
            job.until(lambda: len(job.records("worker_died")) >= number, 10, "the death is in the journal")
        assert job.wait()["state"] == "completed", job.story()
        tokens[disturbed] = [record["tokens"] for record in job.records("step_committed")]
        texts = [path.read_text() for path in job.run.glob("logs/*/*rollout*.log")]
        begun_elsewhere = sum(int(n) for text in texts for n in re.findall(r"of which (\d+) were begun elsewhere", text))
    assert tokens[True] == tokens[False]
    assert begun_elsewhere > 0, "no answer went on from where a dead worker had left it"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_fifty_iterations_of_chaos_lose_and_double_no_sample(minislurm, tmp_path: Path, seed: int):
    job, chaos = submit(minislurm, tmp_path, hang_s=20, seed=seed)
    faults = [*itertools.product(("kill", "hang"), ROLES), *itertools.product(("slow", "cut"), ROLES[:3])]
    survive(job, chaos, chaos.order(faults), every=3, iterations=50)
