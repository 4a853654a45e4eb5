"""A whole job whose answers come from SGLang, on a real Slurm of two nodes that both generate at first."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

import pytest

pytest.importorskip("torch")
pytest.importorskip("mpi4py")

import sglang_environment  # noqa: E402
from job_harness import ROOT, JobRun, gone, kill  # noqa: E402

from dynarl.hypergraph.fold import fold  # noqa: E402
from dynarl.report.metrics import MetricsReader  # noqa: E402

pytestmark = sglang_environment.NEEDED

CONFIG = ROOT / "configs" / "jobs" / "arithmetic-sglang.yaml"
# A server starts in half a minute where nothing else runs; two of them, on two busy cores, take minutes.
START_S = 600


def submit(cluster, runs, *overrides: str) -> JobRun:
    return JobRun.submit(cluster, runs, f"rollout.python={sglang_environment.PYTHON}", *overrides, config=CONFIG)


def log(job: JobRun, node: str) -> str:
    """Everything that the node's rollout workers and their servers have said."""
    return "\n".join(path.read_text() for path in sorted(job.run.glob(f"logs/*/{node}-rollout-0.*.log")))


def servers(job: JobRun) -> dict[int, str]:
    """The SGLang processes of the job: servers, schedulers, detokenizers."""
    names = ("dynarl.roles.rollout.sglang_server", "sglang::", "multiprocessing.spawn")
    return {pid: command for pid, command in job.cluster.job_processes().items() if any(name in command for name in names)}


@pytest.fixture(scope="module")
def finished(minislurm, tmp_path_factory) -> Iterator[JobRun]:
    """A job of three iterations in which a node leaves as soon as some answers are there. Few fit at a time, so that it has
    others half done then, and more are waiting."""
    job = submit(minislurm(nodes=2), tmp_path_factory.mktemp("sglang") / "runs", "run.iterations=3", "policy.threshold=56",
                 "policy.dwell_s=0.05", "rollout.max_running=8")
    job.wait(START_S + 120)
    yield job


def test_it_completes_and_trains_every_sample_once(finished):
    ended = finished.records("run_ended")[-1]
    assert (ended["state"], ended["exit_code"]) == ("completed", 0), finished.story()
    assert asdict(fold(finished.records()).samples.tally()) == {"trained": 3 * 64, "lost": 0, "doubled": 0}
    assert finished.records("worker_died") == []
    assert gone(finished.cluster) == {}


def test_weights_are_updated_in_place_in_each_iteration_on_both_nodes(finished):
    versions = [record["version"] for record in finished.records("iteration_started")]
    assert len(versions) == 3 and versions == sorted(set(versions))
    for node in ("n1", "n2"):
        said = log(finished, node)
        assert said.count("engine started with weights of") == 1
        assert [v for v in versions if f"weights updated in place to version {v} in" not in said] == []


def test_the_trainer_agrees_with_the_engine_on_what_a_token_was_worth(finished):
    """Compared are tokens of all versions, and of answers that went on elsewhere."""
    reader = MetricsReader(finished.run)
    reader.poll()
    differences = [value for _, value in reader.series("training/rollout_probs_diff_mean")]
    assert len(differences) == 3 and max(differences) < 1e-4


def test_a_node_goes_into_training_and_its_half_done_answers_go_on_at_the_other(finished):
    committed = [r for r in finished.records("epoch_committed") if r.get("given_up")]
    leavers = {move["node"] for record in committed for move in record["moves"] if move["source"] == "rollout"}
    assert any(move["target"] == "training" for record in finished.records("epoch_committed") for move in record["moves"])
    assert leavers, "no node has left with answers half done"
    resumed = {node: sum(map(int, re.findall(r"(\d+) were begun elsewhere", log(finished, node)))) for node in ("n1", "n2")}
    assert sum(resumed[node] for node in ("n1", "n2") if {node} != leavers) > 0, resumed


@pytest.fixture
def running(minislurm, tmp_path) -> JobRun:
    job = submit(minislurm(nodes=2), tmp_path / "runs", "run.iterations=100000", "warm_start.steps=2", "task.eval_size=0")
    job.until(lambda: len(job.records("step_committed")) >= 1, START_S, "the first iteration")
    return job


def test_a_server_that_dies_costs_its_worker_and_not_the_job_and_scancel_leaves_none(running):
    job = running
    scheduler = next(pid for pid, command in job.cluster.job_processes("n2").items() if "sglang::scheduler" in command)
    server = os.getsid(scheduler)
    kill(scheduler)  # as when memory runs out; the server notices, and ends itself after some seconds
    (died,) = job.until(lambda: job.records("worker_died"), 20, "the worker's end is in the journal")
    assert (died["node"], died["role"], died["status"]) == ("n2", "rollout", "exit status 72")
    assert "the SGLang server has ended" in died["tail"][-1]
    job.until(lambda: "engine started" in log(job, "n2").partition("SGLang server has ended")[2], START_S, "its second start")
    steps = len(job.records("step_committed"))
    job.until(lambda: len(job.records("step_committed")) >= steps + 2, 120, "two iterations more")
    tally = fold(job.records()).samples.tally()
    assert (tally.lost, tally.doubled) == (0, 0) and len(job.records("step_launched")) == 1
    sessions = Counter(os.getsid(pid) for pid in servers(job))
    assert len(sessions) == 2 and server not in sessions and min(sessions.values()) >= 3
    job.cluster.run(["scancel", job.job_id])
    assert gone(job.cluster) == {}


def test_scancel_while_servers_start_leaves_no_process(minislurm, tmp_path):
    job = submit(minislurm(nodes=2), tmp_path / "runs")
    job.until(lambda: len(servers(job)) >= 2, START_S, "servers are on their way")
    time.sleep(3.0)
    job.cluster.run(["scancel", job.job_id])
    assert gone(job.cluster) == {}
