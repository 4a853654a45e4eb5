"""Scenarios that cannot be: each fault is told with its arithmetic, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dynarl.errors import ConfigError
from dynarl.perf.device import load_device
from dynarl.perf.memory import inference_memory, rollout_memory, training_memory
from dynarl.perf.model import ModelCost
from dynarl.perf.parallel import Parallel
from dynarl.perf.rollout import kv_capacity_tokens
from dynarl.scheduler.policy import ROLES

if TYPE_CHECKING:
    from dynarl.sim.scenario import Scenario

def check(scenario: Scenario) -> None:
    """Raise ConfigError with every fault found, one per line, each with its arithmetic."""
    faults = [*_counts(scenario)] or [*_divisions(scenario)] or [
        *_batches(scenario), *_memory(scenario), *_numbers(scenario), *_failures(scenario)]
    if faults:
        raise ConfigError("\n".join(f"{scenario.name}: {fault}" for fault in faults))


def _counts(s: Scenario) -> Iterator[str]:
    counts: dict[str, int | None] = {"gpus": s.gpus, "minibatches": s.minibatches, "tools_at_once": s.tools_at_once}
    counts |= {f"{role}.tp": getattr(s, role).tp for role in ROLES} | {"rollout.max_running": s.rollout.max_running}
    for name, count in counts.items():
        if count is not None and count < 1:
            yield f"{name} = {count} must be at least 1"
    if not s.policies:
        yield "policies: there is none to simulate"
    for name, policy in s.policies.items():
        if policy.max_queued < 0:
            yield f"policies.{name}.max_queued = {policy.max_queued} must not be below 0"
        if policy.per_engine is not None and policy.per_engine < 1:
            yield f"policies.{name}.per_engine = {policy.per_engine} must be at least 1"


def _divisions(s: Scenario) -> Iterator[str]:
    model, device = ModelCost.of(s.model), load_device(s.device)
    for role in ROLES:
        tp = getattr(s, role).tp
        if s.width % tp:
            yield f"{role}.tp = {tp} does not divide training.tp = {s.width}, the GPUs that change role together"
            continue
        try:
            Parallel(tp=tp).check(model, device)
        except ConfigError as error:
            yield str(error)
    if s.gpus % s.width:
        yield f"{s.gpus} GPUs / training.tp = {s.width} leaves {s.gpus % s.width} over"
    for role in ROLES:
        if (gpus := getattr(s.placement, role)) < 0 or gpus % s.width:
            yield f"placement.{role} = {gpus} GPUs is no multiple of training.tp = {s.width}"
    placed = [getattr(s.placement, role) for role in ROLES]
    if sum(placed) != s.gpus:
        yield f"placement: {' + '.join(map(str, placed))} = {sum(placed)} GPUs, but gpus = {s.gpus}"
    for role in ("rollout", "training"):
        if not getattr(s.placement, role):
            yield f"placement.{role} = 0: nobody would do it"


def _batches(s: Scenario) -> Iterator[str]:
    groups = s.workload.prompts
    if groups % s.minibatches:
        yield f"{groups} prompts / minibatches = {s.minibatches} leaves {groups % s.minibatches} over"
    elif s.nodes > groups // s.minibatches and any(p.policy.shares == "even" for p in s.policies.values()):
        yield (
            f"{s.nodes} replicas of the trainer, but a minibatch has {groups} / {s.minibatches} = "
            f"{groups // s.minibatches} groups: even shares leave some without"
        )


def _memory(s: Scenario) -> Iterator[str]:
    model, device, longest = ModelCost.of(s.model), load_device(s.device), s.prompt_tokens + s.response_tokens
    dp = s.placement.training // s.width
    for fits in (
        lambda: rollout_memory(device, model, s.rollout.tp, s.rollout.memory_fraction),
        lambda: inference_memory(device, model, Parallel(tp=s.inference.tp), longest),
        lambda: training_memory(device, model, Parallel(tp=s.training.tp, dp=dp), longest),
    ):
        try:
            fits()
        except ConfigError as error:
            yield str(error)
            return
    room = kv_capacity_tokens(device, model, s.rollout.tp, s.rollout.memory_fraction)
    if room < longest:
        yield (
            f"a prompt of {s.prompt_tokens} tokens and an answer of {s.response_tokens} are {longest} tokens, but an engine "
            f"of {s.rollout.tp} GPUs holds {room}: give it more GPUs or a larger memory_fraction"
        )


def _numbers(s: Scenario) -> Iterator[str]:
    """Times must not be negative, factors be above 0."""
    times = {"moves.leave_rollout_s": s.moves.leave_rollout_s, "moves.sync_s": s.moves.sync_s, "decision_s": s.decision_s}
    times |= {f"moves.join_s.{role}": seconds for role, seconds in s.moves.join_s.items()}
    times |= {f"{role}.sequence_s": getattr(s, role).sequence_s for role in ("inference", "training")}
    times |= {"training.step_s": s.training.step_s}
    for name, seconds in times.items():
        if seconds < 0:
            yield f"{name} = {seconds:g} must be 0 seconds or more"
    overhead_s = s.rollout.step_overhead_s
    if overhead_s is not None and overhead_s <= 0:
        yield f"rollout.step_overhead_s = {overhead_s:g} must be above 0 seconds"
    for name in s.errors.__struct_fields__:
        if (factor := getattr(s.errors, name)) <= 0:
            yield f"errors.{name} = {factor:g} is a factor, above 0"
    if not 1 <= s.measured <= s.iterations:
        yield f"measured = {s.measured} of iterations = {s.iterations}: at least 1, and not more than there are"


def _failures(s: Scenario) -> Iterator[str]:
    nodes = list(s.homes)
    for index, failure in enumerate(s.failures):
        if failure.node not in nodes:
            yield f"failures[{index}].node = {failure.node!r} is none of the {len(nodes)} nodes, {nodes[0]} to {nodes[-1]}"
        if failure.iteration > s.iterations:
            yield f"failures[{index}].iteration = {failure.iteration}: there are iterations = {s.iterations}"
