import pytest

from dynarl import rundir
from dynarl.cli.cancel import FORCED_END_S, cancel
from dynarl.errors import NotFoundError, SlurmError, WaitTimeout
from dynarl.slurm.client import TransientError
from dynarl.slurm.fake import FakeClient


class Time:
    """A clock that only `sleep` moves; `then` maps a time to what happens at it."""

    def __init__(self, then=()):
        self.now, self.then = 0.0, dict(then)

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        for when in [when for when in self.then if when <= self.now]:
            self.then.pop(when)()


@pytest.fixture
def run(tmp_path):
    path = rundir.create(tmp_path, "x")
    rundir.add_job(path, "1")
    return path


def with_job(state="RUNNING", **options):
    slurm = FakeClient(**options)
    slurm.submit(["sbatch"], {})
    slurm.set_state("1", state)
    return slurm


def end(slurm, run, grace_s, time):
    return cancel(slurm, run, grace_s, sleep=time.sleep, clock=time.clock)


def knocks(slurm):
    return [call[2:] for call in slurm.calls if call[0] == "cancel"]


def asked(run):
    return (run / "control" / "cancel").exists()


def test_a_run_that_reacts_ends_without_any_signal(run):
    slurm = with_job()
    time = Time({3: lambda: slurm.set_state("1", "COMPLETED")})
    assert end(slurm, run, 60, time) == ("graceful", "1")
    assert asked(run) and knocks(slurm) == [] and time.now < 4


def test_where_the_file_is_not_seen_usr1_follows_to_the_batch_shell_alone(run):
    slurm = with_job(on_signal={"USR1": "COMPLETED"})
    time = Time()
    assert end(slurm, run, 60, time) == ("graceful", "1")
    assert knocks(slurm) == [("USR1", True)] and 30 <= time.now < 32


def test_a_run_that_hangs_is_ended_by_force_after_the_grace_time(run):
    slurm = with_job()
    time = Time()
    assert end(slurm, run, 60, time) == ("forced", "1")
    assert knocks(slurm) == [("USR1", True), (None, False)] and 60 <= time.now < 63


def test_now_means_now(run):
    slurm = with_job()
    assert end(slurm, run, 0, Time()) == ("forced", "1")
    assert knocks(slurm) == [(None, False)] and not asked(run)


def test_a_job_that_waits_is_simply_taken_out_of_the_queue(run):
    slurm = with_job("PENDING")
    assert end(slurm, run, 60, Time()) == ("before it started", "1")
    assert knocks(slurm) == [(None, False)] and not asked(run)


def test_a_job_that_slurm_does_not_get_rid_of_is_reported(run):
    slurm = with_job(on_signal={})
    time = Time()
    with pytest.raises(WaitTimeout, match="job 1 is still RUNNING.*scontrol show job 1"):
        end(slurm, run, 0, time)
    assert time.now >= FORCED_END_S


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "CANCELLED"])
def test_a_run_that_has_ended_has_nothing_to_cancel(run, state):
    with pytest.raises(NotFoundError, match="nothing to cancel"):
        end(with_job(state), run, 60, Time())
    assert not asked(run)


def test_an_outage_is_not_taken_for_the_end(run):
    slurm = with_job(faults={"job": [None, TransientError("timed out"), TransientError("timed out")]})
    time = Time({3: lambda: slurm.set_state("1", "COMPLETED")})
    assert end(slurm, run, 60, time) == ("graceful", "1") and time.now >= 3
    with pytest.raises(SlurmError, match="cannot tell"):
        end(with_job(faults={"job": [TransientError("timed out")]}), run, 60, Time())
