"""The whole job on a real Slurm: it runs, it survives what clusters do to it, and it leaves nothing behind."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from job_harness import JobRun, gone, kill
from machine import cpu_seconds

from dynarl import rundir
from dynarl.hypergraph.fold import fold

pytest.importorskip("torch")
pytest.importorskip("mpi4py")

LONG = ("run.iterations=100000",)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def accounting(job: JobRun) -> dict[str, int]:
    return asdict(fold(job.records()).samples.tally())


def test_a_job_on_two_nodes_trains_every_sample_once_and_moves_a_node(minislurm, runs):
    job = JobRun.submit(minislurm(nodes=2), runs, "run.iterations=3", "policy.dwell_s=0.0")
    ended = job.wait()
    assert (ended["state"], ended["exit_code"]) == ("completed", 0), job.story()
    assert accounting(job) == {"trained": 3 * 16, "lost": 0, "doubled": 0}
    assert [r["when"] for r in job.records("evaluated")] == ["start", "end"]
    into_training = [r for r in job.records("epoch_committed") if any(m["target"] == "training" for m in r["moves"])]
    assert into_training and all(r["pause_ms"] > 0 for r in into_training if r["epoch"] > 1)
    assert rundir.newest_checkpoint(job.run).name == "step-000003"
    assert gone(job.cluster) == {}


def test_a_job_of_one_node_takes_all_roles_in_turn(minislurm, runs):
    job = JobRun.submit(minislurm(nodes=2), runs, "cluster.nodes=1", "split.rollout=0", "split.inference=0", "split.training=1",
                        "policy.name=colocated", "policy.dwell_s=0.0")
    assert job.wait()["state"] == "completed", job.story()
    roles = [r["roles"] for r in job.records("epoch_committed")]
    assert {role for r in roles for role in r.values()} == {"rollout", "inference", "training"}
    assert accounting(job) == {"trained": 32, "lost": 0, "doubled": 0}


def test_an_iteration_in_which_no_answer_counts_leaves_the_weights_alone(minislurm, runs):
    job = JobRun.submit(minislurm(nodes=2), runs, "algorithm.truncated=mask", "algorithm.max_response_tokens=1", "warm_start.steps=0")
    assert job.wait()["state"] == "completed", job.story()
    assert [r["tokens"] for r in job.records("step_committed")] == [0, 0]
    assert accounting(job) == {"trained": 32, "lost": 0, "doubled": 0}


@pytest.mark.parametrize("role", ["rollout", "training"])
def test_a_worker_killed_in_an_iteration_is_named_at_once_and_the_job_goes_on(minislurm, runs, role):
    job = JobRun.submit(minislurm(nodes=2), runs, *LONG, "policy.dwell_s=0.0")
    job.until(lambda: len(job.records("step_committed")) >= 2, 120, "two iterations")
    node = "n2"  # rollout's home; its training worker is borrowed
    killed_at = kill(job.worker_pids(role, node)[0])
    died = job.until(lambda: job.records("worker_died"), 60, "the death is in the journal")[0]
    # Its agent sees it end. That it gives no sign of life would strike nobody before 15 s.
    assert died["t"] - killed_at < 15.0 and not job.records("worker_rebooted")
    assert (died["node"], died["role"], died["status"]) == (node, role, "killed by SIGKILL")
    steps = len(job.records("step_committed"))
    job.until(lambda: len(job.records("step_committed")) >= steps + 5, 120, "five more iterations after the death")
    job.until(lambda: [r for r in job.records("worker_up") if r["role"] == role and r["attempt"] == 2], 60, "the worker's second start")
    assert len(job.records("step_launched")) == 1, "the step has to live on"
    assert accounting(job)["doubled"] == 0 and accounting(job)["lost"] == 0
    job.cluster.run(["scancel", job.job_id])


def test_a_dead_owner_takes_the_trainer_back_to_its_checkpoint_and_the_step_lives_on(minislurm, runs):
    job = JobRun.submit(minislurm(nodes=2), runs, *LONG, "checkpoint.every=2", "policy.dwell_s=0.0")
    job.until(lambda: len(job.records("step_committed")) >= 3, 120, "three iterations")
    kill(job.worker_pids("training", "n1")[0])
    resumed = job.until(lambda: job.records("resumed"), 60, "the trainer has resumed")[0]
    assert resumed["iteration"] >= 2 and resumed["iteration"] % 2 == 0
    target = resumed["iteration"] + 3
    job.until(lambda: any(r["iteration"] >= target and r["seq"] > resumed["seq"] for r in job.records("step_committed")), 120, "three more iterations")
    assert len(job.records("step_launched")) == 1
    assert accounting(job)["doubled"] == 0 and accounting(job)["lost"] == 0
    job.cluster.run(["scancel", job.job_id])


def test_failure_end_ends_the_job_and_names_the_worker(minislurm, runs):
    job = JobRun.submit(minislurm(nodes=2), runs, *LONG, "failure.rollout=end")
    job.until(lambda: job.records("iteration_started"), 120, "the first iteration")
    kill(job.worker_pids("rollout", "n2")[0])
    ended = job.wait(60)
    assert ended["state"] == "failed" and "rollout worker 0 on n2 died: killed by SIGKILL" in ended["reason"]
    assert gone(job.cluster) == {}


def test_scancel_leaves_no_process(minislurm, runs):
    job = JobRun.submit(minislurm(nodes=2), runs, *LONG)
    job.until(lambda: job.records("iteration_started"), 120, "the first iteration")
    assert job.worker_pids("rollout", "n2")
    job.cluster.run(["scancel", job.job_id])
    assert gone(job.cluster) == {}


def test_a_cancel_through_the_run_directory_saves_and_ends_in_good_order(minislurm, runs):
    job = JobRun.submit(minislurm(nodes=2), runs, *LONG)
    done = job.until(lambda: len(job.records("step_committed")), 120, "an iteration")
    (job.run / "control" / "cancel").touch()
    ended = job.wait(60)
    assert (ended["state"], ended["exit_code"]) == ("cancelled", 0), job.story()
    assert rundir.checkpoint_iteration(rundir.newest_checkpoint(job.run)) >= done
    assert gone(job.cluster) == {}


def test_the_time_limit_saves_requeues_and_goes_on_at_the_right_iteration(minislurm, runs):
    job = JobRun.submit(minislurm(nodes=2), runs, *LONG, "cluster.signal_before_s=150")
    began = job.until(lambda: job.records("run_started"), 120, "the first start")[0]["t"]
    job.until(lambda: job.records("step_committed"), 120, "an iteration")
    # The limit comes near only now, however long the start took: it is two to three minutes away, and the notice is due.
    set_time_limit(job, minutes=math.ceil((time.time() - began) / 60) + 2)
    ended = job.until(lambda: job.records("run_ended"), 150, "the controller has left before the limit")[0]
    assert ended["state"] == "requeued", job.story()
    saved = rundir.checkpoint_iteration(rundir.newest_checkpoint(job.run))
    last = [r["iteration"] for r in job.records("step_committed")][-1]
    assert saved == last > 0
    job.until(lambda: job.cluster.job(job.job_id)["JobState"] == "PENDING", 60, "Slurm has requeued the job")
    set_time_limit(job, minutes=60)
    # Slurm holds it for as long as the credential of its first start is revoked (10 s here): starting it at once would fail.
    job.until(lambda: len(job.records("run_started")) == 2, 180, "the second start")
    resumed = job.until(lambda: job.records("resumed"), 60, "the second start has resumed")[0]
    assert resumed["iteration"] == saved
    first = job.until(lambda: [r for r in job.records("step_committed") if r["seq"] > resumed["seq"]], 60, "its first step")[0]
    assert first["iteration"] == saved + 1
    assert accounting(job)["doubled"] == 0 and accounting(job)["lost"] == 0
    job.cluster.run(["scancel", job.job_id])


def test_a_lost_node_costs_the_step_and_not_the_job(minislurm, runs):
    cluster = minislurm(nodes=3)
    job = JobRun.submit(cluster, runs, *LONG, "cluster.nodes=3", "split.rollout=2", "checkpoint.every=1", "policy.dwell_s=0.0")
    job.until(lambda: len(job.records("step_committed")) >= 2, 120, "two iterations")
    cluster.fail_node("n3")
    job.until(lambda: len(job.records("step_launched")) == 2, 120, "a second step on the nodes that are left")
    launched = job.records("step_launched")[-1]
    assert launched["nodes"] == ["n1", "n2"]
    job.until(lambda: [r for r in job.records("step_committed") if r["seq"] > launched["seq"]], 120, "a step after the loss")
    assert accounting(job)["doubled"] == 0 and accounting(job)["lost"] == 0
    job.cluster.run(["scancel", job.job_id])


@pytest.mark.slow
def test_a_lost_first_node_brings_the_job_back_to_the_queue_and_it_goes_on(minislurm, runs):
    """With the controller on it. Slurm leaves such a job RUNNING; the agents ask for the requeue after a minute."""
    cluster = minislurm(nodes=4)
    job = JobRun.submit(cluster, runs, *LONG, "cluster.nodes=3", "split.rollout=2", "checkpoint.every=1", "policy.dwell_s=0.0")
    job.until(lambda: len(job.records("checkpoint_saved")) >= 2, 120, "two checkpoints")
    cluster.fail_node("n1")
    assert cluster.job(job.job_id)["JobState"] == "RUNNING"
    ended = job.until(lambda: job.records("run_ended"), 120, "an agent has the job requeued")[0]
    assert (ended["state"], ended["exit_code"]) == ("requeued", 75)
    asked = f"the controller on n1 has not answered for 60 s: {{}}asked Slurm to requeue job {job.job_id}"
    assert ended["reason"] in [asked.format(f"{node} ") for node in ("n2", "n3")]
    logs = [path.read_text() for path in rundir.logs(job.run, 1).glob("n[23]-agent.log")]
    assert sum(asked.format("") in text for text in logs) == 1, "one of them asks with success"
    job.until(lambda: len(job.records("run_started")) == 2, 120, "the second start")
    assert job.records("run_started")[1]["nodes"] == ["n2", "n3", "n4"]
    resumed = job.until(lambda: job.records("resumed"), 60, "the second start has resumed")[0]
    assert resumed["iteration"] >= 2
    again = job.until(lambda: [r for r in job.records("step_committed") if r["seq"] > resumed["seq"]], 120, "a step after the loss")
    assert again[0]["iteration"] == resumed["iteration"] + 1
    (job.run / "control" / "cancel").touch()
    assert job.wait(60)["state"] == "cancelled", job.story()
    assert accounting(job)["doubled"] == 0 and accounting(job)["lost"] == 0
    assert gone(job.cluster) == {}


def test_agents_sleep_when_there_is_nothing_to_do(minislurm, runs):
    """While no worker answers it looks about, in the midst of a move some hundred times a second, and does not spin. What
    a look costs in CPU time is the machine's affair."""
    patient = "task.verify_timeout_s=600", "failure.hang_s={environment: 600}"
    job = JobRun.submit(minislurm(nodes=2), runs, *LONG, *patient)
    job.until(lambda: job.records("iteration_started"), 120, "the first iteration")
    agents = [pid for pid, command in job.cluster.job_processes().items() if "-m dynarl.agent" in command and "srun" not in command]
    workers = [pid for pid, command in job.cluster.job_processes().items() if "dynarl.roles." in command]
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.0)
    before = [(wake_ups(pid), cpu_seconds(pid)) for pid in agents]
    time.sleep(5.0)
    after = [(wake_ups(pid), cpu_seconds(pid)) for pid in agents]
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    job.cluster.run(["scancel", job.job_id])
    assert len(agents) == 2
    for (woken, used), (woken_then, used_then) in zip(before, after, strict=True):
        assert woken_then - woken < 4000, f"an idle agent wakes up {(woken_then - woken) / 5:.0f} times a second"
        assert used_then - used < 1.0, f"an idle agent uses {20 * (used_then - used):.0f} % of a core"  # it spins


def set_time_limit(job: JobRun, minutes: int) -> None:
    job.cluster.run(["scontrol", "update", f"JobId={job.job_id}", f"TimeLimit={minutes}"])


def wake_ups(pid: int) -> int:
    """How often threads of `pid` have slept so far."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", text, re.MULTILINE)[1]) for text in texts)
