import os
import pty
import select
import subprocess
import sys
import threading
import time

import pytest
from click.testing import CliRunner
from synthetic_run import SyntheticRun

from dynarl import rundir
from dynarl.cli import watch
from dynarl.report import run as run_module
from dynarl.report.run import RunView, State
from dynarl.report.watch_lines import Lines
from dynarl.report.watch_view import Screen, bar, draw, sparkline
from dynarl.slurm.client import JobInfo, Presence


@pytest.fixture
def synthetic(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNARL_RUNS", str(tmp_path))
    monkeypatch.setattr(watch, "POLL_S", 0.02)
    return SyntheticRun(tmp_path)


def view_of(synthetic):
    view = RunView(synthetic.run)
    view.poll()
    return view


def test_elsewhere_than_on_a_terminal_there_is_a_line_per_event_in_order(synthetic):
    synthetic.whole()
    result = CliRunner().invoke(watch.command, [])
    lines = [line[9:] for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    assert lines[0] == "started: job 4711, 4 nodes, attempt 1"
    assert lines[2] == "models are loaded: rollout n[1-2]  inference n3  training n4"
    assert lines[4] == "accuracy (start): 31.0% of 128 held-out"
    assert [line.split(":")[0] for line in lines[5:7]] == ["iteration 1 of 10", "iteration 2 of 10"]
    assert lines[-1] == "ended: completed"
    seconds = [line[:7] for line in result.stdout.splitlines()]
    assert seconds[-1].strip() == "1m06s"


def test_metrics_that_are_seen_before_the_journal_wait_for_it(synthetic):
    """On a shared file system one file may be there before the other."""
    synthetic.metrics(1, critic__rewards__mean=0.5)
    view = view_of(synthetic)
    lines = Lines(view)
    assert list(lines.take([])) == []
    synthetic.start()
    assert [line[9:].split(":")[0] for line in lines.take(view.poll())][-1] == "iteration 1 of 10"


def test_a_record_of_another_version_costs_its_line_only(synthetic):
    synthetic.start()
    synthetic.record("worker_died", node="n1")
    synthetic.record("resumed")
    synthetic.end()
    result = CliRunner().invoke(watch.command, [])
    assert result.exit_code == 0 and result.stdout.splitlines()[-1].endswith("ended: completed")


@pytest.mark.parametrize("state, code", [("completed", 0), ("failed", 1), ("cancelled", 1)])
def test_the_exit_code_tells_how_it_ended(synthetic, state, code):
    synthetic.start()
    synthetic.end(state, "because")
    assert CliRunner().invoke(watch.command, []).exit_code == code


def test_it_waits_for_the_run_to_start_and_stays_over_a_requeue(synthetic, monkeypatch):
    rundir.add_job(synthetic.run, 4711)
    asked = threading.Event()

    def ask_slurm(job):
        asked.set()
        return JobInfo(job, Presence.PRESENT, "PENDING", detail="Resources")

    monkeypatch.setattr(run_module, "ask_slurm", ask_slurm)
    synthetic.speed = 1000  # real time stamps

    def write():
        asked.wait()
        synthetic.start()
        synthetic.end("requeued", "time limit near")
        time.sleep(0.1)
        synthetic.start()
        synthetic.record("resumed", iteration=0, checkpoint=None)
        synthetic.end()

    writer = threading.Thread(target=write)
    writer.start()
    result = CliRunner().invoke(watch.command, [])
    writer.join()
    lines = [line[9:] if line.startswith(" ") else line for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    assert lines[0] == "pending: Slurm: PENDING (Resources)"
    assert lines.count("ended: requeued (time limit near)") == 1
    assert "goes on after iteration 0" in lines and lines[-1] == "ended: completed"


def test_a_run_that_got_lost_ends_the_watch(synthetic, monkeypatch):
    synthetic.start()  # its clock is far in the past
    monkeypatch.setattr(run_module, "ask_slurm", lambda job: JobInfo(job, Presence.ABSENT))
    result = CliRunner().invoke(watch.command, [])
    assert result.exit_code == 1
    assert "lost: the journal has been silent" in result.stdout


def test_slurm_is_asked_once_in_a_while_only(synthetic, monkeypatch):
    asked = []
    monkeypatch.setattr(
        run_module, "ask_slurm", lambda job: asked.append(job) or JobInfo(job, Presence.PRESENT, "RUNNING")
    )
    ask = watch._politely()
    assert [ask("7").state for _ in range(5)] == ["RUNNING"] * 5
    assert asked == ["7"]


@pytest.mark.parametrize("width, height", [(40, 12), (80, 24), (200, 60)])
@pytest.mark.parametrize("nodes", [1, 4, 100])
def test_the_view_fits_the_terminal(tmp_path, width, height, nodes):
    synthetic = SyntheticRun(tmp_path, nodes=nodes, iterations=3)
    synthetic.start()
    synthetic.iteration(1)
    synthetic.record("worker_died", node="n1", role="rollout", device=0, attempt=1, status="killed by SIGKILL", tail=[])
    text = draw(
        view_of(synthetic), State("running"), synthetic.t, Screen(width, height, colour=False, fancy=False)
    ).plain
    assert text.isascii()
    assert len(text.splitlines()) < height
    assert all(len(line) <= width for line in text.splitlines()[:-1])


def test_the_view_shows_what_matters(synthetic):
    synthetic.start()
    synthetic.evaluate("start", 0, 0.31)
    for number in (1, 2, 3):
        synthetic.iteration(number)
    synthetic.record("worker_died", node="n1", role="rollout", device=0, attempt=1, status="killed by SIGKILL", tail=[])
    text = draw(view_of(synthetic), State("running"), synthetic.t, Screen(120, 50, colour=False, fancy=True)).plain
    for part in (
        "running, after iteration 3",
        "job 4711",
        "3 of 10",
        "R rollout 2 n[1-2]",
        "31.0% (start)",
        "6 committed, 0 cancelled",
        "n1 training → rollout",
        "died: rollout worker 0 on n1: killed by SIGKILL",
        "Ctrl-C",
    ):
        assert part in text


def test_a_run_without_a_record_can_be_drawn(synthetic):
    text = draw(
        view_of(synthetic), State("pending", "Slurm: PENDING (Priority)"), 0.0, Screen(80, 24, True, True)
    ).plain
    assert "pending" in text and "Priority" in text


def test_warm_start_has_a_bar_of_its_own(synthetic):
    synthetic.config["warm_start"] = {"steps": 40}
    synthetic.start()
    synthetic.metrics(0, warm_start__step=10, warm_start__loss=1.5)
    text = draw(view_of(synthetic), State("running"), synthetic.t, Screen(100, 40, False, False)).plain
    assert "10 of 40, loss 1.500" in text and "running, warm start" in text


def test_sparklines_and_bars():
    assert sparkline([0, 1, 2, 7], 10, True) == "▁▂▃█"
    assert sparkline([5, 5, 5], 10, False) == "___"
    assert sparkline([9, 0, 1, 2, 3], 4, False) == "_-*@"
    assert bar(1, 4, 8, False) == "##......"
    assert bar(9, 4, 4, False) == "####"
    assert bar(0, 0, 4, False) == "...."


def test_on_a_terminal_the_view_is_redrawn_and_left_in_its_last_state(synthetic):
    synthetic.speed = 1000
    synthetic.start()
    main, side = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    code = "from dynarl.cli import watch; watch.POLL_S = 0.05; watch.command()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=side, stderr=side, stdin=side, env=environment)
    os.close(side)
    output = b""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if select.select([main], [], [], 0.1)[0]:
            try:
                output += os.read(main, 65536)
            except OSError:  # what Linux says when the other side is closed
                break
        if b"running" in output and synthetic.seq < 20:
            synthetic.end()
            synthetic.seq = 20
    os.close(main)
    assert process.wait(60) == 0
    assert b"\x1b[" in output
    assert b"completed" in output and b"results:" in output
