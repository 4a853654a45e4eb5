import os
import stat

import pytest

from dynarl import rundir
from dynarl.rundir import RunNotFound


@pytest.fixture
def root(tmp_path):
    return tmp_path / "runs"


def some_runs(root, *names):
    for name in names:
        (root / name).mkdir(parents=True)


def test_the_root_is_the_configs_then_the_environments_then_the_homes(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DYNARL_RUNS", raising=False)
    assert rundir.runs_root() == tmp_path / "dynarl-runs"
    monkeypatch.setenv("DYNARL_RUNS", "/scratch/runs")
    assert str(rundir.runs_root()) == "/scratch/runs"
    assert rundir.runs_root("~/mine") == tmp_path / "mine"


def test_two_runs_of_one_second_get_directories_of_their_own(root, monkeypatch):
    monkeypatch.setattr(rundir.time, "strftime", lambda form: "20260131-120000")
    names = [rundir.create(root, "job").name for _ in range(3)]
    assert names == ["job-20260131-120000", "job-20260131-120000-2", "job-20260131-120000-3"]


def test_only_the_owner_can_look_into_keys(root):
    run = rundir.create(root, "job")
    assert stat.S_IMODE(os.stat(rundir.keys(run)).st_mode) == 0o700


def test_latest_is_swapped_and_leaves_nothing_behind(root):
    first, second = rundir.create(root, "a"), rundir.create(root, "b")
    rundir.set_latest(first)
    rundir.set_latest(second)
    assert os.readlink(root / "latest") == second.name
    assert sorted(p.name for p in root.iterdir()) == sorted(["latest", first.name, second.name])


def test_last_is_what_latest_names_and_else_the_newest(root):
    some_runs(root, "b-20260101-000000", "a-20260102-000000", "a-20260102-000000-10", "a-20260102-000000-9")
    assert rundir.resolve("last", root).name == "a-20260102-000000-10"
    rundir.set_latest(root / "b-20260101-000000")
    assert rundir.resolve("last", root).name == "b-20260101-000000"
    os.rename(root / "b-20260101-000000", root / "gone")
    assert rundir.resolve("last", root).name == "a-20260102-000000-10"


def test_a_run_goes_by_its_id_a_unique_prefix_a_job_or_a_path(root):
    some_runs(root, "math-20260101-000000", "math-20260101-000000-2", "code-20260101-000000")
    rundir.add_job(root / "code-20260101-000000", 412)
    (root / "math-20260101-000000-2" / "slurm-413.out").touch()
    rundir.journal(root / "code-20260101-000000").touch()
    found = {s: rundir.resolve(s, root).name for s in ("math-20260101-000000", "co", "412", "413")}
    assert found == {
        "math-20260101-000000": "math-20260101-000000",
        "co": "code-20260101-000000",
        "412": "code-20260101-000000",
        "413": "math-20260101-000000-2",
    }
    assert rundir.resolve(str(root / "code-20260101-000000")).name == "code-20260101-000000"


def test_what_names_no_run_is_answered_with_the_near_ones(root):
    with pytest.raises(RunNotFound, match="DYNARL_RUNS"):
        rundir.resolve("last", root)
    some_runs(root, "math-20260101-000000", "math-20260102-000000", "code-20260101-000000")
    with pytest.raises(RunNotFound, match="near: code-20260101-000000"):
        rundir.resolve("cod-20260101-000000", root)
    with pytest.raises(RunNotFound, match="start of 2 runs.*math-20260102-000000, math-20260101-000000"):
        rundir.resolve("math", root)
    with pytest.raises(RunNotFound, match="newest: .*math-20260102"):
        rundir.resolve("999", root)
    with pytest.raises(RunNotFound, match="neither config.yaml nor journal.jsonl"):
        rundir.resolve(str(root / "math-20260101-000000"))


def test_of_several_jobs_of_a_run_the_order_is_that_of_their_start(root):
    run = rundir.create(root, "a")
    (run / "slurm-100.out").touch()
    (run / "slurm-99.out").touch()
    assert rundir.job_ids(run) == ["99", "100"]
    rundir.add_job(run, 100)
    rundir.add_job(run, 98)
    assert rundir.job_ids(run) == ["100", "98", "99"]


def test_attempts_count_from_one(root):
    run = rundir.create(root, "a")
    assert [rundir.new_attempt(run) for _ in range(11)][-1] == 11
    assert rundir.attempts(run) == list(range(1, 12))


def test_only_a_checkpoint_with_its_marker_counts(root):
    run = rundir.create(root, "a")
    assert rundir.newest_checkpoint(run) is None
    for iteration in (5, 10, 1_000_000, 1_000_005):
        rundir.checkpoint(run, iteration).mkdir()
    for iteration in (5, 10, 1_000_000):
        rundir.mark_complete(rundir.checkpoint(run, iteration))
    assert rundir.newest_checkpoint(run) == run / "checkpoints/step-1000000"
    assert rundir.checkpoint_iteration(rundir.newest_checkpoint(run)) == 1_000_000


def test_pruning_keeps_the_newest_and_what_is_still_being_written(root):
    run = rundir.create(root, "a")
    for iteration in (1, 2, 3, 4):
        rundir.checkpoint(run, iteration).mkdir()
    for iteration in (1, 2, 3):
        rundir.mark_complete(rundir.checkpoint(run, iteration))
    assert [p.name for p in rundir.prune_checkpoints(run, keep=2)] == ["step-000001"]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000002", "step-000003", "step-000004"]
