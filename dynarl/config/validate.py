"""Rules that span several settings. Each message names the keys, shows the arithmetic and says what would be right."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from dynarl import rundir
from dynarl.config import degrees
from dynarl.config.schema import TAKING_TURNS, Config
from dynarl.errors import ConfigError
from dynarl.hypergraph import workflow
from dynarl.slurm import environ, timelimit
from dynarl.tasks.base import KNOWN_TASKS, open_task

# Options that are computed from other settings; given twice, the outcome would depend on their order.
COMPUTED_SBATCH = {
    "-N": "cluster.nodes",
    "--nodes": "cluster.nodes",
    "-t": "cluster.time",
    "--time": "cluster.time",
    "-p": "cluster.partition",
    "--partition": "cluster.partition",
    "-A": "cluster.account",
    "--account": "cluster.account",
    "-q": "cluster.qos",
    "--qos": "cluster.qos",
    "-J": "run.name",
    "--job-name": "run.name",
    "--signal": "cluster.signal_before_s",
    "--requeue": "cluster.requeue",
    "--no-requeue": "cluster.requeue",
    "--gpus-per-node": "cluster.devices_per_node",
}
COMPUTED_SRUN = {
    "-N": "cluster.nodes",
    "--nodes": "cluster.nodes",
    "-n": "cluster.nodes",
    "--ntasks": "cluster.nodes",
    "--ntasks-per-node": "the agent",
    "-w": "split",
    "--nodelist": "split",
    "--mpi": "cluster.mpi",
    "--export": "cluster.env",
    "--output": "the run directory",
    "-o": "the run directory",
    "-c": "cluster.cpus_per_node",
    "--cpus-per-task": "cluster.cpus_per_node",
    "--gpus-per-node": "cluster.devices_per_node",
}


@dataclass(frozen=True)
class Shape:
    """What the rules need to know of the model."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    ffn_size: int
    max_position: int
    experts: int
    source: str


def check(config: Config) -> None:
    """Raise ConfigError with every fault found, one per line."""
    rules = (_nodes, _time, _workflow, _dataflow, _policy, _switching, _plan, _failure, _model, _task, _batches, _options)
    faults = [fault for rule in rules for fault in rule(config)]
    if faults:
        raise ConfigError("\n".join(faults))


def check_allocation(config: Config, num_nodes: int) -> None:
    """Raise ConfigError where the job holds another number of nodes than the configuration is made for."""
    if num_nodes != config.cluster.nodes:
        raise ConfigError(
            f"the allocation has {num_nodes} node{'s' * (num_nodes != 1)}, the configuration needs "
            f"cluster.nodes = {config.cluster.nodes}. "
            f"Submit with `dynarl submit` or `sbatch --nodes={config.cluster.nodes}`, or change cluster.nodes and split"
        )


def _nodes(config: Config) -> Iterator[str]:
    split, nodes = config.split, config.cluster.nodes
    total = split.rollout + split.inference + split.training
    if total != nodes:
        yield (
            f"split: rollout {split.rollout} + inference {split.inference} + training {split.training} = {total}, "
            f"but cluster.nodes = {nodes}"
        )
    cpus = config.cluster.cpus_per_node
    if cpus is not None and cpus < 1:
        yield f"cluster.cpus_per_node = {cpus}: must be 1 or more, or null for all of the allocation"


def _time(config: Config) -> Iterator[str]:
    try:
        limit_s = timelimit.seconds(config.cluster.time)
    except timelimit.TimeLimitError as error:
        yield f"cluster.time: {error}"
        return
    if limit_s is None:
        yield "cluster.time has no limit: give one, so that Slurm can plan and the job can save itself in time"
        return
    before_s = config.cluster.signal_before_s
    if before_s >= limit_s:
        yield (
            f"cluster.signal_before_s = {before_s} s leaves nothing of cluster.time = {config.cluster.time} "
            f"({limit_s} s; "
            "Slurm may signal up to a minute early)"
        )
    if before_s > 65535:
        yield f"cluster.signal_before_s = {before_s}: Slurm takes at most 65535"


def _workflow(config: Config) -> Iterator[str]:
    name = config.algorithm.workflow
    try:
        declared = workflow.declared(name)
    except ConfigError as error:
        yield str(error)
        return
    for component, each in declared.components.items():
        if each.program not in workflow.PROGRAMS:
            yield (
                f"algorithm.workflow = {name}: its component {component} needs the role program {each.program}, "
                f"which this version does not have; it has {', '.join(workflow.PROGRAMS)}"
            )


def _dataflow(config: Config) -> Iterator[str]:
    try:
        declared = workflow.declared(config.algorithm.workflow)
    except ConfigError:
        return  # told by another rule
    able = declared.chunked
    for name in config.dataflow.chunk:
        if name not in able:
            yield (
                f"dataflow.chunk: {name!r} is no channel of the workflow {config.algorithm.workflow} on which whole "
                f"groups go from one role to another; those are {', '.join(able)}"
            )


