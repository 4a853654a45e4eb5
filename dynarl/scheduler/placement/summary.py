"""All that is told of a plan: its tree with times and memory, why it was chosen, and what would change it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from dynarl.errors import ConfigError
from dynarl.perf.device import Device
from dynarl.perf.model import ModelCost
from dynarl.scheduler.placement.cycle import Cycle
from dynarl.scheduler.placement.plan import (
    Alone,
    Execution,
    InTurn,
    Node,
    SideBySide,
    leaves,
    mode,
    parts,
    ranges,
    shape,
)
from dynarl.scheduler.placement.problem import Posed, Problem, pose
from dynarl.scheduler.placement.search import Found, find_schedule
from dynarl.scheduler.placement.stability import Stability, stability

# How much faster a stage is made to see what comes of it.
NUDGE = 0.10
# Nodes that are added to see what they bring.
MORE = (1, 2, 4, 8)
# Most alternatives that are told.
TOLD = 4


@dataclass(frozen=True)
class Planned:
    """The outcome of planning. found: the plan first, then the others; times: of carrying the plan out."""

    posed: Posed
    found: list[Found]
    times: Execution
    stability: Stability
    search_s: float

    @property
    def plan(self) -> Node:
        return self.found[0].plan

    @property
    def seconds(self) -> float:
        return self.found[0].seconds


def plan(problem: Problem, model: ModelCost | None = None, device: Device | None = None) -> Planned:
    """Raises ConfigError where the problem has no solution."""
    posed = pose(problem, model, device)
    started = time.perf_counter()
    found = _found(posed, "any")
    search_s = time.perf_counter() - started
    times = Execution(posed.flow, posed.stages, problem.groups, posed.sync_s)
    times.run(found[0].plan)
    sure = stability(posed.flow, posed.stages, problem.groups, [each.plan for each in found], posed.sync_s)
    return Planned(posed, found, times, sure, search_s)


def _found(posed: Posed, wanted: str) -> list[Found]:
    problem = posed.problem
    return find_schedule(
        posed.flow, posed.stages, problem.devices, problem.groups, unit=posed.unit, mode=wanted, sync_s=posed.sync_s
    )


def modes(planned: Planned) -> dict[str, float | None]:
    """Seconds of the best plan of each pure mode; None where there is none."""
    found: dict[str, float | None] = {}
    for name in ("temporal", "spatial"):
        try:
            posed = pose(planned.posed.problem, planned.posed.model, planned.posed.device, name)
            found[name] = _found(posed, name)[0].seconds
        except ConfigError:
            found[name] = None
    return found


def with_more(planned: Planned) -> list[dict[str, Any]]:
    """What further nodes bring: nodes, seconds, and the share of time that they save."""
    problem, model, device = planned.posed.problem, planned.posed.model, planned.posed.device
    result = []
    for more in MORE:
        larger = msgspec.structs.replace(problem, devices=problem.devices + more * planned.posed.unit)
        try:
            seconds = _found(pose(larger, model, device), "any")[0].seconds
        except ConfigError:
            continue  # a number of devices that nothing divides
        result.append(
            {"units": more, "devices": larger.devices, "seconds": seconds, "saved": 1 - seconds / planned.seconds}
        )
    return result


def sensitivity(planned: Planned) -> list[dict[str, Any]]:
    """What each stage's cost does to the whole: the share of time saved where the stage takes NUDGE less, most first."""
    posed, found = planned.posed, []
    for stage in range(len(posed.stages)):
        quicker = Execution(
            posed.flow, posed.stages, posed.problem.groups, posed.sync_s, {stage: 1 - NUDGE}, known=planned.times.known
        )
        saved = 1 - quicker.run(planned.plan) / planned.seconds
        found.append({"stage": name_of(posed, stage), "saved": saved, "nudge": NUDGE})
    return sorted(found, key=lambda each: -each["saved"])


def name_of(posed: Posed, stage: int) -> str:
    return "+".join(posed.flow.vertices[stage])


