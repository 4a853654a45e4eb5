"""Plans and jobs: a problem from a job's configuration, and the configuration that carries a plan out.

A job of this version gives whole nodes to rollout, inference and training, which is less than a plan can say:

    all stages in turn on all nodes        policy.name: colocated, all nodes in split.training
    rollout | inference | training         policy.name: static, nodes in split, chunks in dataflow.chunk
    rollout | (inference > training)       the same with split.inference: 0
    (rollout | inference) > training       policy.name: adaptive: nodes train when they have generated

and `plan.stage_s` has what each stage is expected to take, by which a run knows when the plan does not hold. Other plans
are printed with the nearest that can be carried out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynarl import rundir
from dynarl.config import load, text, validate
from dynarl.config.schema import Config
from dynarl.errors import ConfigError
from dynarl.perf.model import ModelCost
from dynarl.scheduler.placement.lengths import Lengths
from dynarl.scheduler.placement.plan import Execution, InTurn, Node, SideBySide, leaves, parts, ranges, shape
from dynarl.scheduler.placement.problem import Posed, Problem, parse
from dynarl.scheduler.placement.summary import Planned, devices_per_node, name_of
from dynarl.vps.spec import ModelSpec, SpecError

# What an answer's median length and the spread of its logarithm are taken to be, where nothing says so.
MEDIAN_SHARE, SIGMA = 0.25, 0.8
# A task's own vocabulary is some dozens of symbols; embeddings are the least of a small model.
SMALL_VOCABULARY = 128
# `cluster.device` and the file of configs/devices that is taken for it.
DEVICES = {"cuda": "h100", "cpu": "cpu-core"}
ROLES = ("rollout", "inference", "training")


def read(path: Path) -> text.Mapping:
    """A file's values, with their lines. Raises ConfigError."""
    try:
        parsed = text.parse(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(parsed, text.Mapping):
        raise ConfigError(f"{path}: expected keys such as `devices:` (a plan) or sections such as `cluster:` (a job)")
    return parsed


def is_plan_file(data: text.Mapping) -> bool:
    """Whether it is a plan file rather than a job's configuration; those have sections."""
    keys = set(data.items)
    return "devices" in keys or not keys & set(Config.__struct_fields__) - {"model"}


def overridden(data: text.Mapping, options: Sequence[str]) -> text.Mapping:
    """Values of a plan file with `a.b=c` options laid over them; c is YAML. Raises ConfigError."""
    origin = data.origin
    for option in options:
        path, equals, value = option.partition("=")
        if not equals or not all(path.split(".")):
            raise ConfigError(f"--set {option!r}: expected KEY=VALUE, such as --set devices=128")
        data = text.laid_over(data, text.layer(path, value))
    return data._replace(origin=origin)


def problem(
    path: Path, overrides: Sequence[str], device: str | None, lengths: str | None
) -> tuple[Problem, ModelCost, Config, list[str]]:
    """A job's problem, model and configuration, and what was assumed. Raises ConfigError."""
    config = load.load(path, overrides)
    device = device or DEVICES[config.cluster.device]
    notes = [f"devices are taken to be {device}; --device names another"]
    algorithm = config.algorithm
    law: dict[str, Any] = {"median": max(1.0, MEDIAN_SHARE * algorithm.max_response_tokens), "sigma": SIGMA}
    given = _parsed(lengths)
    if not {"median", "sigma"} & given.keys():
        notes.append(
            f"answers are taken to have a median of {law['median']:g} tokens and a spread (sigma) of {SIGMA:g}; "
            "--lengths says better"
        )
    try:
        lengths_law = msgspec.convert(
            law | {"prompt": algorithm.max_prompt_tokens, "cap": algorithm.max_response_tokens} | given, Lengths
        )
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"--lengths {lengths}: {error}") from None
    cluster = config.cluster
    posed = {
        "devices": cluster.nodes * cluster.devices_per_node,
        "devices_per_node": cluster.devices_per_node,
        "device": device,
        "workflow": algorithm.workflow,
        "groups": algorithm.prompts_per_step,
        "group_size": algorithm.group_size,
        "minibatches": algorithm.minibatches,
        "max_running": config.rollout.max_running,
        "microbatch_tokens": min(
            config.training.max_tokens_per_micro_batch, config.inference.max_tokens_per_micro_batch
        ),
        "rollout_tp": [1],  # an engine of this version has one device
        "tool_workers": config.task.tool_workers,
        **({"residue_gb": 0.0} if cluster.device == "cpu" else {}),
    }
    return parse(posed | {"lengths": msgspec.to_builtins(lengths_law)}, str(path)), _model(config), config, notes


def _parsed(lengths: str | None) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for item in (lengths or "").split(",") if lengths else ():
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--lengths {lengths}: {item!r} is not NAME=VALUE, such as median=400")
        given[name.strip()] = text.values(text.parse(value, "--lengths", numbered=False))
    return given