def _switching(config: Config) -> Iterator[str]:
    """Every node must be able to train by itself: its lock knows nothing of what other nodes hold."""
    if config.policy.switching == "job":
        return
    if config.policy.name != "colocated":
        yield (
            f"policy.switching = node with policy.name = {config.policy.name}: only under colocated do nodes switch by "
            "themselves; set policy.name to colocated, or policy.switching to job"
        )
    devices = config.cluster.devices_per_node
    try:
        layouts = degrees.every(config.training)
    except ConfigError:
        return  # told by another rule
    for each in layouts:
        if (size := each.tp * each.pp * each.ep) > devices:
            yield (
                f"policy.switching = node: a replica of the trainer in layout {each} has tp {each.tp} x pp {each.pp} x "
                f"ep {each.ep} = {size} devices, but a node has cluster.devices_per_node = {devices}; "
                "set policy.switching to job"
            )


def _plan(config: Config) -> Iterator[str]:
    if not config.plan.replan:
        return
    if config.policy.name in TAKING_TURNS:
        yield (
            f"plan.replan with policy.name = {config.policy.name}: all nodes take all roles, so there is no split to change"
        )
    if config.training.layouts:
        yield (
            "plan.replan with training.layouts: both would say how many nodes train; leave out one of them "
            f"(training.layouts is {config.training.layouts})"
        )


def _policy(config: Config) -> Iterator[str]:
    policy, split = config.policy, config.split
    if policy.name in TAKING_TURNS:
        return
    if split.rollout == 0:
        hint = (
            "one node can only take all roles in turn: set policy.name to colocated"
            if config.cluster.nodes == 1
            else "give split.rollout at least one node, or set policy.name to colocated"
        )
        yield f"split.rollout = 0 with policy.name = {policy.name}: nobody would generate; {hint}"
    elif policy.name in ("threshold", "adaptive") and policy.min_rollout_nodes > split.rollout:
        yield (
            f"policy.min_rollout_nodes = {policy.min_rollout_nodes} is more than split.rollout = {split.rollout}: "
            "no node could ever leave"
        )


def _failure(config: Config) -> Iterator[str]:
    """A verifier or tool that may still take its time must not pass for a hung worker."""
    hang_s = config.failure.hang_s.get("environment", 0.0)
    for name in ("verify_timeout_s", "tool_timeout_s"):
        if 0.0 < hang_s < (limit_s := getattr(config.task, name)):
            yield (
                f"failure.hang_s: environment = {hang_s:g} s, but task.{name} = {limit_s:g} s, during which its worker "
                "answers nobody: give hang_s at least that"
            )


def _model(config: Config) -> Iterator[str]:
    layouts = {"training.": degrees.first(config.training)}
    for begins, text in config.training.layouts.items():
        where = f"training.layouts.{begins}: "
        if not begins.isdecimal() or int(begins) < 1:
            yield f"{where}expected the number of an iteration, 1 or more"
            continue
        try:
            layouts[where] = degrees.parse(text)
        except ConfigError as error:
            yield f"{where}{error}"
    devices = config.cluster.devices_per_node
    split = config.split
    most = split.training + split.rollout
    if config.policy.name not in TAKING_TURNS:
        most -= config.policy.min_rollout_nodes if config.policy.name == "threshold" else 1

    def owners_of(layout: degrees.Degrees) -> tuple[int, str]:
        """Training workers that own optimizer state, and how they come about."""
        nodes = layout.nodes or split.training
        name = "nodes" if layout.nodes else "split.training"
        return nodes * devices, f"{name} {nodes} x cluster.devices_per_node {devices} = {nodes * devices} workers"

    for where, layout in layouts.items():
        tp, pp = layout.tp, layout.pp
        owners, product = owners_of(layout)
        if layout.nodes > most:
            yield (
                f"{where}nodes = {layout.nodes}: of split.training {split.training} + split.rollout {split.rollout} "
                f"nodes at most {most} can train, so that some generate"
            )
        if devices % tp:
            yield (
                f"{where}tp = {tp} does not divide cluster.devices_per_node = {devices}: "
                "a tensor-parallel group stays inside a node"
            )
        elif owners % (tp * pp):
            yield f"{where}tp {tp} x pp {pp} = {tp * pp} does not divide {product}"
    try:
        shape = _shape(config)
    except ConfigError as error:
        yield str(error)
        return
    model = shape.source
    if shape.hidden_size % shape.heads:
        yield f"{model}.hidden_size = {shape.hidden_size} is not divisible by {model}.heads = {shape.heads}"
    if shape.heads % shape.kv_heads:
        yield f"{model}.heads = {shape.heads} is not divisible by {model}.kv_heads = {shape.kv_heads}"
    for where, layout in layouts.items():
        (tp, pp, ep, _), (owners, product) = layout, owners_of(layout)
        if shape.layers % pp:
            yield f"{model}: {shape.layers} layers do not divide into {where}pp = {pp} stages"
        if ep > 1 and not shape.experts:
            yield f"{where}ep = {ep}, but the model ({model}) has no experts"
        elif shape.experts % ep:
            yield f"{model}: {shape.experts} experts are not divisible by {where}ep = {ep}"
        elif ep > 1 and owners % (tp * pp) == 0 and owners % (tp * pp * ep):
            yield f"{where}tp {tp} x pp {pp} x ep {ep} = {tp * pp * ep} does not divide {product}"
        for name, size in (("heads", shape.heads), ("ffn_size", shape.ffn_size)):
            if size % tp:
                yield f"{model}.{name} = {size} is not divisible by {where}tp = {tp}"
        if shape.kv_heads % tp and tp % shape.kv_heads:
            yield f"{model}.kv_heads = {shape.kv_heads} is neither a multiple nor a divisor of {where}tp = {tp}"
    prompt, response = config.algorithm.max_prompt_tokens, config.algorithm.max_response_tokens
    if prompt + response > shape.max_position:
        yield (
            f"algorithm.max_prompt_tokens {prompt} + algorithm.max_response_tokens {response} = "
            f"{prompt + response} tokens, "
            f"but {model}.max_position = {shape.max_position}"
        )


