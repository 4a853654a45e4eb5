"""Which variables may pass from one Slurm context into the next.

Slurm speaks to its tools and to MPI through the environment, and a process that starts another job, step or worker
hands on what was meant for itself. Three borders, one function each:

    for_sbatch   a job submitted from anywhere, also from inside another job
    for_srun     the step that the batch script starts
    for_worker   a role worker, which is a child of an MPI rank but must not take itself for one

and `for_other_interpreter` where that worker runs in another Python than its agent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Where Slurm is and how to reach it. Never specific to one job.
_SITE = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTER_NAME", "SLURM_WORKING_CLUSTER", "SLURM_JWT"}

# A user's standing wishes, commonly exported in ~/.bashrc. Slurm itself sets none of these.
_WISHES = {
    f"SBATCH_{name}"
    for name in (
        "ACCOUNT",
        "PARTITION",
        "QOS",
        "RESERVATION",
        "CONSTRAINT",
        "WCKEY",
        "CLUSTERS",
        "NETWORK",
        "IMAGE",
        "EXCLUSIVE",
    )
}

# Facts about the job that srun does not take as defaults of its options.
# SLURM_JOB_NUM_NODES is not among them: srun would take it as --nodes of every component.
_JOB_FACTS = {
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_PARTITION",
    "SLURM_JOB_USER",
    "SLURM_JOB_UID",
    "SLURM_JOB_ACCOUNT",
    "SLURM_JOB_QOS",
    "SLURM_JOB_START_TIME",
    "SLURM_JOB_END_TIME",
    "SLURM_RESTART_COUNT",
    "SLURM_SUBMIT_DIR",
    "SLURM_SUBMIT_HOST",
}

_SLURM = re.compile(r"^_?(SLURM|SLURMD|SBATCH|SRUN|SALLOC)_")
# What a launcher tells a rank about itself.
_RANK = re.compile(
    r"^(PMI2?_|PMIX_(?!MCA_)|OMPI_COMM_|OMPI_UNIVERSE_|OMPI_FIRST_|OMPI_APP_|HYDRA_|HYDI_|PALS_)|^(PMI_?FD|APPNUM)$"
)
# All of MPI: identity and settings.
_MPI = re.compile(
    r"^(PMI|PMI2|PMIX|OMPI|OPAL|ORTE|PRTE|MPI|HYDRA|HYD|MPICH|I_MPI|MPIEXEC|PALS|FLUX)_|^(PMI_?FD|APPNUM)$"
)
# What torchrun and its like export: a worker that finds a stale RANK joins a world that is not there.
_TORCH = {
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
# Belongs to the login session; on a compute node the directory does not exist.
_SESSION = {"XDG_RUNTIME_DIR", "XDG_SESSION_ID", "DBUS_SESSION_BUS_ADDRESS"}

_SECRET = re.compile(r"(_KEY|_TOKEN)$|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)


def for_sbatch(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment to call sbatch in.

    Without it a job submitted from inside another one inherits that one's CPU binding, memory, host file and counts:
    from "mutually exclusive" errors to a silent threefold slowdown. Settings of MPI (OMPI_MCA_*, PMIX_MCA_*, I_MPI_*)
    stay, since they come from the site's modules.
    """
    return {
        name: value
        for name, value in environment.items()
        if name in _SITE or name in _WISHES or not (_SLURM.match(name) or _RANK.match(name) or name in _SESSION)
    }


def for_srun(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment to call srun in, from that of the batch script.

    Every option is given on the command line, so each variable that srun would read as a default is dropped. Some of
    them contradict one another or our options (SLURM_CPUS_PER_TASK and SLURM_TRES_PER_TASK from 23.11,
    SLURM_MEM_PER_*), some make the step wait for what the batch script itself holds (SLURM_GPUS_PER_NODE,
    SLURM_MEM_PER_NODE). MPI settings stay, as above.
    """
    return {
        name: value
        for name, value in environment.items()
        if name in _SITE or name in _JOB_FACTS or not (_SLURM.match(name) or _RANK.match(name) or name in _SESSION)
    }


def for_worker(environment: Mapping[str, str], extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a role worker, from that of its agent; `extra` is laid over it.

    No trace of Slurm, MPI or torchrun is left: a library that finds SLURM_PROCID or PMIX_RANK would join the agents'
    world.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if not (_SLURM.match(name) or _MPI.match(name) or name in _TORCH or name in _SESSION)
    }
    return kept | dict(extra or {})


def for_other_interpreter(
    environment: Mapping[str, str], package_dir: str, extra: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a worker whose Python is not its agent's, from that of one whose Python is.

    PYTHONPATH and PYTHONHOME were meant for the agent's Python: packages found through them would come before those of the
    other environment, built for another release or in another version. `package_dir` holds the agent's dynarl alone, so
    that agent and worker speak the same protocol and the other environment needs no dynarl of its own. A PYTHONPATH in
    `extra` (cluster.env) is wanted, and kept behind it.
    """
    kept = {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | {"PYTHONPATH": ":".join(filter(None, [package_dir, extra.get("PYTHONPATH")]))}


def identity(role: str, device: int) -> dict[str, str]:
    """What a worker is told about itself."""
    own = {"DYNARL_ROLE": role, "DYNARL_DEVICE": str(device), "PYTHONUNBUFFERED": "1"}
    if role == "training":
        # Huge pages for large tensors: without them a neighbour reads state (transport.memory) half as fast.
        own["THP_MEM_ALLOC_ENABLE"] = "1"
        # The C library copies that much and more around the cache: twice as fast for state, which is too large for it.
        own["GLIBC_TUNABLES"] = f"glibc.cpu.x86_non_temporal_threshold={256 << 10}"
    return own


def model_settings(interface: str | None) -> dict[str, str]:
    """Defaults of the workers that run a model, under those of cluster.env."""
    settings = {
        "OMP_NUM_THREADS": "1",  # several workers share the cores of a node
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # otherwise the order may differ from nvidia-smi's, and between processes
    }
    if interface:
        settings |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return settings


def is_secret(name: str) -> bool:
    """True where the name says that the value must not be shown: *_KEY, *_TOKEN, *SECRET*, *PASSWORD* ..."""
    return bool(_SECRET.search(name))


def masked(environment: Mapping[str, str]) -> dict[str, str]:
    """The same with the values of secrets replaced, sorted by name, for showing."""
    return {name: "***" if is_secret(name) else environment[name] for name in sorted(environment)}
