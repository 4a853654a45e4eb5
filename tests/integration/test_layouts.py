"""The trainer of a job changes its layout while the job runs, and survives what goes wrong meanwhile."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
from job_harness import JobRun, kill

from dynarl import rundir
from dynarl.hypergraph.fold import fold
from dynarl.transport.files import CheckpointReader
from dynarl.transport.hf import export_model, read_spec

pytest.importorskip("torch")
pytest.importorskip("mpi4py")

# Rewards that an untrained model has, so that there are gradients.
VARIED = ("task.name=tests.integration.varied_task:VariedArithmetic", "algorithm.truncated=keep")
TWO_DEVICES = ("cluster.devices_per_node=2", "model.heads=4", "model.kv_heads=2", "model.layers=2", "policy.dwell_s=0.0")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def accounting(job: JobRun) -> dict[str, int]:
    return asdict(fold(job.records()).samples.tally())


@pytest.mark.parametrize("moved_by", ["mpi", "torch"])
def test_a_trainer_changes_tp_pp_and_dp_between_iterations(minislurm, runs, moved_by):
    job = JobRun.submit(
        minislurm(nodes=2), runs, *TWO_DEVICES, f"training.moved_by={moved_by}", "run.iterations=6", "checkpoint.every=2", "training.tp=2",
        'training.layouts={2: "pp=2", 4: "tp=1", 6: "tp=2"}')
    assert job.wait()["state"] == "completed", job.story()
    committed = job.records("layout_committed")
    assert [(r["iteration"], r["layout"]) for r in committed] == [(2, "tp=1,pp=2"), (4, "tp=1,pp=1"), (6, "tp=2,pp=1")]
    assert not job.records("layout_cancelled") and all(r["pause_ms"] > 0 for r in committed)
    assert accounting(job) == {"trained": 6 * 16, "lost": 0, "doubled": 0}
    # Borrowed replicas follow: nodes still move into training in the new layouts.
    last = committed[-1]["seq"]
    assert any(m["target"] == "training" for r in job.records("epoch_committed") if r["seq"] > last for m in r["moves"])
    # Each was written by another layout; all have the same state in them, every step counted once.
    spec = read_spec(job.run / "model")
    for path in rundir.checkpoints(job.run):
        progress = json.loads((path / "progress.json").read_text())
        scalars = CheckpointReader(path / "state", spec).scalars
        assert {count for each in scalars.values() for count in each["steps"].values()} == {progress["step"] + 4}  # of the warm start
        export_model(path, runs / path.name)


def test_experts_are_spread_over_the_ranks_and_come_back(minislurm, runs):
    job = JobRun.submit(
        minislurm(nodes=2), runs, *TWO_DEVICES, *VARIED, "model.experts=4", "run.iterations=4", "checkpoint.every=1",
        'training.layouts={2: "ep=2", 4: "ep=1"}')
    assert job.wait()["state"] == "completed", job.story()
    committed = job.records("layout_committed")
    assert [(r["iteration"], r["layout"]) for r in committed] == [(2, "tp=1,pp=1,ep=2"), (4, "tp=1,pp=1")]
    assert not job.records("layout_cancelled")
    assert accounting(job) == {"trained": 4 * 16, "lost": 0, "doubled": 0}
    assert all(math.isfinite(r["loss"]) and r["grad_norm"] > 0 for r in job.records("step_committed"))
    assert read_spec(job.run / "model").experts == 4


@pytest.mark.parametrize("policy", ["static", "threshold"])
def test_the_trainer_grows_onto_another_node_and_back_as_if_it_had_stayed(minislurm, runs, policy):
    cluster = minislurm(nodes=3)
    # So small a rate that rounding in another order changes no sampled token: then all runs train on the same answers.
    same = (*VARIED, "cluster.nodes=3", "split.rollout=2", f"policy.name={policy}", "policy.dwell_s=0.0",
            "run.iterations=5", "checkpoint.every=1", "checkpoint.keep=9", "training.lr=1e-6", "task.eval_size=0",
            "task.verify_timeout_s=60")  # a verdict that comes too late would be another reward
    stayed = JobRun.submit(cluster, runs, *same)
    assert stayed.wait()["state"] == "completed", stayed.story()
    job = JobRun.submit(cluster, runs, *same, 'training.layouts={2: "tp=1,nodes=2", 4: "tp=1,nodes=1"}')
    assert job.wait()["state"] == "completed", job.story()
    committed = job.records("layout_committed")
    assert [(r["iteration"], r["layout"]) for r in committed] == [(2, "tp=1,pp=1,nodes=2"), (4, "tp=1,pp=1,nodes=1")]
    first = {r["node"]: r["home"] for r in job.records("agent_up")}
    [joined] = [node for node, home in committed[0]["home"].items() if home != first[node]]
    assert first[joined] == "rollout" and committed[0]["home"][joined] == "training"
    assert committed[1]["home"] == first and fold(job.records()).homes == first
    assert accounting(job) == {"trained": 5 * 16, "lost": 0, "doubled": 0}
    assert all(r["grad_norm"] > 0 for r in job.records("step_committed"))
    for one, other in zip(stayed.records("step_committed"), job.records("step_committed"), strict=True):
        assert other["tokens"] == one["tokens"] and other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
    # The joined node has trained as an owner, and generated before and after.
    roles = {r["seq"]: r["roles"][joined] for r in job.records("epoch_committed")}
    within = {role for seq, role in roles.items() if committed[0]["seq"] < seq < committed[1]["seq"]}
    assert within <= {"training"} and "rollout" in {r for seq, r in roles.items() if seq > committed[1]["seq"]}
    spec = read_spec(job.run / "model")
    for path in rundir.checkpoints(job.run):
        scalars = CheckpointReader(path / "state", spec).scalars
        progress = json.loads((path / "progress.json").read_text())
        assert len(scalars) == (2 if progress["iteration"] in (2, 3) else 1)


def test_an_owner_that_dies_while_the_layout_changes_costs_a_step_back_and_not_the_job(minislurm, runs):
    job = JobRun.submit(
        minislurm(nodes=2), runs, *TWO_DEVICES, "run.iterations=100000", "checkpoint.every=1",
        'training.layouts={3: "tp=2"}')
    job.until(lambda: job.records("layout_proposed"), 150, "the layout is about to change")
    kill(job.worker_pids("training", "n1")[0])
    resumed = job.until(lambda: job.records("resumed"), 150, "the trainer has resumed")[0]
    job.until(lambda: [r for r in job.records("step_committed") if r["seq"] > resumed["seq"] and r["iteration"] >= 5], 150, "more iterations")
    assert len(job.records("step_launched")) == 1, "the step has to live on"
    assert accounting(job)["doubled"] == 0 and accounting(job)["lost"] == 0
    job.cluster.run(["scancel", job.job_id])


def test_an_owner_that_joined_and_dies_takes_the_trainer_back_to_its_checkpoint_on_both_nodes(minislurm, runs):
    job = JobRun.submit(
        minislurm(nodes=3), runs, "cluster.nodes=3", "split.rollout=2", "policy.dwell_s=0.0", "run.iterations=100000",
        "checkpoint.every=1", 'training.layouts={2: "nodes=2"}')
    committed = job.until(lambda: job.records("layout_committed"), 150, "the trainer has grown")[0]
    [joined] = [n for n, role in committed["home"].items() if role == "training" and n != "n1"]
    job.until(lambda: [r for r in job.records("checkpoint_saved") if r["iteration"] >= 3], 150, "a checkpoint of both")
    kill(job.worker_pids("training", joined)[0])
    resumed = job.until(lambda: job.records("resumed"), 150, "the trainer has resumed")[0]
    assert resumed["iteration"] >= 3

    def after(type_):
        return [r for r in job.records(type_) if r["seq"] > resumed["seq"]]

    job.until(lambda: len(after("step_committed")) >= 2, 150, "more iterations")
    assert not after("layout_proposed"), "it has both nodes already"
    assert all(r["roles"][joined] == "training" for r in after("epoch_committed"))
    assert len(job.records("step_launched")) == 1, "the step has to live on"
    assert accounting(job)["doubled"] == 0 and accounting(job)["lost"] == 0
    job.cluster.run(["scancel", job.job_id])
