import pytest

from dynarl import rundir
from dynarl.config import load
from dynarl.errors import ConfigError, NotFoundError, SlurmError
from dynarl.slurm import submission
from dynarl.slurm.client import TransientError
from dynarl.slurm.fake import FakeClient


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "SITE_CLUSTERS", tmp_path / "clusters.d")
    monkeypatch.setenv("DYNARL_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def config(written="run: {name: x}"):
    return load.from_text(written).config


def everything(root):
    return {path: path.read_bytes() if path.is_file() else None for path in root.rglob("*")} if root.exists() else None


def submitted(slurm, written="run: {name: x}"):
    return submission.submit_new(slurm, config(written))


def test_a_new_run_has_its_directory_its_whole_configuration_and_its_job(root):
    slurm = FakeClient()
    done = submitted(slurm)
    assert done.run.parent == root and rundir.resolve("last") == done.run
    assert load.load(rundir.config(done.run)) == config()
    assert rundir.job_ids(done.run) == [done.job_id]
    command = slurm.calls[-1]
    assert command[-3:] == (str(rundir.config(done.run)), "--run-dir", str(done.run))


def test_the_job_starts_without_traces_of_an_outer_job(root, monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    monkeypatch.setenv("HF_TOKEN", "secret")
    slurm = FakeClient()
    submitted(slurm)
    environment = slurm.environments[0]
    assert "SLURM_CPUS_PER_TASK" not in environment and environment["HF_TOKEN"] == "secret"
    assert environment["DYNARL_CLUSTER"] == "none"  # the configuration in the run directory is complete


@pytest.mark.parametrize(
    "slurm",
    [
        FakeClient(faults={"submit": [SlurmError("sbatch: Invalid account")]}),
        FakeClient(faults={"submit": [KeyboardInterrupt()]}),
        FakeClient(node_names=("n1",)),
        FakeClient(faults={"version": [TransientError("no answer")]}),
    ],
)
@pytest.mark.parametrize("root_exists", [False, True])
def test_on_an_error_nothing_is_left_behind(root, slurm, root_exists):
    if root_exists:
        submitted(FakeClient())
    before = everything(root)
    slurm.faults = {name: list(script) for name, script in slurm.faults.items()}
    faults = {name: list(script) for name, script in slurm.faults.items()}
    with pytest.raises((SlurmError, KeyboardInterrupt)):
        submitted(slurm)
    slurm.faults = faults  # the same object serves the next case
    assert everything(root) == before
    assert slurm.jobs == {}


def test_two_runs_never_share_a_directory(root):
    slurm = FakeClient()
    assert submitted(slurm).run != submitted(slurm).run


def test_resume_submits_the_same_run_again(root):
    slurm = FakeClient()
    first = submitted(slurm)
    slurm.set_state(first.job_id, "FAILED")
    again = submission.submit_resume(slurm, first.run, ["run.iterations=99"])
    assert again.run == first.run and rundir.job_ids(first.run) == [first.job_id, again.job_id]
    assert slurm.calls[-1][-1] == "--resume"
    assert load.load(rundir.config(first.run)).run.iterations == 99
    assert any("no complete checkpoint" in note for note in again.notes)


def test_resume_knows_a_complete_checkpoint(root):
    slurm = FakeClient()
    first = submitted(slurm)
    slurm.set_state(first.job_id, "FAILED")
    checkpoint = rundir.checkpoint(first.run, 3)
    checkpoint.mkdir()
    rundir.mark_complete(checkpoint)
    assert submission.submit_resume(slurm, first.run).notes == ()


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "SOMETHING_NEW"])
def test_a_run_with_a_living_job_is_not_resumed(root, state):
    slurm = FakeClient()
    first = submitted(slurm)
    slurm.set_state(first.job_id, state)
    with pytest.raises(submission.RunBusy, match=f"job {first.job_id} .* is {state}.*dynarl cancel {first.run.name}"):
        submission.submit_resume(slurm, first.run)
    assert list(slurm.jobs) == [first.job_id]


def test_a_run_whose_job_cannot_be_told_is_not_resumed(root):
    slurm = FakeClient()
    first = submitted(slurm)
    slurm.faults = {"job": [TransientError("squeue: Socket timed out")]}
    with pytest.raises(SlurmError, match=f"cannot tell whether job {first.job_id}"):
        submission.submit_resume(slurm, first.run)


@pytest.mark.parametrize(
    "overrides, fault, error",
    [
        (["cluster.nodes=9"], None, ConfigError),
        (["run.iterations=99"], SlurmError("sbatch: no"), SlurmError),
    ],
)
def test_a_resume_that_fails_leaves_the_configuration_as_it_was(root, overrides, fault, error):
    slurm = FakeClient()
    first = submitted(slurm)
    slurm.set_state(first.job_id, "FAILED")
    before = everything(root)
    slurm.faults = {"submit": [fault]}
    with pytest.raises(error):
        submission.submit_resume(slurm, first.run, overrides)
    assert everything(root) == before


def test_what_is_no_run_is_not_resumed(root, tmp_path):
    with pytest.raises(NotFoundError):
        submission.submit_resume(FakeClient(), tmp_path)


def test_wait_outlasts_requeues_and_outages():
    slurm = FakeClient()
    job_id = slurm.submit(["sbatch"], {})
    script = iter(["RUNNING", "PENDING", None, "RUNNING", "COMPLETED"])

    def sleep(seconds):
        state = next(script)
        if state:
            slurm.set_state(job_id, state)
        else:
            slurm.faults = {"job": [TransientError("squeue: Socket timed out")]}

    info = submission.wait(slurm, job_id, sleep)
    assert info.state == "COMPLETED" and submission.succeeded(info) is True
    assert next(script, "used up") == "used up"
