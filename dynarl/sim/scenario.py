"""What is to be simulated, as a YAML file: model, devices, placement, workload, policies; and the world that follows.

A scenario lies over the files it `extends`, in their order, key by key. So what several share is written once:

    extends: [dynarl/7b.yaml, dynarl/math.yaml]
    gpus: 64
    placement: {rollout: 40, inference: 8, training: 16}

`configs/scenarios/` has those that come with dynarl. The unit that changes role is a trainer's replica: `training.tp` GPUs,
which in other roles hold one replica to score with, or `training.tp / rollout.tp` engines.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from dynarl.config import schema, structs, text
from dynarl.errors import ConfigError
from dynarl.perf.device import Efficiency
from dynarl.perf.training import GRADIENT_BYTES
from dynarl.scheduler.policy import ROLES
from dynarl.sim.scenario_check import check
from dynarl.sim.scenario_costs import Costs
from dynarl.sim.workload import Workload
from dynarl.sim.world import Failure, World

class Section(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Unknown keys are refused."""


class Rollout(Section, kw_only=True):
    """Engines of `tp` GPUs. memory_fraction: of a GPU's memory for weights and KV; step_overhead_s: of a decode step, for
    what is neither arithmetic nor traffic (launches, sampling, the engine's scheduler); efficiency: shares of peaks."""

    tp: int = 1
    max_running: int = 128
    memory_fraction: float = 0.55
    step_overhead_s: float | None = None
    efficiency: Efficiency | None = None


class Stage(Section, kw_only=True):
    """Inference or training with `tp` GPUs in a replica. sequence_s: of every sequence, however short; step_s: of every
    optimizer step; efficiency: shares of peaks."""

    tp: int = 1
    sequence_s: float = 0.0
    step_s: float = 0.0
    efficiency: Efficiency | None = None


class Placement(Section, kw_only=True):
    """GPUs of each home role."""

    rollout: int
    inference: int
    training: int


class Moves(Section, kw_only=True):
    """Seconds that a node's change of role takes. leave_rollout_s: to abort, hand over and free the memory; join: of the
    weights, and what else the new role needs; sync_s: of new weights into a rollout engine, beyond the network."""

    leave_rollout_s: float
    join_s: dict[Literal["rollout", "inference", "training"], float]
    sync_s: float = 0.0


class PolicyOf(Section, kw_only=True):
    """A policy by its settings in a job's configuration (section `policy`), and what else the systems differ in: order of
    requests in an engine, membership of minibatches, requests that an engine may hold beyond those that run.
    per_engine: requests that a rollout engine keeps when others leave, in place of policy.threshold per node. lockstep:
    the loss is reduced over all replicas of the trainer in every micro-batch, a sequence here, so that each one takes as
    long as the longest of those that train at the time."""

    policy: schema.Policy
    order: Literal["priority", "arrival"] = "priority"
    membership: Literal["fixed", "completion"] = "completion"
    max_queued: int = 0
    per_engine: int | None = None
    lockstep: bool = False


class ErrorOf(Section, kw_only=True):
    """Factors on what the simulated hardware takes, by which it differs from what the planner's profile says."""

    rollout: float = 1.0
    inference: float = 1.0
    training: float = 1.0
    moves: float = 1.0


