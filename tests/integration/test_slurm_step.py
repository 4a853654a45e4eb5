"""The step's command line and the job script on a real Slurm."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dynarl.slurm.srun import Component, StepSpec, command_line

ROOT = Path(__file__).parents[2]
BIN = ROOT / "bin" / "dynarl"
SAY = """
import os, time
from mpi4py import MPI
world = MPI.COMM_WORLD
facts = (os.environ["SLURMD_NODENAME"], os.environ["DYNARL_ROLE"], os.environ.get("CUDA_VISIBLE_DEVICES"), world.size)
print(*facts, flush=True)
rank = world.rank
MPI.Finalize()
time.sleep(0.2 * rank)  # as agents do, for components that end at the same moment may keep srun for ever
"""


@pytest.mark.parametrize(
    "split",
    [
        {"rollout": ("n1",), "training": ("n2", "n3")},
        {"rollout": ("n3",), "inference": ("n2",), "training": ("n1",)},
        {"rollout": ("n1", "n3"), "training": ("n2",)},
    ],
    ids=["in order", "backwards", "interleaved"],
)
def test_all_components_are_one_mpi_world_that_sees_the_gpus(minislurm, tmp_path, split):
    """MPI_Init fails on Slurm 22.05 when the components' nodes are not in Slurm's own order."""
    pytest.importorskip("mpi4py")
    cluster = minislurm(nodes=3, gpus=2)
    program = tmp_path / "say.py"
    program.write_text(SAY)
    command = (sys.executable, "-m", "mpi4py", str(program))
    spec = StepSpec(
        tuple(Component(role, nodes, command) for role, nodes in split.items()), str(tmp_path), gpus_per_node=2
    )
    # In the environment that the controller makes for srun.
    (tmp_path / "step.py").write_text(
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); from dynarl.slurm import environ\n"
        f"os.execvpe('srun', {command_line(spec)!r}, environ.for_srun(os.environ))\n"
    )
    job = cluster.submit(
        "--nodes=3", "--exclusive", "--mem=0", "--gpus-per-node=2", "-t5", "-o", f"{tmp_path}/job.out",
        f"--wrap=exec {shlex.quote(sys.executable)} {tmp_path}/step.py",
    )  # fmt: skip
    assert cluster.wait_job(job) == "COMPLETED", (tmp_path / "job.out").read_text()
    said = {node: (tmp_path / f"{node}-agent.log").read_text().split() for node in ("n1", "n2", "n3")}
    assert said == {node: [node, role, "0,1", "3"] for role, nodes in split.items() for node in nodes}


def test_a_second_step_does_not_wait_for_the_agents(minislurm, tmp_path):
    """A debugger's step, or the one that takes over after a lost node, must start while the agents' step runs."""
    cluster = minislurm(nodes=3, gpus=2)
    up = ("sh", "-c", "echo up; sleep 600")
    long = StepSpec((Component("rollout", ("n1", "n2", "n3"), up),), str(tmp_path), gpus_per_node=2)
    short = StepSpec((Component("training", ("n1", "n2", "n3"), ("true",)),), str(tmp_path), gpus_per_node=2)
    (tmp_path / "steps.sh").write_text(
        "#!/bin/bash\nunset SLURM_MEM_PER_NODE SLURM_GPUS_PER_NODE\n"
        f"{shlex.join(command_line(long))} &\n"
        f"until [ $(cat {tmp_path}/n?-agent.log | grep -c up) = 3 ]; do sleep 0.1; done\n"
        f"timeout 100 {shlex.join(command_line(short))}\nrc=$?\n"
        "kill %1; exit $rc\n"
    )
    job = cluster.submit(
        "--nodes=3", "--exclusive", "--mem=0", "--gpus-per-node=2", "-t5", "-o", f"{tmp_path}/job.out",
        f"{tmp_path}/steps.sh",
    )  # fmt: skip
    assert cluster.wait_job(job) == "COMPLETED", (tmp_path / "job.out").read_text()


@pytest.fixture
def dynarl(minislurm, tmp_path):
    """`dynarl ARGUMENTS` against a cluster of two nodes."""
    cluster = minislurm(nodes=2)
    env = {**cluster.env, "DYNARL_PYTHON": sys.executable, "DYNARL_RUNS": str(tmp_path / "runs")}

    def call(*arguments, path=None):
        changed = {**env, "PATH": f"{path}:{env['PATH']}"} if path else env
        return subprocess.run([BIN, *arguments], capture_output=True, text=True, env=changed, cwd=tmp_path)

    return call


SMOKE = str(ROOT / "configs" / "jobs" / "smoke.yaml")


@pytest.mark.parametrize(
    "options, message",
    [
        (["cluster.nodes=3", "split.rollout=2"], "cluster.nodes = 3, but partition main has 2"),
        (["cluster.mpi=pmix_v9"], "`srun --mpi=list` has no pmix_v9 here"),
        (["cluster.partition=gold"], "no partition 'gold'. Known here: main"),
        (["cluster.account=nobody", "cluster.sbatch_args=[--constraint=gold]"], "sbatch: "),
    ],
)
def test_what_this_slurm_cannot_do_is_said_before_anything_is_made(dynarl, tmp_path, options, message):
    done = dynarl("submit", SMOKE, *[f"--set={option}" for option in options])
    assert done.returncode == 4 and message in done.stderr, done
    assert not (tmp_path / "runs").exists()


def test_an_old_slurm_is_refused(dynarl, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "srun").write_text("#!/bin/sh\necho slurm 20.11.9\n")
    (tmp_path / "old" / "srun").chmod(0o755)
    done = dynarl("submit", SMOKE, path=tmp_path / "old")
    assert done.returncode == 4 and "this is Slurm 20.11.9; dynarl needs 22.05 or newer" in done.stderr


def test_a_job_of_the_wrong_size_ends_with_the_reason_before_anything_starts(minislurm, tmp_path):
    cluster = minislurm(nodes=3)
    cluster.env["DYNARL_PYTHON"] = sys.executable
    script = str(ROOT / "slurm" / "dynarl.slurm")
    job = cluster.submit("--nodes=3", "-o", f"{tmp_path}/out", script, SMOKE, "--run-dir", str(tmp_path / "run"))
    assert cluster.wait_job(job) == "FAILED"
    assert "the allocation has 3 nodes, the configuration needs cluster.nodes = 2" in (tmp_path / "out").read_text()
    assert not (tmp_path / "run").exists()
