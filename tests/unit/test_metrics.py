import builtins
import logging
import os
import subprocess
import sys

import pytest

from dynarl import rundir
from dynarl.controller.trace import Trace
from dynarl.report.metrics import MetricsReader, MetricsWriter
from dynarl.sim import calibrate


@pytest.fixture
def run(tmp_path):
    return rundir.create(tmp_path, "run")


def test_steps_are_read_back_with_their_newest_values(run):
    writer = MetricsWriter(run)
    writer.log(1, {"critic/rewards/mean": 0.25, "actor/grad_norm": 2})
    writer.log(2, {"critic/rewards/mean": float("nan")})
    writer.log(2, {"val/accuracy": 0.5})
    reader = MetricsReader(run)
    reader.poll()
    assert reader.steps[2] == {"critic/rewards/mean": None, "val/accuracy": 0.5}
    assert reader.series("critic/rewards/mean") == [(1, 0.25)]
    assert reader.last()["actor/grad_norm"] == 2.0
    writer.log(3, {"val/accuracy": 0.75})
    reader.poll()
    assert reader.series("val/accuracy") == [(2, 0.5), (3, 0.75)]


def test_a_resumed_run_replaces_the_steps_it_takes_again(run):
    first = MetricsWriter(run)
    for step in (1, 2, 3):
        first.log(step, {"loss": float(step)})
    second = MetricsWriter(run, resume_step=2)
    second.log(2, {"loss": 20.0})
    reader = MetricsReader(run)
    reader.poll()
    assert reader.series("loss") == [(1, 1.0), (2, 20.0)]


def test_a_line_cut_short_by_a_crash_costs_that_line_only(run):
    rundir.metrics(run).write_bytes(b'{"step":1,"t":0,"data":{"loss":1.0}}\n{"step":2,"t":0,"da')
    MetricsWriter(run).log(3, {"loss": 3.0})
    reader = MetricsReader(run)
    reader.poll()
    assert reader.series("loss") == [(1, 1.0), (3, 3.0)]


def test_without_the_package_json_lines_are_written_and_it_is_said_once(run, monkeypatch, caplog):
    real = builtins.__import__

    def refuse(name, *rest):
        if name.startswith(("tensorboard", "dynarl.report.tensorboard")):
            raise ImportError("No module named 'tensorboard'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with caplog.at_level(logging.INFO):
        writer = MetricsWriter(run)
        writer.log(1, {"loss": 1.0})
        writer.log(2, {"loss": 2.0})
    assert len([r for r in caplog.records if "tensorboard" in r.getMessage().lower()]) == 1
    assert rundir.metrics(run).read_text().count("\n") == 2
    assert not rundir.tensorboard(run).exists()


def scalars(run):
    accumulator_module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = accumulator_module.EventAccumulator(str(rundir.tensorboard(run)))
    accumulator.Reload()
    return [(e.step, e.value) for e in accumulator.Scalars("loss")]


def test_tensorboard_sees_the_same_values_and_forgets_what_was_taken_again(run):
    pytest.importorskip("tensorboard")
    first = MetricsWriter(run)
    for step in (1, 2, 3):
        first.log(step, {"loss": step / 2})
    first.close()
    assert scalars(run) == [(1, 0.5), (2, 1.0), (3, 1.5)]
    second = MetricsWriter(run, resume_step=2)
    second.log(2, {"loss": 8.0})
    second.close()
    assert scalars(run) == [(1, 0.5), (2, 8.0)]


def test_writing_metrics_loads_no_tensor_library(run):
    pytest.importorskip("tensorboard")
    code = (
        "import sys, pathlib; from dynarl.report.metrics import MetricsWriter;"
        "w = MetricsWriter(pathlib.Path(sys.argv[1]));"
        "w.log(1, {'a': 1}); w.close(); print(*[m for m in ('torch', 'tensorflow', 'jax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_trace_that_is_full_makes_room_for_newer_iterations(run, monkeypatch):
    def line(iteration):
        facts = {"policy": "static", "roles": {}, "step_s": [], "sync_s": 0.0, "seconds": 1.0, "switches": []}
        return Trace().line(iteration=iteration, **facts)

    monkeypatch.setattr("dynarl.report.metrics.TRACE_BYTES", 2 * len(line(1)) + 1)
    writer = MetricsWriter(run)
    for iteration in range(1, 9):
        writer.trace(line(iteration))
        kept = [each.iteration for each in calibrate.read(run)]
        assert kept == list(range(kept[0], iteration + 1)) and 3 <= len(kept) + 3 - min(iteration, 3) <= 6
        assert rundir.trace(run).exists() + rundir.older_trace(run).exists() <= 2
    writer.close()


@pytest.mark.parametrize("write", [lambda writer: writer.trace(b'{"iteration":1}\n'), lambda writer: writer.log(1, {"loss": 1.0})])
def test_a_line_that_does_not_fit_the_disk_is_an_error(run, monkeypatch, write):
    writer, whole = MetricsWriter(run), os.write
    monkeypatch.setattr("os.write", lambda fd, data: whole(fd, data[:5]))
    with pytest.raises(OSError, match=r"\.jsonl: only 5 of \d+ bytes were written"):
        write(writer)
    writer.close()


def test_the_trace_is_for_its_owner_only(run):
    MetricsWriter(run).trace(b"{}\n")
    assert rundir.trace(run).stat().st_mode & 0o777 == 0o600 and rundir.trace(run).read_bytes() == b"{}\n"


def test_a_line_of_the_trace_that_was_cut_short_spoils_no_other(run):
    rundir.trace(run).write_bytes(b'{"iteration":1,"answ')
    MetricsWriter(run).trace(b'{"iteration":2}\n')
    assert rundir.trace(run).read_bytes().splitlines()[1:] == [b'{"iteration":2}']
