"""The command line of the one heterogeneous step that holds the agents.

    srun OPTIONS agent : OPTIONS agent : OPTIONS agent

is one step and one MPI world, with a component per home role (or several, see `in_node_order`). Some options carry over
from a component to the later ones, some do not, and which ones differs by release; so every option is written out for
every component.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dynarl.errors import SlurmError
from dynarl.slurm import environ, hostlist

SAFE_VALUE = re.compile(r"[^,'\"\\\n\0]*")


@dataclass(frozen=True)
class Component:
    """One part of the step: one agent on each of `nodes`, all with the home role `role`.

    `env` is added to what the agents inherit. It shows in `ps`, so it must not hold secrets.
    """

    role: str
    nodes: tuple[str, ...]
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StepSpec:
    """The whole step. Components without nodes are left out.

    cpus_per_node, gpus_per_node: what an agent and its workers see; None: all CPUs of the allocation there, no GPU.
    log_dir: where each agent's output goes, as NODE-agent.log.
    immediate_s: a step that could not start by then fails instead of waiting for ever.
    """

    components: tuple[Component, ...]
    log_dir: str
    mpi: str = "pmix"
    cpus_per_node: int | None = None
    gpus_per_node: int | None = None
    immediate_s: int = 60
    extra_args: tuple[str, ...] = ()
    srun: str = "srun"


def command_line(spec: StepSpec) -> list[str]:
    """The argv of srun. Call it in the environment that `environ.for_srun` makes.

    Raises SlurmError for a step that Slurm would refuse or misread.
    """
    _check(spec)
    parts = in_node_order(spec.components)
    argv = [spec.srun]
    for index, component in enumerate(parts):
        if index:
            argv.append(":")
        argv += _options(component, spec) + list(spec.extra_args) + list(component.command)
    return argv


def in_node_order(components: Sequence[Component]) -> list[Component]:
    """The same nodes in the same roles, cut so that the nodes come in Slurm's order over the whole step.

    Slurm's PMIx plugin numbers the hosts of a step in sorted order, but meets them in the order of the components.
    Where the two differ, MPI_Init fails at once (22.05: "unexpected contrib from", "Cannot establish direct
    connection"). A role whose nodes lie apart becomes several components.
    """
    placed = [(node, component) for component in components for node in component.nodes]
    placed.sort(key=lambda pair: hostlist.sort_key(pair[0]))
    runs = [list(run) for _, run in itertools.groupby(placed, key=lambda pair: id(pair[1]))]
    return [replace(run[0][1], nodes=tuple(node for node, _ in run)) for run in runs]


def _options(component: Component, spec: StepSpec) -> list[str]:
    count = len(component.nodes)
    options = [
        f"--job-name=dynarl-{component.role}",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={hostlist.fold(component.nodes)}",
        f"--mpi={spec.mpi}",
        # Other steps (a debugger, nvidia-smi, the step that takes over after a lost node) must not wait for this one.
        "--overlap",
        # 0: all that the job has. Otherwise the agents' step takes the job's memory away from other steps.
        "--mem=0",
        # The agent places its workers itself; a binding would shut them all into the agent's core.
        "--cpu-bind=none",
        # A lost node or agent must not take the others along: the controller decides. Both, because the defaults come
        # from slurm.conf (KillOnBadExit, WaitTime) and a site with WaitTime=30 ends the step 30 s after the first clean
        # exit.
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        # srun would swallow the batch script's standard input.
        "--input=none",
        f"--immediate={spec.immediate_s}",
        "--open-mode=append",
        # By node name: %t is wrong in a heterogeneous step (it counts the component index in).
        f"--output={_escaped(spec.log_dir)}/%N-agent.log",
        f"--export={_export(component)}",
    ]
    if spec.cpus_per_node is not None:
        options.append(f"--cpus-per-task={spec.cpus_per_node}")
    if spec.gpus_per_node is not None:
        # The agent starts the workers, so it has to see the devices; it gives each worker one by CUDA_VISIBLE_DEVICES.
        options.append(f"--gpus-per-node={spec.gpus_per_node}")
    return options


def _escaped(path: str) -> str:
    """A path in which Slurm finds no patterns such as %j."""
    return path.replace("%", "%%")


def _export(component: Component) -> str:
    """The value of --export. Nothing tells a rank its component (MPI's APPNUM is 0 in all), hence DYNARL_ROLE."""
    pairs = {"DYNARL_ROLE": component.role, **component.env}
    for name, value in pairs.items():
        if environ.is_secret(name):
            raise SlurmError(f"{name} looks like a secret and would show in `ps`; put it into a file below keys/")
        if not SAFE_VALUE.fullmatch(value):
            raise SlurmError(
                f"{name}={value!r} cannot be given to srun --export: it holds a comma, a quote or a line break"
            )
    return ",".join(["ALL", *(f"{name}={value}" for name, value in pairs.items())])


def _check(spec: StepSpec) -> None:
    seen: dict[str, str] = {}
    for component in spec.components:
        for node in component.nodes:
            if node in seen:
                raise SlurmError(
                    f"node {node} is in {seen[node]} and in {component.role}: "
                    "components of one step must not share a node"
                )
            seen[node] = component.role
        if ":" in (*component.command, *spec.extra_args):
            raise SlurmError("a lone ':' among the arguments: srun would take it for the start of the next component")
    if not seen:
        raise SlurmError("a step needs at least one node, and no role has any")


def rendered(argv: list[str]) -> str:
    """The command line as shell text to read and to paste: an option per line, each program on one line."""
    lines: list[str] = []
    in_program = False
    for word in argv:
        quoted = shlex.quote(word)
        if in_program and word != ":":
            lines[-1] += f" {quoted}"
        else:
            lines.append(quoted)
            in_program = bool(lines[1:]) and not word.startswith("-") and word != ":"
    return " \\\n    ".join(lines)
