"""What is to be planned: a file such as those in configs/plans, or what a job's configuration says.

model: qwen2.5-7b
device: h100
devices: 64
workflow: grpo
groups: 512
group_size: 16
lengths: {prompt: 512, median: 7000, sigma: 0.9, cap: 28672}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dynarl.config import structs, text
from dynarl.errors import ConfigError
from dynarl.hypergraph import workflow
from dynarl.hypergraph.workflow import Workflow
from dynarl.perf.device import Device, load_device
from dynarl.perf.memory import OPTIMIZER_BYTES
from dynarl.perf.model import ModelCost
from dynarl.scheduler.placement.cycle import Cycle, Turn
from dynarl.scheduler.placement.flow import Flow
from dynarl.scheduler.placement.generation import DEGREES, Generation
from dynarl.scheduler.placement.lengths import Lengths
from dynarl.scheduler.placement.passes import Passes
from dynarl.scheduler.placement.replicas import replicas
from dynarl.scheduler.placement.search import Mode
from dynarl.scheduler.placement.stage import Measured, Stage

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Unknown keys are refused."""


class Seen(_Part):
    """A component that was seen at work: seconds for one iteration on so many devices; see `Measured`."""

    seconds: Annotated[float, Meta(gt=0)]
    devices: Positive
    unit: Positive = 1
    fixed_s: Seconds = 0.0
    level_s: Seconds = 0.0
    load_s: Seconds = 0.0


class Rounds(_Part):
    """A member of a cycle: a round of n episodes on d devices takes fixed_s + item_s * ceil(n / d)."""

    fixed_s: Seconds
    item_s: Seconds
    most: Annotated[float, Meta(ge=1)] = float("inf")


class Loop(_Part):
    """A cycle: how often its episodes go round, its members by component, episodes that a device with both
    holds, and the seconds to switch it between the two in each round; load_s: of both on one device."""

    rounds: Positive
    members: dict[str, Rounds]
    together_most: float = float("inf")
    switch_s: Seconds = 0.0
    load_s: Seconds = 0.0


class Problem(_Part):
    """See the top of the module. unit: what is given to a part, whole nodes or single devices.

    seen: components with measured times in place of computed ones; loop: the costs of a cycle, where there is one;
    max_running, max_running_shared: requests that an engine may decode together, alone and where it takes turns;
    residue_gb: what a role that sleeps leaves on a device.
    """

    devices: Positive
    groups: Positive
    about: str = ""
    model: str = ""
    device: str = ""
    experts_per_token: int | None = None
    workflow: str | dict[str, Any] = workflow.DEFAULT
    group_size: Positive = 1
    minibatches: Positive = 1
    unit: Literal["node", "device"] = "node"
    devices_per_node: Positive | None = None
    lengths: Lengths | None = None
    max_running: Positive = 256
    kv_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.85
    microbatch_tokens: Positive | None = None
    max_running_shared: Positive | None = None
    rollout_tp: Annotated[tuple[Positive, ...], Meta(min_length=1)] = DEGREES
    residue_gb: Annotated[float, Meta(ge=0)] = 4.0
    tool_workers: Positive = 64
    seen: dict[str, Seen] = {}
    loop: Loop | None = None

    def __post_init__(self) -> None:
        if self.minibatches > self.groups:
            raise ValueError(f"minibatches = {self.minibatches} of groups = {self.groups} leaves some without a group")


@dataclass(frozen=True)
class Posed:
    """A problem made ready for the search."""

    problem: Problem
    workflow: Workflow
    flow: Flow
    stages: Sequence[Stage]
    sync_s: dict[int, float]
    unit: int
    device: Device | None
    model: ModelCost | None


def parse(data: text.Node | dict[str, Any], source: str) -> Problem:
    """Raises ConfigError that quotes what is wrong. source: where plain values are from."""
    return structs.convert(text.node(data, source) if isinstance(data, dict) else data, Problem)


