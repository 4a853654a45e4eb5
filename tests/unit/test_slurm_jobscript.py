import os
import shlex
import stat
import subprocess
from pathlib import Path

import pytest

from dynarl.config import load
from dynarl.slurm import jobscript

ROOT = Path(__file__).parents[2]
RUN = Path("/runs/100%/x-1")


def config(written):
    return load.from_text(written).config


def test_the_script_is_that_of_the_checkout():
    assert jobscript.script() == ROOT / "slurm" / "dynarl.slurm"
    assert jobscript.home() == ROOT
    assert jobscript.environment("/p")["DYNARL_HOME"] == str(ROOT)


def test_options_follow_from_the_configuration():
    command = jobscript.sbatch_command(
        config("""
run: {name: big}
cluster: {nodes: 16, device: cuda, devices_per_node: 8, time: 2-3, signal_before_s: 300, partition: gpu, account: me,
          qos: high, requeue: false, sbatch_args: [--constraint=a100]}
"""),
        RUN,
        resume=True,
    )
    assert command == [
        "sbatch",
        "--parsable",
        "--job-name=big",
        "--nodes=16",
        "--time=2-03:00:00",
        "--signal=B:USR1@300",
        "--no-kill",
        "--no-requeue",
        "--open-mode=append",
        "--output=/runs/100%%/x-1/slurm-%j.out",
        "--partition=gpu",
        "--account=me",
        "--qos=high",
        "--gpus-per-node=8",
        "--constraint=a100",
        str(ROOT / "slurm/dynarl.slurm"),
        "/runs/100%/x-1/config.yaml",
        "--run-dir",
        "/runs/100%/x-1",
        "--resume",
    ]


def test_on_cpus_no_gpus_are_asked_for():
    assert not [option for option in jobscript.sbatch_options(config(""), RUN) if "gpu" in option]


def sh(lines, **env):
    return subprocess.run(
        ["bash", "-c", lines + "\necho end"], capture_output=True, text=True, env={"PATH": os.environ["PATH"], **env}
    )


def test_the_prologue_loads_modules_then_runs_the_sites_lines():
    lines = jobscript.prologue(
        config("cluster: {modules: [openmpi/5, 'odd name'], prologue: [export A=1, 'echo $A; true']}")
    )
    done = sh('module() { echo module "$@"; }\n' + lines)
    assert done.stdout.splitlines() == ["module load openmpi/5", "module load odd name", "1", "end"]


@pytest.mark.parametrize("written", ["modules: [nothing]", "prologue: ['false']"])
def test_a_line_of_the_prologue_that_fails_ends_the_job(written):
    done = sh("module() { return 3; }\n" + jobscript.prologue(config(f"cluster: {{{written}}}")))
    assert done.returncode != 0 and "end" not in done.stdout


# The script itself, with an interpreter in place of Python that shows what it is called with.


@pytest.fixture
def job(tmp_path):
    """Run the job script as a job would; the completed process. What Python would be is `python` in tmp_path."""
    tools = tmp_path / "bin"
    tools.mkdir()
    write(tools / "scontrol", f"echo '   Command={ROOT}/slurm/dynarl.slurm a b'")
    write(
        tmp_path / "python",
        """
case "$*" in
-c*) exit "${IMPORT:-0}" ;;
*dynarl.slurm.jobscript*) echo "echo prologue; export FROM_PROLOGUE=1"; exit "${CHECK:-0}" ;;
esac
trap 2>&1 | grep USR1
echo "$@"; env""",
    )

    def run(*arguments, **env):
        environment = {
            "PATH": f"{tools}:/usr/bin:/bin",
            "SLURM_JOB_ID": "7",
            "DYNARL_PYTHON": str(tmp_path / "python"),
            **env,
        }
        # From another place and under another name, as slurmd does it.
        copy = tmp_path / "slurm_script"
        copy.write_text((ROOT / "slurm/dynarl.slurm").read_text())
        return subprocess.run(
            ["bash", str(copy), *arguments], env=environment, capture_output=True, text=True, cwd=tmp_path
        )

    return run


def write(path, lines):
    path.write_text("#!/bin/bash\n" + lines + "\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def variables(output):
    return dict(line.split("=", 1) for line in output.splitlines() if "=" in line)


def test_the_script_becomes_the_controller(job):
    done = job("my config.yaml", "--run-dir", "/r", XDG_RUNTIME_DIR="/run/user/0")
    assert done.returncode == 0, done.stderr
    assert "prologue" in done.stdout and "-u -m dynarl.controller --config my config.yaml --run-dir /r\n" in done.stdout
    found = variables(done.stdout)
    assert found["PYTHONPATH"] == found["DYNARL_HOME"] == str(ROOT) and found["FROM_PROLOGUE"] == "1"
    assert "XDG_RUNTIME_DIR" not in found
    assert "trap -- '' SIGUSR1" in done.stdout or "trap -- '' USR1" in done.stdout


def test_after_a_requeue_it_resumes(job):
    assert "--config c.yaml --resume\n" in job("c.yaml", SLURM_RESTART_COUNT="1").stdout
    assert "--config c.yaml\n" in job("c.yaml", SLURM_RESTART_COUNT="0").stdout


@pytest.mark.parametrize("arguments", [(), ("--resume",)])
def test_without_a_configuration_it_says_how_it_is_used(job, arguments):
    done = job(*arguments)
    assert done.returncode == 2 and "usage: sbatch" in done.stderr


def test_a_python_without_the_package_is_named(job, tmp_path):
    done = job("c.yaml", IMPORT="1")
    assert done.returncode == 4 and f"{tmp_path}/python" in done.stderr and "DYNARL_PYTHON" in done.stderr


def test_a_configuration_that_cannot_work_ends_the_job_before_anything_starts(job):
    done = job("c.yaml", CHECK="3")
    assert done.returncode == 3 and "dynarl.controller" not in done.stdout


def test_no_line_of_the_script_is_wrong_for_bash():
    assert subprocess.run(["bash", "-n", str(jobscript.script())]).returncode == 0


def test_the_command_line_survives_a_shell():
    command = jobscript.sbatch_command(config(""), Path("/a b/c"))
    assert shlex.split(shlex.join(command)) == command
