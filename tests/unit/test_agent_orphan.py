"""When an agent takes its controller for gone, and what it leaves in log and journal."""

import asyncio
import logging
import signal

import pytest

from dynarl import rundir
from dynarl.agent import orphan
from dynarl.agent.orphan import ControllerWatch
from dynarl.hypergraph.fold import fold
from dynarl.hypergraph.journal import Journal, read
from dynarl.slurm.fake import FakeClient


@pytest.fixture
def run(tmp_path):
    run = rundir.create(tmp_path, "demo")
    (run / "control").mkdir()
    journal = Journal(rundir.journal(run))
    journal.append("run_started", run=run.name, config={}, nodes=["n1", "n2"], job_id="1", attempt=1)
    journal.close()
    return run


def silence(monkeypatch, watch, at=None, heard=True):
    """Let the watch see silence until it gives up; `at`: {looks so far: what happens then}. Returns the looks."""
    looks = 0

    async def look(_):
        nonlocal looks
        looks += 1
        (at or {}).get(looks, lambda: None)()

    monkeypatch.setattr(orphan.asyncio, "sleep", look)
    if heard:
        watch.heard()
    asyncio.run(watch.until_gone())
    monkeypatch.undo()
    return looks


def test_a_silence_shorter_than_the_limit_is_nothing(run, monkeypatch):
    watch = ControllerWatch(rundir.journal(run))
    most = int(orphan.SILENCE_S / orphan.LOOK_S)
    looks = silence(monkeypatch, watch, {most: watch.heard, 2 * most: watch.heard})
    assert watch.gone and looks == 3 * most


def test_a_controller_that_never_spoke_is_not_one_that_is_gone(run, monkeypatch):
    watch = ControllerWatch(rundir.journal(run))
    silence(monkeypatch, watch, heard=False)
    assert not watch.gone


@pytest.mark.parametrize("look, runs_on", [(1, False), (4, True)])
def test_what_the_journal_gets_in_the_silence_is_from_a_controller_that_goes_on(run, monkeypatch, look, runs_on):
    """The last records of a dead one come with its last words; a living one notices the loss after 20 s."""
    watch = ControllerWatch(rundir.journal(run))

    def write():
        with open(rundir.journal(run), "a") as file:
            file.write("{}\n")

    silence(monkeypatch, watch, {look: write})
    assert watch.gone and watch.runs_on() is runs_on


def settle(run, monkeypatch, *options, max_requeues=20):
    slurm = FakeClient()
    slurm.submit(["sbatch", *options], {})
    slurm.set_state("1", "RUNNING")
    watch = ControllerWatch(rundir.journal(run))
    silence(monkeypatch, watch)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        for node in ("n2", "n3"):
            env = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-3]"}
            orphan.settle(slurm, run, node, max_requeues, watch, env)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return slurm


def test_log_and_journal_tell_that_the_job_was_requeued(run, monkeypatch, caplog):
    with caplog.at_level(logging.ERROR):
        slurm = settle(run, monkeypatch)
    assert slurm.jobs["1"].state == "PENDING"
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "the controller on n1 has not answered for 60 s: asked Slurm to requeue job 1",
        "the controller on n1 has not answered for 60 s: job 1 is PENDING already",
    ]
    ended = fold(read(rundir.journal(run))).ended
    assert (ended["state"], ended["exit_code"]) == ("requeued", 75)
    assert ended["reason"] == "the controller on n1 has not answered for 60 s: n2 asked Slurm to requeue job 1"


def test_a_run_whose_cancel_was_on_its_way_is_cancelled(run, monkeypatch):
    (run / "control" / "cancel").touch()
    assert settle(run, monkeypatch).jobs["1"].state == "CANCELLED"
    ended = fold(read(rundir.journal(run))).ended
    assert (ended["state"], ended["exit_code"]) == ("cancelled", 0)


def test_a_job_that_is_not_to_start_again_has_failed(run, monkeypatch):
    slurm = settle(run, monkeypatch, max_requeues=0)
    assert slurm.jobs["1"].state == "CANCELLED"
    ended = fold(read(rundir.journal(run))).ended
    assert (ended["state"], ended["exit_code"]) == ("failed", 1) and "cancelled job 1" in ended["reason"]