def pose(problem: Problem, model: ModelCost | None = None, device: Device | None = None, mode: Mode = "any") -> Posed:
    """Flow, stages and the rest. model, device: in place of those that the problem names; mode: of members of cycles.
    Raises ConfigError.
    """
    declared = (
        workflow.declared(problem.workflow)
        if isinstance(problem.workflow, str)
        else workflow.parse(problem.workflow, "of the plan")
    )
    flow = Flow.of(declared)
    device = device or (load_device(problem.device) if problem.device else None)
    model = model or (ModelCost.of(problem.model, problem.experts_per_token) if problem.model else None)
    per_node = problem.devices_per_node or (device.devices_per_node if device else 1)
    unit = per_node if problem.unit == "node" else 1
    if problem.devices % unit:
        raise ConfigError(
            f"devices = {problem.devices} are {problem.devices / unit:g} nodes of {unit}: give whole nodes, or unit: device"
        )
    maker = _Maker(problem, declared, device, model, mode)
    stages = [maker.stage(names) for names in flow.vertices]
    return Posed(problem, declared, flow, stages, maker.sync_s(flow), unit, device, model)


@dataclass(frozen=True)
class _Maker:
    problem: Problem
    workflow: Workflow
    device: Device | None
    model: ModelCost | None
    mode: Mode

    def stage(self, names: Sequence[str]) -> Stage:
        if len(names) > 1:
            return self._cycle(names)
        name = names[0]
        if seen := self.problem.seen.get(name):
            return Measured(
                seen.seconds, seen.devices, self.problem.groups, seen.unit, seen.fixed_s, seen.level_s, seen.load_s
            )
        program = self.workflow.components[name].program
        if program == "environment":
            raise ConfigError(f"component {name} has devices of its own; say in `seen` how long it takes")
        for needed in ("device", "model", "lengths"):
            if not getattr(self, needed, None) and not getattr(self.problem, needed):
                raise ConfigError(f"the cost of {name} follows from device, model and lengths; {needed} is missing")
        return self._generation() if program == "rollout" else self._passes(trains=program != "inference")

    def _generation(self) -> Generation:
        p = self.problem
        return Generation(
            self.device, self.model, p.lengths, p.group_size, (p.max_running, p.max_running_shared or p.max_running),
            p.kv_fraction, 1e9 * p.residue_gb, p.rollout_tp, p.tool_workers,
        )  # fmt: skip

    def _passes(self, trains: bool) -> Passes:
        p, lengths = self.problem, self.problem.lengths
        tokens = p.microbatch_tokens or lengths.longest
        if tokens < lengths.longest:
            raise ConfigError(
                f"microbatch_tokens = {tokens} does not hold one sequence of {lengths.longest} tokens "
                f"(prompt {lengths.prompt} + cap {lengths.cap} + results of tools)"
            )
        ways = replicas(self.device, self.model, lengths.mean_context, tokens, training=trains, most=p.devices)
        stage = Passes(
            list(ways), p.group_size, lengths.sequence, tokens, p.groups, self.device.memory_bytes,
            self.device.host_bytes_per_s,
            self.model.weight_bytes + (OPTIMIZER_BYTES * self.model.num_params if trains else 0), 1e9 * p.residue_gb,
            p.minibatches if trains else 0,
        )  # fmt: skip
        return stage.useful(p.devices)

    def _cycle(self, names: Sequence[str]) -> Cycle:
        loop = self.problem.loop
        if loop is None or set(loop.members) != set(names):
            given = "nothing" if loop is None else ", ".join(loop.members)
            raise ConfigError(
                f"{' and '.join(names)} work in a cycle: give `loop` with the costs of these; it has {given}"
            )
        if len(names) != 2:
            raise ConfigError(f"{', '.join(names)} work in one cycle; a plan knows cycles of two")
        first, second = (Turn(name, *msgspec.structs.astuple(loop.members[name])) for name in names)
        way = {"any": "any", "temporal": "together", "spatial": "apart"}[self.mode]
        return Cycle(first, second, loop.rounds, loop.together_most, loop.switch_s, loop.load_s, way)

    def sync_s(self, flow: Flow) -> dict[int, float]:
        """Weights to each holder's devices by the network: a replica's share for each of its devices."""
        if not self.model or not self.device:
            return {}
        network = self.device.efficiency.network * self.device.inter_bytes_per_s
        within_node = min(self.device.devices_per_node, self.problem.devices)
        return {holder: self.model.weight_bytes / within_node / network for _, holder in flow.sync}