def kind_of(planned: Planned) -> str:
    """temporal, spatial or hybrid; a cycle whose members lie apart counts as side by side."""
    posed, kinds = planned.posed, set()
    for leaf in leaves(planned.plan):
        if isinstance(posed.stages[leaf.stage], Cycle):
            kinds.add("spatial" if len(_layout(posed, leaf).degrees) > 1 else "temporal")
    if not isinstance(planned.plan, Alone):
        kinds.add(mode(planned.plan))
    return kinds.pop() if len(kinds) == 1 else "hybrid" if kinds else "temporal"


def _layout(posed: Posed, leaf: Alone):
    return posed.stages[leaf.stage].layout(leaf.devices, float(posed.problem.groups), leaf.shared)


def as_json(planned: Planned, *, more: bool = True) -> dict[str, Any]:
    """Everything, for scripts. Seconds, bytes; devices as [first, end)."""
    posed, problem = planned.posed, planned.posed.problem
    told = {
        "workflow": [list(names) for names in posed.flow.vertices],
        "model": posed.model.name if posed.model else None,
        "device": posed.device.name if posed.device else None,
        "devices": problem.devices,
        "devices_per_node": devices_per_node(posed),
        "unit": posed.unit,
        "groups": problem.groups,
        "group_size": problem.group_size,
        "seconds": planned.seconds,
        "tokens_per_s": tokens_per_s(planned),
        "mode": kind_of(planned),
        "shape": shape(posed.flow, planned.plan),
        "plan": tree(planned),
        "sync_s": planned.times.synced(planned.plan),
        "why": {
            "modes": modes(planned),
            "alternatives": [
                {
                    "shape": shape(posed.flow, each.plan),
                    "seconds": each.seconds,
                    "slower": each.seconds / planned.seconds - 1,
                }
                for each in planned.found[1 : 1 + TOLD]
            ],
            "sensitivity": sensitivity(planned),
            "stability": planned.stability._asdict(),
        },
        "memory_limit_bytes": posed.device.memory_bytes if posed.device else None,
        "search_s": planned.search_s,
    }
    return told | ({"more": with_more(planned)} if more else {})


def tokens_per_s(planned: Planned) -> float | None:
    problem = planned.posed.problem
    if problem.lengths is None:
        return None
    return problem.groups * problem.group_size * problem.lengths.sequence / planned.seconds


def devices_per_node(posed: Posed) -> int:
    return posed.problem.devices_per_node or (posed.device.devices_per_node if posed.device else 1)


def tree(planned: Planned) -> dict[str, Any]:
    """The plan as nested objects. Parts of the same kind are in one list; chunks: pieces of the whole batch in which a
    part gets what the one before it made.
    """
    return _tree(planned, planned.plan, ranges(planned.plan), 1)


def _tree(planned: Planned, node: Node, places: dict[int, tuple[int, int]], pieces: int) -> dict[str, Any]:
    if isinstance(node, Alone):
        return _leaf(planned, node, places[node.stage])
    inner, chunks = parts(node, pieces)
    told = [_tree(planned, part, places, each) for part, each in zip(inner, chunks, strict=True)]
    return {
        "kind": "in_turn" if isinstance(node, InTurn) else "side_by_side",
        "devices": [min(each["devices"][0] for each in told), max(each["devices"][1] for each in told)],
        "start_s": min(each["start_s"] for each in told),
        "end_s": max(each["end_s"] for each in told),
        "chunks": chunks[1:] if isinstance(node, SideBySide) else None,
        "parts": told,
    }


def _leaf(planned: Planned, leaf: Alone, place: tuple[int, int]) -> dict[str, Any]:
    posed, busy = planned.posed, planned.times.busy[leaf.stage]
    lies = _layout(posed, leaf)
    return {
        "kind": "stage",
        "stage": name_of(posed, leaf.stage),
        "devices": list(place),
        "used": lies.used,
        "layout": lies.text,
        "degrees": lies.degrees,
        "memory_bytes": lies.memory_bytes,
        "start_s": float(busy[0][0]),
        "end_s": float(busy[-1][1]),
        "busy_s": float(np.sum([end - start for start, end in busy])),
        "periods": [list(each) for each in busy],
        "switching": [list(each) for each in planned.times.switching.get(leaf.stage, [])],
    }


def stages_of(told: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """The stages of a tree as `tree` tells it."""
    return [told] if told["kind"] == "stage" else [leaf for part in told["parts"] for leaf in stages_of(part)]
