"""slurm.conf, gres.conf, cgroup.conf and /etc/hosts of a cluster, for the Slurm that is installed."""

from __future__ import annotations

import re

from dynarl.slurm.mini import MiniSlurmError
from dynarl.slurm.mini.net import Subnet
from dynarl.slurm.mini.spec import HEAD, ClusterSpec, Paths

OLDEST = (22, 5)


def parse_version(text: str) -> tuple[int, int]:
    """Release of Slurm as (year, month) from what `slurmd -V` prints.

    >>> parse_version("slurm-wlm 22.05.8")
    (22, 5)
    """
    found = re.search(r"\b(\d\d)\.(\d\d)\b", text)
    if not found:
        raise MiniSlurmError(f"slurmd -V printed {text.strip()!r}, in which no version is found")
    version = (int(found[1]), int(found[2]))
    if version < OLDEST:
        raise MiniSlurmError(f"Slurm {found[0]} is too old: heterogeneous steps with PMIx need 22.05 or newer")
    return version


def slurm_conf(spec: ClusterSpec, paths: Paths, subnet: Subnet, memory_mb: int) -> str:
    """The whole slurm.conf. Each node claims `memory_mb` for itself: memory is not divided, only counted."""
    gres = f" Gres=gpu:{spec.gpus_per_node}" if spec.gpus_per_node else ""
    shape = f"CPUs={spec.cpus_per_node} Boards=1 SocketsPerBoard=1 CoresPerSocket={spec.cpus_per_node} ThreadsPerCore=1"
    nodes = "\n".join(
        f"NodeName={name} NodeAddr={subnet.node(i)} {shape} RealMemory={memory_mb}{gres}"
        for i, name in enumerate(spec.node_names)
    )
    return f"""\
ClusterName={spec.name}
SlurmctldHost={HEAD}({subnet.head})
SlurmUser=root
SlurmdUser=root

# cred_expire is also how long Slurm holds a requeued job back (it waits until no credential of the first run is valid).
# The default of 120 s makes every test of a requeue last two minutes; less than a launch takes would refuse the launch.
AuthType=auth/munge
AuthInfo=socket={paths.munge_socket},cred_expire={CRED_EXPIRE_S}

StateSaveLocation={paths.state_save}
SlurmdSpoolDir={paths.spool}
SlurmctldPidFile={paths.local}/slurmctld.pid
SlurmdPidFile={paths.local}/slurmd.pid
SlurmctldLogFile={paths.log}/slurmctld.log
SlurmdLogFile={paths.log}/slurmd-%n.log
MailProg=/bin/true
{"# no TaskProlog" if spec.cpu_quota is None else f"TaskProlog={paths.task_prolog}"}
JobCompType=jobcomp/filetxt
JobCompLoc={paths.log}/jobs.txt

MpiDefault=pmix
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
{"GresTypes=gpu" if spec.gpus_per_node else "# no GresTypes"}
# No systemd and no delegated cgroup is asked for: processes are tracked through /proc.
ProctrackType=proctrack/linuxproc
# Nodes may claim more CPUs than the machine has.
SlurmdParameters=config_overrides

# A lost node is DOWN soon, and is taken back as soon as its slurmd registers again.
SlurmdTimeout={spec.slurmd_timeout_s}
ReturnToService=2
# Nodes can be slow (a quota of a quarter core): give messages time, so that slow is not taken for lost.
MessageTimeout=30
TCPTimeout=5
BatchStartTimeout=60
KillWait=5
JobRequeue=1
MinJobAge=300
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=5,batch_sched_delay=0

{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


CRED_EXPIRE_S = 10


def gres_conf(spec: ClusterSpec, paths: Paths) -> str:
    """The devices are fakes that `node.py` makes; with a File= per device Slurm sets CUDA_VISIBLE_DEVICES."""
    if not spec.gpus_per_node:
        return ""
    last = spec.gpus_per_node - 1
    return f"AutoDetect=off\nName=gpu File={paths.devices}/nvidia{f'[0-{last}]' if last else '0'}\n"


def cgroup_conf(version: tuple[int, int]) -> str:
    """Keep Slurm away from cgroups: the first plugin that can be told so came with 24.05; cgroup/v1 mounts nothing
    unasked."""
    return f"CgroupPlugin={'disabled' if version >= (24, 5) else 'cgroup/v1'}\n"


def hosts(spec: ClusterSpec, subnet: Subnet, login_name: str) -> str:
    """/etc/hosts of the nodes: they resolve each other, the head and the machine (the login node) by name."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost", f"{subnet.head} {HEAD}"]
    if login_name not in {HEAD, "localhost", *spec.node_names}:
        lines.append(f"{subnet.login} {login_name}")
    lines += [f"{subnet.node(i)} {name}" for i, name in enumerate(spec.node_names)]
    return "\n".join(lines) + "\n"
