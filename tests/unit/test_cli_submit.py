import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dynarl import rundir
from dynarl.cli.submit import command
from dynarl.config import load
from dynarl.errors import SlurmError
from dynarl.hypergraph.journal import Journal
from dynarl.slurm import backend, submission
from dynarl.slurm.fake import FakeClient


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A fake Slurm, a place for runs, and a job file job.yaml in the current directory."""
    fake = FakeClient()
    monkeypatch.setattr(load, "SITE_CLUSTERS", tmp_path / "clusters.d")
    monkeypatch.setattr(backend, "client", lambda: fake)
    monkeypatch.setattr(submission, "POLL_S", 0)
    monkeypatch.setenv("DYNARL_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("run: {name: x}\ncluster: {env: {OMP_NUM_THREADS: 2}}\n")
    return fake


def call(*arguments):
    return CliRunner().invoke(command, arguments)


def test_a_submission_says_run_job_and_files(slurm, tmp_path):
    done = call("job.yaml", "-o", "json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["schema"] == 1 and data["job_id"] == "1" and data["directory"] == str(tmp_path / "runs" / data["run"])
    assert "dynarl watch" in call("job.yaml").stderr


@pytest.mark.parametrize("root, told", [("/tmp/runs", True), ("/dev/shm/runs", True), ("/home/me/runs", False)])
def test_a_place_for_runs_that_other_nodes_hardly_see_is_told(slurm, monkeypatch, root, told):
    monkeypatch.setattr(submission, "submit_new", lambda client, config: submission.Submitted(Path(root, "x-1"), "1", ()))
    done = call("job.yaml", "-o", "json")
    assert json.loads(done.stdout)["job_id"] == "1"
    assert (f"other nodes hardly see {root}; set run.root or DYNARL_RUNS" in done.stderr) == told


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["none.yaml"], 3, "no configuration file none.yaml"),
        (["job.yaml", "--set", "cluster.nods=3"], 3, "unknown key cluster.nods; did you mean cluster.nodes?"),
        (
            ["job.yaml", "--set", "cluster.nodes=3"],
            3,
            "rollout 2 + inference 1 + training 1 = 4, but cluster.nodes = 3",
        ),
        (
            ["job.yaml", "--set", "cluster.nodes=9", "--set", "split.rollout=7"],
            4,
            "cluster.nodes = 9, but partition main has 4",
        ),
        ([], 2, "give either CONFIG or --resume RUN"),
        (["job.yaml", "--resume", "last"], 2, "give either CONFIG or --resume RUN"),
        (["--resume", "nothing"], 5, "no runs in"),
    ],
)
def test_on_an_error_nothing_is_submitted_and_no_directory_is_made(slurm, tmp_path, arguments, code, message):
    done = call(*arguments)
    assert done.exit_code == code and message in done.stderr, done.output
    assert slurm.jobs == {} and not (tmp_path / "runs").exists()


def test_errors_are_objects_in_json(slurm):
    data = json.loads(call("none.yaml", "-o", "json").stdout)
    assert data["error"]["kind"] == "ConfigError" and data["error"]["exit_code"] == 3


def test_resume_takes_every_way_to_name_a_run(slurm):
    first = json.loads(call("job.yaml", "-o", "json").stdout)
    for number, selector in enumerate(("last", first["run"], "1"), start=2):
        slurm.set_state(str(number - 1), "FAILED")
        again = json.loads(call("--resume", selector, "-o", "json").stdout)
        assert (again["run"], again["job_id"]) == (first["run"], str(number))


# --dry-run


def dry(*arguments):
    done = call("job.yaml", "--dry-run", *arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_dry_run_asks_nobody_and_makes_nothing(slurm, tmp_path, monkeypatch):
    monkeypatch.setattr(backend, "client", lambda: pytest.fail("Slurm was asked"))
    before = sorted(tmp_path.rglob("*"))
    dry()
    dry("-o", "json")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_shows_the_very_command_that_a_submission_runs(slurm, tmp_path):
    shown = json.loads(dry("-o", "json"))["sbatch"]
    real = json.loads(call("job.yaml", "-o", "json").stdout)
    stand_in = str(tmp_path / "runs" / "x-YYYYMMDD-HHMMSS")
    assert [word.replace(stand_in, real["directory"]) for word in shown] == list(slurm.calls[-1][1:])


def test_a_dry_run_shows_what_a_role_gets_and_hides_secrets(slurm, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")
    monkeypatch.setenv("DB_PASSWORD", "very-secret")
    monkeypatch.setenv("SLURM_CPU_BIND", "quiet")
    monkeypatch.setenv("MY_SETTING", "shown")
    text, data = dry(), json.loads(dry("-o", "json"))
    assert "very-secret" not in text and "very-secret" not in json.dumps(data)
    assert "WANDB_API_KEY='***'" in text and "MY_SETTING=shown" in text
    assert "SLURM_CPU_BIND" not in text and "SLURM_CPU_BIND" not in data["environment"]
    assert data["roles"]["rollout"]["OMP_NUM_THREADS"] == "2"
    assert {role: settings["DYNARL_ROLE"] for role, settings in data["roles"].items()} == {
        role: role for role in ("rollout", "inference", "training", "environment")
    }


def test_a_dry_run_shows_script_and_step(slurm):
    text = dry()
    assert "#SBATCH --signal=B:USR1@120" in text and 'exec "$DYNARL_PYTHON"' in text
    assert (
        "--export=ALL,DYNARL_ROLE=training" in text and "-m dynarl.agent" in text and "'--nodelist=node[3-4]'" in text
    )


# --wait


def ends(slurm, job_state, record):
    """Let the job end when it is first asked about; the controller writes `record`."""
    ask = FakeClient.job

    def job(job_id):
        if record and slurm.jobs[job_id].state == "PENDING":
            journal = Journal(rundir.journal(rundir.resolve("last")))
            journal.append("run_ended", **record)
            journal.close()
        slurm.set_state(job_id, job_state)
        return ask(slurm, job_id)

    slurm.job = job


@pytest.mark.parametrize(
    "state, record, code",
    [
        ("COMPLETED", {"state": "completed", "reason": "", "exit_code": 0}, 0),
        ("FAILED", {"state": "failed", "reason": "a worker died", "exit_code": 1}, 1),
        ("NODE_FAIL", {}, 1),
    ],
)
def test_wait_answers_with_how_the_job_ended(slurm, state, record, code):
    ends(slurm, state, record)
    done = call("job.yaml", "--wait", "-o", "json")
    data = json.loads(done.stdout)
    assert done.exit_code == code and data["job_state"] == state and data["state"] == record.get("state")
    assert data["reason"] == (record.get("reason") or None)


def test_a_refused_submission_exits_with_4(slurm, tmp_path):
    slurm.faults = {"submit": [SlurmError("sbatch: Invalid account")]}
    done = call("job.yaml")
    assert done.exit_code == 4 and "Invalid account" in done.stderr and not (tmp_path / "runs").exists()
