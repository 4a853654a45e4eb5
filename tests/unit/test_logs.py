import os
import threading
import time

import pytest
from click.testing import CliRunner
from synthetic_run import SyntheticRun

from dynarl import rundir
from dynarl.cli import logs
from dynarl.cli.logs import command
from dynarl.report.logs import Merged, source, sources


@pytest.fixture
def synthetic(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNARL_RUNS", str(tmp_path))
    synthetic = SyntheticRun(tmp_path)
    synthetic.start()
    return synthetic


def shown(*args):
    result = CliRunner().invoke(command, args)
    assert result.exit_code == 0, result.output
    return [line.split(" │ ", 1)[1] for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    "file, name, role, node",
    [
        ("controller.log", "controller", "controller", None),
        ("gpu-a-1-agent.log", "gpu-a-1 agent", "agent", "gpu-a-1"),
        ("gpu-rollout-2-training-11.1.log", "gpu-rollout-2 training/11", "training", "gpu-rollout-2"),
        ("n1-environment-0.3.log", "n1 environment/0.3", "environment", "n1"),
    ],
)
def test_a_file_is_known_by_its_name(tmp_path, file, name, role, node):
    found = source(tmp_path / file)
    assert (found.name, found.role, found.node) == (name, role, node)


def test_lines_are_merged_by_time_and_those_without_one_stay_behind_theirs(synthetic):
    directory = rundir.logs(synthetic.run, 1)
    for path in directory.iterdir():
        path.unlink()
    (directory / "controller.log").write_text("2026-01-01 00:00:01,000 one\n2026-01-01 00:00:03,000 three\nTraceback\n")
    (directory / "n1-agent.log").write_text("2026-01-01 00:00:02,000 two\n2026-01-01 00:00:04,000 four\n")
    (directory / "n2-training-0.1.log").write_text("no stamp at all\n")
    stamp = time.mktime((2026, 1, 1, 0, 0, 2, 0, 0, -1)) + 0.5
    os.utime(directory / "n2-training-0.1.log", (stamp, stamp))
    assert [line[-5:] for line in shown()] == ["0 one", "0 two", "t all", "three", "eback", " four"]


def test_role_node_and_number_choose(synthetic):
    assert all("n2" in line for line in shown("--node", "n2")) and len(shown("--node", "n2")) == 3
    assert shown("--node", "n2", "--role", "training") == shown("--node", "n2")[-1:]
    assert len(shown("-n", "all")) > len(shown("-n", "4")) == 4
    files = CliRunner().invoke(command, ["--node", "n1", "--files"]).stdout.split()
    assert [os.path.basename(f) for f in files] == ["n1-agent.log", "n1-rollout-0.1.log", "n1-training-0.1.log"]


def test_the_newest_attempt_is_shown_unless_another_is_asked_for(synthetic):
    synthetic.log(rundir.controller_log(synthetic.run, 1), "first try")
    synthetic.start()
    assert not any("first try" in line for line in shown("--role", "controller"))
    assert any("first try" in line for line in shown("--role", "controller", "--attempt", "1"))


def test_what_slurm_says_is_there_but_the_controllers_lines_are_not_doubled(synthetic):
    text = rundir.controller_log(synthetic.run, 1).read_text()
    rundir.batch_output(synthetic.run, 4711).write_text(text + "srun: error: n2: task 1: Killed\n")
    lines = shown("-n", "all")
    assert lines.count("srun: error: n2: task 1: Killed") == 1
    assert sum("all agents are up" in line for line in lines) == 1


def test_an_attempt_has_the_output_of_its_own_job(synthetic):
    synthetic.start(4712)
    rundir.add_job(synthetic.run, 4712)
    for job in (4711, 4712):
        rundir.batch_output(synthetic.run, job).write_text(f"srun: error of {job}\n")
    for arguments, line in ((["--attempt", "1"], "srun: error of 4711"), (["--attempt", "2"], "srun: error of 4712"),
                            ([], "srun: error of 4712")):  # fmt: skip
        assert shown("--role", "batch", *arguments) == [line]


def test_what_does_not_fit_is_answered_with_what_there_is(synthetic):
    rundir.batch_output(synthetic.run, 4711).write_text("srun: error\n")
    for args, text in ((["--node", "n9"], "nodes n1, n2, n3, n4"), (["--attempt", "7"], "no attempt 7; it has 1")):
        result = CliRunner().invoke(command, args)
        assert result.exit_code == 5 and text in result.stderr
    assert CliRunner().invoke(command, ["-n", "some"]).exit_code == 2


def test_following_shows_new_lines_of_new_files_and_ends_with_the_run(synthetic, monkeypatch):
    monkeypatch.setattr("dynarl.cli.logs.POLL_S", 0.02)
    follows = threading.Event()
    follow = logs._follow
    monkeypatch.setattr(logs, "_follow", lambda *args: (follows.set(), follow(*args)))

    def write():
        follows.wait()
        synthetic.log(rundir.logs(synthetic.run, 1) / "n9-rollout-0.2.log", "late line")
        synthetic.end()

    writer = threading.Thread(target=write)
    writer.start()
    lines = shown("-f", "-n", "1")
    writer.join()
    assert len(lines) == 2 and lines[-1].endswith("late line")


def test_reading_again_gives_only_what_came_since(synthetic):
    merged = Merged()
    merged.add(sources(synthetic.run, role="controller"))
    assert len(list(merged)) == 1
    synthetic.log(rundir.controller_log(synthetic.run, 1), "more")
    merged.add(sources(synthetic.run, role="controller"))
    assert [line.split()[-1] for _, line in merged] == ["more"]
