import json

import pytest
from click.testing import CliRunner
from synthetic_run import SyntheticRun

from dynarl import rundir
from dynarl.cli.status import command
from dynarl.hypergraph.fold import fold
from dynarl.hypergraph.journal import read
from dynarl.report import run as run_module
from dynarl.report.run import RunView
from dynarl.slurm.client import JobInfo, Presence


def never(job_id):
    raise AssertionError("Slurm was asked though the journal says enough")


def answer(presence, state=None, detail=""):
    return lambda job_id: JobInfo(job_id, presence, state, detail=detail)


PRESENT, ABSENT, UNKNOWN = Presence.PRESENT, Presence.ABSENT, Presence.UNKNOWN


@pytest.fixture
def synthetic(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNARL_RUNS", str(tmp_path))
    monkeypatch.setattr(run_module, "ask_slurm", never)
    return SyntheticRun(tmp_path)


def state_of(synthetic, slurm, now):
    view = RunView(synthetic.run)
    view.poll()
    return view.state(slurm, now)


def invoke(*args):
    return CliRunner().invoke(command, args)


def test_the_names_that_scripts_rely_on_are_there(synthetic):
    synthetic.whole()
    found = json.loads(invoke("last", "-o", "json").stdout)
    assert {
        "schema": 1,
        "run": synthetic.run.name,
        "state": "completed",
        "iterations": 10,
        "nodes": 4,
    }.items() <= found.items()
    assert (found["eval"]["start"], found["eval"]["end"]) == (0.31, 0.74)
    assert found["samples"] == {"trained": 320, "lost": 0, "doubled": 0}
    moves = found["moves"]
    assert (moves["committed"], moves["cancelled"], moves["into_training_iterations"]) == (20, 2, 10)
    assert moves["median_pause_ms"] == pytest.approx(fold(read(rundir.journal(synthetic.run))).median_pause_ms)
    assert (found["job_id"], found["attempt"], found["problems"]) == ("4711", 1, [])
    assert found["metrics"]["step"] == 10
    assert found["logs"] == str(rundir.logs(synthetic.run, 1))


def test_lost_samples_show_in_the_status(synthetic):
    synthetic.start()
    synthetic.iteration(1, drop=2)
    synthetic.end("failed", "no more nodes", 1)
    found = json.loads(invoke("-o", "json").stdout)
    assert found["samples"] == {"trained": 30, "lost": 2, "doubled": 0}
    assert (found["state"], found["reason"], found["exit_code"]) == ("failed", "no more nodes", 1)
    assert "2 samples of finished iterations are in no optimizer step" in invoke().stdout


def test_a_run_that_has_only_been_submitted_has_a_status(synthetic, monkeypatch):
    rundir.add_job(synthetic.run, 99)
    monkeypatch.setattr(run_module, "ask_slurm", answer(PRESENT, "PENDING", "Priority"))
    found = json.loads(invoke("-o", "json").stdout)
    assert (found["state"], found["reason"], found["job_id"]) == ("pending", "Slurm: PENDING (Priority)", "99")
    assert (found["iterations"], found["iterations_total"], found["eval"]["start"]) == (0, None, None)
    assert "pending" in invoke().stdout


def test_a_job_that_ended_before_its_controller_says_where_to_look(synthetic):
    rundir.add_job(synthetic.run, 99)
    found = state_of(synthetic, answer(PRESENT, "FAILED"), now=synthetic.t)
    assert found.name == "lost" and f"Not even its output is in {synthetic.run}" in found.reason
    (synthetic.run / "slurm-99.out").write_text("dynarl.slurm: cannot import dynarl\n")
    found = state_of(synthetic, answer(PRESENT, "FAILED"), now=synthetic.t)
    assert "job 99 is FAILED" in found.reason and f"What it said is in {synthetic.run}/slurm-99.out" in found.reason


@pytest.mark.parametrize(
    "slurm, state, reason",
    [
        (answer(PRESENT, "RUNNING"), "running", "silent for 100 s; Slurm: RUNNING"),
        (answer(PRESENT, "PENDING"), "requeued", "PENDING"),
        (answer(ABSENT), "lost", "does not know job 4711 any more"),
        (answer(PRESENT, "NODE_FAIL"), "lost", "job 4711 is NODE_FAIL"),
        (answer(PRESENT, "CANCELLED"), "cancelled", "was cancelled"),
        (answer(UNKNOWN, detail="squeue is not on the PATH"), "unknown", "squeue is not on the PATH"),
    ],
)
def test_when_the_journal_is_silent_slurm_decides(synthetic, slurm, state, reason):
    synthetic.start()
    found = state_of(synthetic, slurm, now=synthetic.t + 100)
    assert found.name == state and reason in found.reason


def test_while_the_journal_is_fresh_or_has_ended_slurm_is_not_asked(synthetic):
    synthetic.start()
    assert state_of(synthetic, never, now=synthetic.t + 5).name == "running"
    synthetic.end("completed")
    assert state_of(synthetic, never, now=synthetic.t + 1e6).name == "completed"


@pytest.mark.parametrize(
    "slurm, state",
    [
        (answer(PRESENT, "COMPLETING"), "requeued"),
        (answer(PRESENT, "PENDING"), "requeued"),
        (answer(PRESENT, "RUNNING"), "running"),
        (answer(ABSENT), "lost"),
        (answer(UNKNOWN), "requeued"),
    ],
)
def test_a_requeued_run_is_where_slurm_has_it(synthetic, slurm, state):
    synthetic.start()
    synthetic.end("requeued", "time limit near", 75)
    assert state_of(synthetic, slurm, now=synthetic.t).name == state


def test_a_run_that_waits_to_start_again_says_why(synthetic):
    synthetic.start()
    synthetic.end("requeued", "the controller on n1 has not answered for 60 s", 75)
    found = state_of(synthetic, answer(PRESENT, "PENDING", "BeginTime"), now=synthetic.t)
    assert found.reason == "the controller on n1 has not answered for 60 s; Slurm: PENDING (BeginTime)"


@pytest.mark.parametrize(
    "slurm, state",
    [
        (answer(PRESENT, "PENDING"), "requeued"),
        (answer(PRESENT, "RUNNING"), "running"),
        (answer(ABSENT), "failed"),
        (answer(UNKNOWN), "failed"),
    ],
)
def test_a_job_that_resumes_an_ended_run_counts_before_it_has_written(synthetic, slurm, state):
    synthetic.start()
    synthetic.end("failed", "x", 1)
    rundir.add_job(synthetic.run, 4712)
    assert state_of(synthetic, slurm, now=synthetic.t).name == state


def test_without_a_job_nothing_can_be_told(synthetic):
    assert state_of(synthetic, never, now=0).name == "unknown"


def test_a_squeue_that_hangs_is_left_after_its_time(tmp_path, monkeypatch):
    (tmp_path / "squeue").write_text("#!/bin/sh\nsleep 60\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(run_module, "SLURM_TIMEOUT_S", 0.2)
    info = run_module.ask_slurm("7")
    assert (info.presence, info.detail) == (UNKNOWN, "squeue did not answer within 0.2 s")


@pytest.mark.parametrize(
    "script, presence",
    [
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", ABSENT),
        ("echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1", UNKNOWN),
        ("echo '7|RUNNING|n[1-2]|None|demo'", PRESENT),
    ],
)
def test_an_outage_is_told_from_an_absent_job_at_the_first_answer(tmp_path, monkeypatch, script, presence):
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho called >> {tmp_path}/calls\n{script}\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert run_module.ask_slurm("7").presence is presence
    assert (tmp_path / "calls").read_text() == "called\n"


@pytest.mark.parametrize("state, code", [("completed", 0), ("failed", 1), ("cancelled", 1)])
def test_quiet_answers_by_code_alone(synthetic, state, code):
    synthetic.start()
    synthetic.end(state)
    result = invoke("--quiet")
    assert (result.exit_code, result.output) == (code, "")


def test_a_selector_that_names_no_run_ends_with_5(synthetic):
    result = invoke("nothing-like-it", "-o", "json")
    assert result.exit_code == 5
    assert json.loads(result.stdout)["error"]["kind"] == "RunNotFound"


def test_a_piped_status_keeps_paths_in_one_piece(synthetic):
    synthetic.start()
    synthetic.end()
    assert f"logs          {rundir.logs(synthetic.run, 1)}\n" in invoke().stdout