class Scenario(Section, kw_only=True):
    """One experiment. iterations: of the job, of which the last `measured` count; network: analytic or flow-level (max-min
    fair on a rail-optimised topology)."""

    name: str
    about: str = ""
    model: str
    device: str
    gpus: int
    placement: Placement
    workload: Workload
    minibatches: int = 1
    rollout: Rollout = Rollout()
    inference: Stage = Stage()
    training: Stage = Stage()
    moves: Moves
    policies: dict[str, PolicyOf]
    network: Literal["analytic", "flow"] = "analytic"
    throughput: Literal["tokens/s", "requests/s"] = "tokens/s"
    iterations: int = 1
    measured: int = 1
    tools_at_once: int | None = None
    decision_s: float = 0.02
    errors: ErrorOf = ErrorOf()
    failures: list[Failure] = []

    def slowed(self, role: str, factor: float) -> Scenario:
        """The same where work of this role takes `factor` times as long."""
        off = msgspec.structs.replace(self.errors, **{role: getattr(self.errors, role) * factor})
        return msgspec.structs.replace(self, errors=off)

    # --- sizes

    @property
    def throughput_unit(self) -> str:
        return self.throughput

    @property
    def width(self) -> int:
        """GPUs of the unit that changes role."""
        return self.training.tp

    @property
    def nodes(self) -> int:
        return self.gpus // self.width

    @property
    def homes(self) -> dict[str, str]:
        """{node: home role}"""
        roles = [role for role in ("training", "rollout", "inference") for _ in range(getattr(self.placement, role) // self.width)]
        return {f"n{index:0{len(str(self.nodes))}}": role for index, role in enumerate(roles)}

    @property
    def prompt_tokens(self) -> int:
        return self.workload.prompt.cap if self.workload.prompt else schema.Algorithm().max_prompt_tokens

    @property
    def response_tokens(self) -> int:
        """Of the longest answer, with what tools write."""
        tools, response = self.workload.tools, self.workload.response
        most = response.cap if response else schema.Algorithm().max_response_tokens
        return most + (tools.most_calls * tools.tokens.cap if tools else 0)

    # --- the world

    def world(self, policy: str) -> World:
        """Under one of the scenario's policies. Raises ConfigError."""
        if policy not in self.policies:
            raise ConfigError(f"{self.name} has no policy {policy!r}; it has {', '.join(self.policies)}")
        chosen, costs = self.policies[policy], Costs(self)
        config = self.config(chosen)
        return World(
            config=config,
            homes=self.homes,
            gpus_per_device=self.width,
            engines_per_device=self.width // self.rollout.tp,
            step=costs.step,
            kv_capacity_tokens=costs.kv_tokens,
            draw=self.workload.draw,
            times=costs.times(chosen.lockstep),
            network=costs.network(),
            gradient_bytes=costs.model.num_params * GRADIENT_BYTES,
            weight_bytes=costs.model.weight_bytes,
            tools_at_once=self.tools_at_once,
            decision_s=self.decision_s,
            failures=self.failures,
        )

    def config(self, chosen: PolicyOf) -> schema.Config:
        """What a job of this kind would be configured with; a simulated device is a whole replica."""
        split = {role: getattr(self.placement, role) // self.width for role in ROLES}
        engines, policy = self.width // self.rollout.tp, chosen.policy
        if chosen.per_engine is not None:
            policy = msgspec.structs.replace(policy, threshold=chosen.per_engine * engines)
        return schema.Config(
            cluster=schema.Cluster(nodes=self.nodes, devices_per_node=1),
            split=schema.Split(**split),
            policy=policy,
            algorithm=schema.Algorithm(
                workflow="agentic" if self.workload.tools else "grpo",
                prompts_per_step=self.workload.prompts,
                group_size=self.workload.group_size,
                minibatches=self.minibatches,
                membership=chosen.membership,
                max_prompt_tokens=self.prompt_tokens,
                max_response_tokens=self.response_tokens,
            ),
            rollout=schema.Rollout(
                max_running=self.rollout.max_running * engines, max_queued=chosen.max_queued * engines, order=chosen.order
            ),
            # No worker hangs here, and nothing is so slow that it must be taken for dead.
            failure=schema.Failure(hang_s={}, give_back_s=3600.0, no_progress_s=86400.0),
        )


# --- files


def scenario_names() -> list[str]:
    """Those that come with dynarl."""
    return sorted(file.name.removesuffix(".yaml") for file in _folder().iterdir() if file.name.endswith(".yaml"))


def load_scenario(name: str, overrides: Iterable[str] = (), /, **changes: Any) -> Scenario:
    """By name, or by the path of a file; overrides: `a.b=c` laid over it; changes: the same as values. Checked. Raises
    ConfigError.
    """
    if "/" in name or name.endswith(".yaml"):
        folder, file = Path(name).parent, Path(name).name
    elif name in scenario_names():
        folder, file = _folder(), f"{name}.yaml"
    else:
        raise ConfigError(f"scenario {name!r}: there are {', '.join(scenario_names())}; or give the path of a file")
    found = _read(folder, file, ())
    origin = found.origin
    found = text.laid_over(found, text.node(changes, f"{name}, changed"))
    for option in overrides:
        path, _, value = option.partition("=")
        found = text.laid_over(found, text.layer(path, value))
    found.items.setdefault("name", text.node(file.removesuffix(".yaml"), file))
    scenario = structs.convert(found._replace(origin=origin), Scenario)
    check(scenario)
    return scenario


def _read(folder: Any, file: str, within: tuple[str, ...]) -> text.Mapping:
    """A file over those that it extends, which are looked for beside the first one and in what comes with dynarl."""
    if file in within:
        raise ConfigError(f"{' extends '.join([*within, file])}: a circle")
    path = folder / file
    if not path.is_file():
        path = _folder() / file
    if not path.is_file():
        raise ConfigError(f"no scenario file {folder / file}" + (f", which {within[-1]} extends" if within else ""))
    try:
        found = text.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(found, text.Mapping):
        said = structs.shown(text.values(found))
        raise ConfigError(f"{path}: expected keys such as `model:` and `gpus:`, found {said}")
    below = text.Mapping({}, found.origin)
    extends = text.values(found.items.pop("extends", text.Sequence([], found.origin)))
    for other in extends if isinstance(extends, list) else [extends]:
        below = text.laid_over(below, _read(folder, str(other), (*within, file)))
    return text.laid_over(below, found)


def _folder() -> Any:
    return resources.files("dynarl") / "share" / "configs" / "scenarios"