def _model(config: Config) -> ModelCost:
    model = config.model
    if model.path is not None:
        file = rundir.config_dir(model.path) / "config.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            return ModelCost.of(ModelSpec.from_hf(found, name=Path(model.path).name), found.get("num_experts_per_tok"))
        except (OSError, ValueError, SpecError) as error:
            raise ConfigError(f"model.path = {model.path}: cannot plan with {file}: {error}") from None
    spec = ModelSpec(
        name=f"{config.run.name}'s model",
        layers=model.layers,
        hidden=model.hidden_size,
        heads=model.heads,
        groups=model.kv_heads,
        head_dim=model.hidden_size // model.heads,
        ffn=model.ffn_size,
        vocab=SMALL_VOCABULARY,
        tied=model.tied,
        dtype=model.dtype,
        experts=model.experts,
        expert_ffn=model.ffn_size if model.experts else 0,
        moe_layers=frozenset(range(model.layers)) if model.experts else frozenset(),
    )
    return ModelCost.of(spec, model.experts_per_token if model.experts else None)


def settings(planned: Planned) -> dict[str, Any]:
    """The settings of a job that carries out the plan, or the fastest other one that can be; reason: why another, or
    why none. settings None: none can be.
    """
    posed, faults = planned.posed, []
    for number, each in enumerate(planned.found):
        try:
            found = _settings(posed, each.plan)
        except ConfigError as error:
            faults.append(str(error))
            continue
        reason = ""
        if number:
            slower = each.seconds / planned.seconds - 1
            reason = f"this is {shape(posed.flow, each.plan)}, {slower:.1%} slower than the plan: {faults[0]}"
        return {
            "shape": shape(posed.flow, each.plan),
            "settings": found,
            "reason": reason,
            "slower": each.seconds / planned.seconds - 1,
        }
    return {"shape": None, "settings": None, "reason": faults[0], "slower": None}


def _settings(posed: Posed, plan: Node) -> dict[str, Any]:
    """Raises ConfigError where a job of this version cannot carry it out."""
    if strange := [name for names in posed.flow.vertices for name in names if name not in ROLES]:
        raise ConfigError(f"a job gives nodes to {', '.join(ROLES)}, and not to {', '.join(strange)}")
    per_node, named = devices_per_node(posed), shape(posed.flow, plan)
    nodes = posed.problem.devices // per_node
    size = {name_of(posed, stage): end - first for stage, (first, end) in ranges(plan).items()}
    if odd := [f"{name} {devices}" for name, devices in size.items() if devices % per_node]:
        raise ConfigError(f"a job gives whole nodes of {per_node} devices, and not {', '.join(odd)}")
    split = {name: devices // per_node for name, devices in size.items()}
    if named in ("rollout > inference > training", "rollout > training"):
        policy, split = "colocated", {"rollout": 0, "inference": 0, "training": nodes}
    elif named in ("rollout | inference | training", "rollout | training"):
        policy = "static"
    elif named == "rollout | (inference > training)":
        policy, split = "static", split | {"inference": 0}
    elif named == "(rollout | inference) > training":
        policy, split = "adaptive", split | {"training": 1, "rollout": split["rollout"] - 1}
    else:
        raise ConfigError(f"no policy of a job carries out {named}")
    split = {role: split.get(role, 0) for role in ROLES}
    split["rollout"] += nodes - sum(split.values()) if policy != "colocated" else 0  # nodes that the plan leaves idle
    found = {
        "policy.name": policy,
        "cluster.nodes": nodes,
        "cluster.devices_per_node": per_node,
        **{f"split.{role}": number for role, number in split.items()},
    }
    layouts = {
        name_of(posed, leaf.stage): posed.stages[leaf.stage].layout(
            leaf.devices, float(posed.problem.groups), leaf.shared
        )
        for leaf in leaves(plan)
    }
    if (tp := layouts["rollout"].degrees.get("tp", 1)) > 1:
        raise ConfigError(f"an engine of a job has one device, and not tp={tp}: `--set rollout_tp=[1]` plans so")
    degrees = layouts["training"].degrees
    found |= {f"training.{name}": degrees[name] for name in ("tp", "pp", "ep") if name in degrees}
    if chunk := _chunks(posed, plan):
        found["dataflow.chunk"] = chunk
    times = Execution(posed.flow, posed.stages, posed.problem.groups, posed.sync_s)
    times.run(plan)
    busy_s = {
        name_of(posed, stage): sum(end - start for start, end in periods) for stage, periods in times.busy.items()
    }
    return found | {"plan.stage_s": {name: round(seconds, 3) for name, seconds in busy_s.items()}}


def _chunks(posed: Posed, plan: Node) -> dict[str, int]:
    """Groups that are gathered before rollout's, and then inference's, are handed on; by channel."""
    beside = plan.first if isinstance(plan, InTurn) else plan
    if not isinstance(beside, SideBySide):
        return {}
    pieces = parts(beside)[1][1:]
    # What takes turns gets the same chunks one after the other.
    channels = ("trajectories",) if beside is not plan else ("trajectories", "scored")
    return {name: posed.problem.groups // pieces[min(i, len(pieces) - 1)] for i, name in enumerate(channels)}


def written(config: Config, job: dict[str, Any]) -> str:
    """The configuration with a plan's settings, as a job file. Raises ConfigError where there are none, or they do not
    go with the rest.
    """
    if job["settings"] is None:
        raise ConfigError(f"nothing is written: {job['reason']}")
    data = msgspec.to_builtins(config)
    for path, value in job["settings"].items():
        section, key = path.split(".")
        data[section][key] = value
    planned = msgspec.convert(data, Config)
    validate.check(planned)
    return load.dump(planned)
