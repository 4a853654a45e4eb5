"""`dynarl bench plan`: how long the search for a plan takes over the number of devices and of stages.

CPU seconds of one thread. Every search begins with nothing known; posing the problem (ways to cut the models, their
memory) is counted apart. The yardstick is the published search of RLinf (OSDI'26): 5.98 s for three stages on 1024
devices.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from dynarl.hypergraph import workflow
from dynarl.scheduler.placement.lengths import Lengths
from dynarl.scheduler.placement.plan import shape
from dynarl.scheduler.placement.problem import Problem, pose
from dynarl.scheduler.placement.search import find_schedule

SIZES = (8, 64, 256, 1024, 4096, 16384)
REPEATS = 5
PUBLISHED_S = {("grpo", 1024): 5.98}
LONG = Lengths(prompt=500, median=6000, sigma=0.95, cap=28172)
SHORT = Lengths(prompt=500, median=2500, sigma=0.9, cap=11788)
# name: workflow, answers to a prompt, prompts for each device, lengths. Many long answers are best in turn, few short ones
# side by side, where there is a size to be found for every stage.
CASES: dict[str, tuple[str, int, float, Lengths]] = {
    "grpo": ("grpo", 16, 8, LONG),
    "grpo, few answers": ("grpo", 8, 1, SHORT),
    "ppo with a critic": ("ppo-critic", 1, 8, SHORT),
}


def measure(sizes: tuple[int, ...] = SIZES, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """Median CPU seconds for every case, unit (a node, a single device) and size."""
    return [
        _measure(case, devices, unit, repeats) for case in CASES for unit in ("node", "device") for devices in sizes
    ]


def _measure(case: str, devices: int, unit: str, repeats: int) -> dict[str, Any]:
    name, group_size, groups, lengths = CASES[case]
    problem = Problem(
        devices=devices, groups=int(groups * max(devices, 64)), group_size=group_size, model="qwen2.5-7b", device="h100",
        workflow=name, unit=unit, minibatches=4, lengths=lengths,
    )  # fmt: skip
    posing, searching = [], []
    for _ in range(repeats):
        started = time.process_time()
        posed = pose(problem)
        posing.append(time.process_time() - started)
        started = time.process_time()
        found = find_schedule(posed.flow, posed.stages, devices, problem.groups, unit=posed.unit, sync_s=posed.sync_s)
        searching.append(time.process_time() - started)
    return {
        "case": case,
        "stages": len(workflow.declared(name).roles),
        "devices": devices,
        "unit": unit,
        "pose_s": statistics.median(posing),
        "search_s": statistics.median(searching),
        "published_s": PUBLISHED_S.get((case, devices)),
        "plan": shape(posed.flow, found[0].plan),
        "seconds": found[0].seconds,
    }
