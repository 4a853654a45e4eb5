"""`dynarl bench sim`: how fast the simulator is, and how that grows with the size of what it simulates.

Each case is one iteration of the scenario `dynarl-7b-128-math`, with more or fewer GPUs and prompts, in a process of its
own, so that its memory is its own too. The controller in the loop is the production one, decisions included.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

from dynarl.sim.run import run
from dynarl.sim.scenario import load_scenario

BASE = "dynarl-7b-128-math"
# (GPUs, prompts of 16 answers)
SIZES = ((32, 128), (64, 256), (128, 512), (512, 1024), (4096, 4096))
POLICIES = ("static", "dynamic-published", "dynarl")
REPEATS = 3


def measure(note: Callable[[str], None]) -> dict[str, Any]:
    """Rows {policy, gpus, sequences, seconds (CPU, median), wall_s, events, events_per_s, peak_bytes}, and by policy
    the exponent with which seconds grow with the sequences."""
    rows = []
    for policy in POLICIES:
        for gpus, prompts in SIZES:
            note(f"{policy}: {gpus} GPUs, {16 * prompts} sequences")
            found = [_apart(policy, gpus, prompts) for _ in range(REPEATS if prompts <= 512 else 1)]
            seconds = statistics.median(each["seconds"] for each in found)
            rows.append({
                "policy": policy, "gpus": gpus, "sequences": 16 * prompts, "seconds": seconds,
                "wall_s": statistics.median(each["wall_s"] for each in found), "events": found[0]["events"],
                "events_per_s": found[0]["events"] / seconds, "peak_bytes": max(each["peak_bytes"] for each in found),
            })  # fmt: skip
    return {"bench": "sim", "rows": rows, "growth": {policy: _growth(rows, policy) for policy in POLICIES}}


def _growth(rows: list[dict[str, Any]], policy: str) -> float:
    """Slope of log seconds over log sequences, first to last size: 1 is linear."""
    own = [row for row in rows if row["policy"] == policy]
    first, last = own[0], own[-1]
    return math.log(last["seconds"] / first["seconds"]) / math.log(last["sequences"] / first["sequences"])


def _apart(policy: str, gpus: int, prompts: int) -> dict[str, float]:
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(simulate, (policy, gpus, prompts))


def simulate(policy: str, gpus: int, prompts: int) -> dict[str, float]:
    """One case, in this process."""
    parts = {"inference": gpus // 8, "training": gpus // 4}
    scenario = load_scenario(
        BASE, gpus=gpus, placement={**parts, "rollout": gpus - sum(parts.values())}, workload={"prompts": prompts}
    )
    world = scenario.world(policy)
    began, wall = time.process_time(), time.perf_counter()
    done = run(world, 1)
    return {
        "seconds": time.process_time() - began,
        "wall_s": time.perf_counter() - wall,
        "events": done.num_events,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
