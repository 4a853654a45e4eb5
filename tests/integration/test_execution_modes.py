"""The ways in which a job's components share time and nodes, on a real Slurm: all of them train on the same."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from job_harness import JobRun, kill

from dynarl.hypergraph.check import check
from dynarl.hypergraph.fold import fold
from dynarl.report.explain import entries

pytest.importorskip("torch")
pytest.importorskip("mpi4py")

# Rewards that an untrained model has, so that there are gradients. So small a rate that rounding in another order changes no
# sampled token: then all runs train on the same answers. No verdict comes too late, which would be another reward.
SAME = ("task.name=tests.integration.varied_task:VariedArithmetic", "algorithm.truncated=keep", "cluster.nodes=3", "split.rollout=1",
        "split.inference=1", "algorithm.minibatches=2", "run.iterations=3", "training.lr=1e-6", "task.eval_size=0", "policy.dwell_s=0.0",
        "task.verify_timeout_s=60")
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
    return job.records("role_switched")


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
    job = JobRun.submit(minislurm(nodes=3), runs, *SAME, "run.iterations=100000", "policy.name=colocated", "policy.switching=node")
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


def test_a_split_that_is_wrong_is_planned_again_while_the_job_runs(minislurm, runs):
    """One node generates, one answer at a time, and three train what that takes moments to train."""
    job = JobRun.submit(
        minislurm(nodes=4), runs, *SAME, "cluster.nodes=4", "split.rollout=1", "split.inference=0", "split.training=3", "policy.name=static",
        "run.iterations=1000", "rollout.max_running=1", "algorithm.prompts_per_step=8", "algorithm.group_size=2",
        "plan.replan=true", "plan.window=2", "plan.stage_s={rollout: 0.01, training: 60}")
    job.until(lambda: any(r["iteration"] >= 6 for r in job.records("step_committed")), 150, "iterations with another split")
    (job.run / "control" / "cancel").touch()  # it need not reap the rest of what the change pays
    assert job.wait()["state"] == "cancelled", job.story()
    graph = fold(job.records())
    assert (graph.samples.tally().lost, graph.samples.tally().doubled) == (0, 0) and check(graph) == []
    planned = [r for r in job.records("replanned") if r["state"] == "committed"][0]
    assert planned["iteration"] == 3 and planned["off"]["training"] < -0.9 and planned["off"]["rollout"] > 1
    assert planned["proposed"]["rollout"] > 1 and planned["proposed"]["training"] < 3 and planned["then_s"] < planned["now_s"]
    assert [r["layout"] for r in job.records("layout_committed")][:1] == [f"tp=1,pp=1,nodes={planned['proposed']['training']}"]
    assert list(planned["home"].values()).count("rollout") == planned["proposed"]["rollout"]
    # The nodes that were given to rollout generate from that iteration on.
    began = next(r["seq"] for r in job.records("iteration_started") if r["iteration"] == 3)
    roles = [r["roles"] for r in job.records("epoch_committed") if r["seq"] < began][-1]
    assert list(roles.values()).count("rollout") == planned["proposed"]["rollout"]
    saved = [r["iteration"] for r in job.records("checkpoint_saved")]
    assert not job.records("resumed") and saved[0] == 0 and all(iteration >= 6 for iteration in saved[1:])
    entry = [e for e in entries(job.records()) if e.kind == "plan" and e.record["state"] == "committed"][0]
    assert "training took" in entry.reason and "rollout on" in entry.what and entry.result().startswith("done")