def _shape(config: Config) -> Shape:
    model = config.model
    if model.path is None:
        if 0 < model.experts < model.experts_per_token:
            raise ConfigError(
                f"model.experts_per_token = {model.experts_per_token} is more than model.experts = {model.experts}"
            )
        return Shape(
            model.hidden_size,
            model.layers,
            model.heads,
            model.kv_heads,
            model.ffn_size,
            model.max_position,
            model.experts,
            "model",
        )
    file = rundir.config_dir(model.path) / "config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        heads = found["num_attention_heads"]
        return Shape(
            found["hidden_size"],
            found["num_hidden_layers"],
            heads,
            found.get("num_key_value_heads") or heads,
            found["intermediate_size"],
            found["max_position_embeddings"],
            found.get("num_experts") or found.get("num_local_experts") or found.get("n_routed_experts") or 0,
            "model.path",
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {model.path}: cannot read {file}: {error}") from None
    except KeyError as error:
        raise ConfigError(f"model.path = {model.path}: {file} has no {error}") from None


def _task(config: Config) -> Iterator[str]:
    task = config.task
    if task.name in KNOWN_TASKS:
        try:
            open_task(task.name, task.args, config.run.seed)  # which makes no question yet
        except ValueError as error:
            yield str(error)
    elif ":" not in task.name:  # one's own may be where only the nodes find it
        yield f"task.name = {task.name}: known are {', '.join(KNOWN_TASKS)}; your own is package.module:Class"


def _batches(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.prompts_per_step % algorithm.minibatches:
        yield (
            f"algorithm.prompts_per_step = {algorithm.prompts_per_step} groups (of {algorithm.group_size} samples, "
            f"never split) do not divide into algorithm.minibatches = {algorithm.minibatches} "
            f"({algorithm.prompts_per_step / algorithm.minibatches:.2f} groups each)"
        )
    if algorithm.prompts_per_step > config.task.train_size:
        yield (
            f"algorithm.prompts_per_step = {algorithm.prompts_per_step} is more than "
            f"task.train_size = {config.task.train_size}"
        )
    longest = algorithm.max_prompt_tokens + algorithm.max_response_tokens
    for name, limit in (
        ("training", config.training.max_tokens_per_micro_batch),
        ("inference", config.inference.max_tokens_per_micro_batch),
    ):
        if longest > limit:
            yield (
                f"{name}.max_tokens_per_micro_batch = {limit} does not hold one sample of "
                f"{algorithm.max_prompt_tokens} + {algorithm.max_response_tokens} = {longest} tokens"
            )
    for path, value in (
        ("algorithm.temperature", algorithm.temperature),
        ("training.lr", config.training.lr),
        ("algorithm.kl_loss_coef", algorithm.kl_loss_coef),
    ):
        if not math.isfinite(value):
            yield f"{path} = {value}: must be a finite number"


def _options(config: Config) -> Iterator[str]:
    for key, options, computed in (
        ("cluster.sbatch_args", config.cluster.sbatch_args, COMPUTED_SBATCH),
        ("cluster.srun_args", config.cluster.srun_args, COMPUTED_SRUN),
    ):
        for option in options:
            match = re.fullmatch(r"(--[A-Za-z][\w-]*)(?:=.*)?|(-[A-Za-z]).*", option, re.DOTALL)
            if match is None:
                yield (
                    f"{key}: {option!r} is not an option; write it and its value as one item, such as --constraint=a100"
                )
            elif (name := match[1] or match[2]) in computed:
                yield f"{key}: {option!r} is set by dynarl from {computed[name]}"
    for name in config.cluster.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"cluster.env: {name!r} is not the name of an environment variable"
        elif environ.is_secret(name):
            yield (
                f"cluster.env.{name} looks like a secret, and the configuration is kept in the run directory. "
                "Leave it out and export it in the shell that you submit from: Slurm hands it on"
            )
    scratch = config.cluster.scratch
    if scratch is not None and len(scratch) > 60:
        yield (
            f"cluster.scratch = {scratch!r} is {len(scratch)} characters long; "
            "socket paths below it must stay under 108, so at most 60"
        )
