"""What must be true of a Slurm before a job is given to it, told apart fault by fault, each with what to do."""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TypeVar

from dynarl.config import interpreters
from dynarl.config.schema import Config
from dynarl.errors import SlurmError
from dynarl.slurm import timelimit, version
from dynarl.slurm.client import Client, PartitionInfo

Answer = TypeVar("Answer")

NO_CONFIGURATION = re.compile(
    r"establish a configuration source|fetch_config|no slurm\.conf|resolve_ctls", re.IGNORECASE
)


class Level(enum.Enum):
    OK = "ok"
    NOTE = "note"
    FAULT = "fault"


@dataclass(frozen=True)
class Finding:
    """One line of the report: `topic` is a short word, `text` says what is so and, unless it is well, what to do."""

    level: Level
    topic: str
    text: str


def require(client: Client, config: Config, allocated: bool = False) -> list[Finding]:
    """All findings; raises SlurmError with every fault if there is one. `allocated`: the job has its nodes already."""
    findings = list(check(client, config, allocated))
    faults = [finding.text for finding in findings if finding.level is Level.FAULT]
    if faults:
        raise SlurmError("\n".join(faults))
    return findings


def check(client: Client, config: Config | None = None, allocated: bool = False) -> Iterator[Finding]:
    """Findings from the most basic on. What needs an answer that did not come is left out, since that fault is
    reported.
    """
    release = yield from _asked("version", client.version)
    if release is None:
        return
    try:
        version.require(release)
    except SlurmError as error:
        yield Finding(Level.FAULT, "version", str(error))
        return
    yield Finding(Level.OK, "version", f"Slurm {release}, asked through {client.name}")
    settings = yield from _asked("slurmctld", client.config)
    if settings is None:
        return
    yield from _settings(settings, config)
    plugins = yield from _asked("mpi", client.mpi_plugins)
    if plugins is not None:
        yield _mpi(plugins, config)
    if config is not None:
        yield from _interpreters(config, allocated)
    partitions = None if allocated else (yield from _asked("partitions", client.partitions))
    if partitions is not None:
        yield from _partition(partitions, config)


def _asked(topic: str, question: Callable[[], Answer]) -> Generator[Finding, None, Answer | None]:
    """Returns the answer, or None after yielding the finding that there was none."""
    try:
        return question()
    except SlurmError as error:
        text = str(error)
        if NO_CONFIGURATION.search(text):
            text = (
                "Slurm's tools are installed, but find no slurm.conf and no slurmctld. Set SLURM_CONF, or run this on "
                f"a login node ({text.splitlines()[-1]})"
            )
        yield Finding(Level.FAULT, topic, text)
        return None


def _settings(settings: dict[str, str], config: Config | None) -> Iterator[Finding]:
    parts = (
        None
        if config is None
        else sum(count > 0 for count in (config.split.rollout, config.split.inference, config.split.training))
    )
    if "disable_hetjob_steps" in settings.get("SchedulerParameters", ""):
        level = Level.NOTE if parts == 1 else Level.FAULT
        yield Finding(
            level,
            "het-steps",
            "SchedulerParameters has disable_hetjob_steps: `srun A : B` is refused here. Ask the administrators to "
            "remove it, or use a configuration with a single role (policy.name: colocated, split.training = nodes)",
        )
    else:
        yield Finding(Level.OK, "het-steps", "heterogeneous steps are allowed")
    requeue = config is None or config.cluster.requeue
    if requeue and settings.get("JobRequeue") == "0":
        yield Finding(
            Level.NOTE,
            "requeue",
            "JobRequeue is 0: the site may refuse to requeue at the time limit; go on by hand with "
            "`dynarl submit --resume RUN`",
        )
    if requeue and "CANCEL" in settings.get("PreemptMode", ""):
        yield Finding(
            Level.NOTE,
            "preemption",
            "PreemptMode is CANCEL: a preempted job is not requeued, whatever it asks for; go on "
            "by hand with `dynarl submit --resume RUN`",
        )
    steps = settings.get("MaxStepCount", "")
    if steps.isdigit() and int(steps) < 100:
        yield Finding(Level.NOTE, "steps", f"MaxStepCount is {steps}: a job that loses many nodes may run out of steps")


def _mpi(plugins: list[str], config: Config | None) -> Finding:
    wanted = "pmix" if config is None else config.cluster.mpi
    if wanted not in plugins:
        return Finding(
            Level.FAULT,
            "mpi",
            f"`srun --mpi=list` has no {wanted} here, only: {', '.join(plugins)}. Set cluster.mpi to "
            "the one that your MPI library was built for (Open MPI: pmix)",
        )
    return Finding(Level.OK, "mpi", f"srun knows --mpi={wanted}")


def _interpreters(config: Config, allocated: bool) -> Iterator[Finding]:
    for role in ("rollout", "inference", "training"):
        if (text := interpreters.fault(config, role, sys.executable)) is not None:
            # One that is named may be there on the compute nodes alone.
            elsewhere = not allocated and interpreters.of_role(config, role) is not None
            yield Finding(Level.NOTE if elsewhere else Level.FAULT, "python", text)


def _partition(partitions: list[PartitionInfo], config: Config | None) -> Iterator[Finding]:
    if config is None:
        names = ", ".join(f"{part.name} ({part.nodes} nodes)" for part in partitions)
        yield Finding(Level.OK, "partitions", names or "none")
        return
    wanted, nodes = config.cluster.partition, config.cluster.nodes
    found = [part for part in partitions if (part.default if wanted is None else part.name == wanted)]
    if not found:
        names = ", ".join(part.name for part in partitions)
        what = "there is no default partition: set cluster.partition" if wanted is None else f"no partition {wanted!r}"
        yield Finding(Level.FAULT, "partition", f"{what}. Known here: {names}")
        return
    part = found[0]
    faults = list(_does_not_fit(part, nodes, config))
    yield from (Finding(Level.FAULT, "partition", fault) for fault in faults)
    if not faults:
        yield Finding(Level.OK, "partition", f"{part.name}: {part.nodes} nodes, time limit {part.time_limit}")


def _does_not_fit(part: PartitionInfo, nodes: int, config: Config) -> Iterator[str]:
    if not part.up:
        yield f"partition {part.name} is down; pick another with cluster.partition"
    if nodes > part.nodes:
        yield f"cluster.nodes = {nodes}, but partition {part.name} has {part.nodes}"
    elif part.max_nodes is not None and nodes > part.max_nodes:
        yield f"cluster.nodes = {nodes}, but partition {part.name} allows {part.max_nodes} per job"
    try:
        longest = timelimit.minutes(part.time_limit)
    except timelimit.TimeLimitError:
        return  # a word that this release has and we do not know
    asked = timelimit.minutes(config.cluster.time)
    if longest is not None and asked is not None and asked > longest:
        yield (
            f"cluster.time = {config.cluster.time} is {asked} minutes, but partition {part.name} allows {longest} "
            f"({part.time_limit}); the job is requeued at its limit anyway, so ask for less"
        )
