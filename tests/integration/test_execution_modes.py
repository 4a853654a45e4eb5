"""The ways in which a job's components share time and nodes, on a real Slurm: all of them train on the same."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from job_harness import JobRun, kill

from dynarl.hypergraph.check import check
from dynarl.hypergraph.fold import fold

pytest.importorskip("torch")
pytest.importorskip("mpi4py")

# Rewards that an untrained model has, so that there are gradients. So small a rate that rounding in another order changes no
# sampled token: then all runs train on the same answers.
SAME = ("task.name=tests.integration.varied_task:VariedArithmetic", "algorithm.truncated=keep", "cluster.nodes=3", "split.rollout=1",
        "split.inference=1", "algorithm.minibatches=2", "run.iterations=3", "training.lr=1e-6", "task.eval_size=0", "policy.dwell_s=0.0")
MODES = {
    "pipelined": ("policy.name=static",),
    "pipelined in chunks": ("policy.name=static", "dataflow.chunk={trajectories: 3, scored: 2}"),
    "in turn, node by node": ("policy.name=colocated", "policy.switching=node"),
    "strictly in turn": ("policy.name=colocated", "policy.switching=node", "dataflow.chunk={trajectories: all, scored: all}"),
}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def finished(job: JobRun) -> None:
    assert job.wait()["state"] == "completed", job.story()
    graph = fold(job.records())
    iterations = int(graph.planned_iterations)
    assert asdict(graph.samples.tally()) == {"trained": iterations * 16, "lost": 0, "doubled": 0} and check(graph) == []


def own_switches(job: JobRun) -> list[dict]:
    """Changes of roles that nobody voted on."""
    return [r for r in job.records("epoch_committed") if "load_ms" in r["phases"]]


def test_every_mode_trains_each_sample_once_with_the_same_loss(minislurm, runs):
    cluster, losses = minislurm(nodes=3), {}
    for name, mode in MODES.items():
        job = JobRun.submit(cluster, runs, *SAME, *mode)
        finished(job)
        losses[name] = [(r["iteration"], r["step"], r["tokens"], r["loss"], r["grad_norm"]) for r in job.records("step_committed")]
        assert bool(own_switches(job)) == ("policy.switching=node" in mode)
        if "strictly" in name:
            scored = [r["stages"] for r in job.records("step_committed")]
            assert all(stages["inference"] >= stages["rollout"] for stages in scored)
    reference = losses.pop("pipelined")
    for name, steps in losses.items():
        assert [step[:3] for step in steps] == [step[:3] for step in reference], name
        for step, other in zip(steps, reference):
            assert step[3:] == pytest.approx(other[3:], rel=1e-3, abs=1e-6), (name, step, other)


def test_a_worker_that_dies_while_roles_take_turns_costs_no_sample(minislurm, runs):
    job = JobRun.submit(minislurm(nodes=3), runs, *SAME, "run.iterations=100000", "policy.name=colocated", "policy.switching=node",
                        "cluster.time=0:30:00")
    job.until(lambda: len(job.records("step_committed")) >= 2, 120, "an iteration")
    for role in ("rollout", "inference"):
        kill(job.worker_pids(role, "n2")[0])
        steps = len(job.records("step_committed"))
        job.until(lambda: len(job.records("step_committed")) >= steps + 4, 120, f"two more iterations after {role} died")
    assert len(job.records("worker_died")) == 2 and not job.records("resumed") and len(job.records("step_launched")) == 1
    assert own_switches(job)
    tally = fold(job.records()).samples.tally()
    assert (tally.lost, tally.doubled) == (0, 0)
    job.cluster.run(["scancel", job.job_id])
