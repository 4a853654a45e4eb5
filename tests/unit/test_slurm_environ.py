import pytest

from dynarl.slurm import environ

FROM_A_STEP = {
    "PATH": "/bin",
    "HOME": "/root",
    "OMP_NUM_THREADS": "2",
    "HF_TOKEN": "hf_1",
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_JOB_ID": "7",
    "SLURM_RESTART_COUNT": "1",
    "SLURM_CPUS_PER_TASK": "1",
    "SLURM_TRES_PER_TASK": "cpu:1",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_HOSTFILE": "/h",
    "SLURM_MEM_PER_NODE": "100",
    "SLURM_GPUS_PER_NODE": "2",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NNODES": "4",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
    "SLURMD_NODENAME": "n1",
    "SBATCH_MEM_BIND": "none",
    "SRUN_CPUS_PER_TASK": "1",
    "SBATCH_ACCOUNT": "me",
    "PMIX_RANK": "0",
    "PMI_FD": "3",
    "PMI_RANK": "0",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_MCA_btl": "tcp,self",
    "PMIX_MCA_psec": "native",
    "I_MPI_PMI_LIBRARY": "/usr/lib/libpmi2.so",
    "RANK": "0",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "n1",
    "XDG_RUNTIME_DIR": "/run/user/0",
}
ALWAYS = {"PATH", "HOME", "OMP_NUM_THREADS", "HF_TOKEN"}
MPI_SETTINGS = {"OMPI_MCA_btl", "PMIX_MCA_psec", "I_MPI_PMI_LIBRARY"}
TORCH = {"RANK", "WORLD_SIZE", "MASTER_ADDR"}


def test_a_nested_job_keeps_the_site_and_the_users_wishes():
    assert set(environ.for_sbatch(FROM_A_STEP)) == ALWAYS | MPI_SETTINGS | TORCH | {"SLURM_CONF", "SBATCH_ACCOUNT"}


def test_a_step_keeps_facts_about_its_job_and_no_default_of_an_option():
    assert set(environ.for_srun(FROM_A_STEP)) == ALWAYS | MPI_SETTINGS | TORCH | {
        "SLURM_CONF",
        "SLURM_JOB_ID",
        "SLURM_RESTART_COUNT",
    }


def test_another_interpreter_gets_dynarl_and_no_other_package_of_its_agent():
    agents = {"PATH": "/bin", "PYTHONPATH": "/checkout:/apps/python3.11/site-packages", "PYTHONHOME": "/apps"}
    assert environ.for_other_interpreter(agents, "/tmp/dynarl-7/package", {}) == {
        "PATH": "/bin",
        "PYTHONPATH": "/tmp/dynarl-7/package",
    }
    wanted = environ.for_other_interpreter(agents, "/tmp/dynarl-7/package", {"PYTHONPATH": "/patches"})
    assert wanted["PYTHONPATH"] == "/tmp/dynarl-7/package:/patches"


def test_a_worker_finds_no_trace_of_slurm_mpi_or_torchrun():
    assert environ.for_worker(FROM_A_STEP, {"DYNARL_ROLE": "rollout"}) == {
        name: FROM_A_STEP[name] for name in ALWAYS
    } | {"DYNARL_ROLE": "rollout"}


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "MY_SECRET_THING", "DB_PASSWORD", "wandb_api_key"])
def test_secrets_are_masked(name):
    assert environ.masked({name: "x", "PATH": "/bin"}) == {name: "***", "PATH": "/bin"}


@pytest.mark.parametrize("name", ["KEYBOARD", "TOKENIZERS_PARALLELISM", "PATH"])
def test_ordinary_names_are_not(name):
    assert environ.masked({name: "x"}) == {name: "x"}
