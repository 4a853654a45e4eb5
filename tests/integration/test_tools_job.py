"""Answers with tool calls in a whole job on a real Slurm, while nodes move and workers die."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from job_harness import ROOT, JobRun, kill

from dynarl import rundir
from dynarl.hypergraph.fold import fold

pytest.importorskip("torch")
pytest.importorskip("mpi4py")

# A model that has just begun to write calls: some are right, some are none.
SETTINGS = (
    "cluster.nodes=3",
    "split.rollout=2",
    "task.max_tool_calls=3",
    "task.eval_size=0",
    "warm_start.steps=60",
    "warm_start.lr=0.01",
    "policy.dwell_s=0.0",
    "algorithm.max_prompt_tokens=16",
    "algorithm.max_response_tokens=64",
    "algorithm.prompts_per_step=6",
    f"cluster.env.PYTHONPATH={ROOT}:{ROOT}/tests/integration",
)


def answers(job: JobRun) -> dict[str, int]:
    return asdict(fold(job.records()).samples.tally())


def metrics(job: JobRun) -> list[dict[str, float]]:
    """Of the iterations, in order."""
    text, _, _ = rundir.metrics(job.run).read_text().rpartition("\n")  # behind it a line may be on its way
    lines = [json.loads(line) for line in text.splitlines()]
    return [line["data"] for line in lines if "response_length/mean" in line["data"]]


def test_every_tool_call_is_made_once_while_nodes_leave_rollout_in_the_midst_of_calls(minislurm, tmp_path: Path):
    log = tmp_path / "calls"
    job = JobRun.submit(
        minislurm(nodes=3),
        tmp_path / "runs",
        *SETTINGS,
        "run.iterations=6",
        "task.name=slow_toolbox:SlowToolbox",
        f"task.args={{log: {log}, kinds: multiply lookup chain, tools: calculator search, called: 1.0}}",
    )
    assert job.wait(240)["state"] == "completed", job.story()
    assert answers(job) == {"trained": 6 * 24, "lost": 0, "doubled": 0}
    steps = metrics(job)
    calls = round(sum(24 * step.get("tools/calls/mean", 0.0) for step in steps))
    assert calls > 30, "the model has to call tools"
    assert len(log.read_text().splitlines()) == calls
    elsewhere = [
        int(n)
        for path in rundir.logs(job.run, 1).glob("*rollout*")
        for n in re.findall(r"of which (\d+) were begun elsewhere", path.read_text())
    ]
    assert sum(elsewhere) > 0, "answers have to move"
    for step, record in zip(steps, job.records("step_committed"), strict=True):
        tokens = 24 * step["response_length/mean"] * (1 - step.get("tools/masked_tokens_frac", 0.0))
        assert record["tokens"] == pytest.approx(tokens) or step["response_length/clip_ratio"] > 0
        assert step["training/rollout_probs_diff_max"] < 1e-4 if "training/rollout_probs_diff_max" in step else True


def test_killed_tool_and_rollout_workers_cost_no_sample_and_programs_run_in_their_sandbox(minislurm, tmp_path: Path):
    job = JobRun.submit(
        minislurm(nodes=3),
        tmp_path / "runs",
        *SETTINGS,
        "run.iterations=1000",
        "task.name=tools",
        "task.args={kinds: digits chain, called: 1.0}",
    )
    job.until(lambda: len(job.records("step_committed")) >= 2, 180, "two iterations")
    pids = {
        pid
        for node in ("n2", "n3")
        for pid, command in job.workers(node).items()
        if re.search("n[23]-environment-1", command)
    }
    assert len(pids) == 2
    for pid in pids:
        kill(pid)
    kill(job.worker_pids("rollout", "n3")[0])
    steps = len(job.records("step_committed"))
    job.until(lambda: len(job.records("step_committed")) >= steps + 5, 120, "five more iterations after the deaths")
    assert {(r["role"], r["device"]) for r in job.records("worker_died")} == {("environment", 1), ("rollout", 0)}
    assert (answers(job)["lost"], answers(job)["doubled"]) == (0, 0)
    assert metrics(job)[-1]["tools/calls/mean"] > 0
    job.cluster.run(["scancel", job.job_id])
