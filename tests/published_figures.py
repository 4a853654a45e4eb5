"""Figures of the DynaRL paper (OSDI'26), read from its plots, and what the simulator makes of the same experiments.

    python tests/published_figures.py [SCENARIO ...] [--policy P ...] [--seeds N]

prints a line for each scenario and policy: published, simulated, deviation. Nothing in dynarl reads this file.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import defaultdict
from typing import Iterator

from dynarl.sim.run import simulate
from dynarl.sim.scenario import load_scenario

STATIC, DYNAMIC, PRIORITY, OURS = "static", "dynamic-published", "priority-published", "dynarl"

# Math: thousand tokens per second of RLinf and DynaRL (figure 11). Agentic: requests per second of RLinf, of DynaRL, and of
# DynaRL with priority for requests back from tools (figure 12).
MATH = {
    "1.5b-64": (154, 238),
    "1.5b-128": (222, 311),
    "7b-64": (73.3, 105.2),
    "7b-128": (126.6, 192.3),
    "32b-64": (16.6, 21.1),
    "32b-128": (29.7, 41.6),
}
AGENTIC = {
    "1.5b-64": (15.8, 21.9, 24.2),
    "1.5b-128": (21.9, 28.3, 30.7),
    "7b-64": (8.0, 10.9, 12.0),
    "7b-128": (12.3, 18.3, 20.4),
    "32b-64": (1.48, 1.58, 1.88),
    "32b-128": (2.68, 3.59, 4.22),
}
# Figure 13: 7B, 64 GPUs. Intervals [s] with the GPUs of rollout, inference and training; the last ends the iteration.
TIMELINE = {
    STATIC: [(0, 504, (64, 0, 0)), (505, 545, (0, 64, 0)), (550, 981, (0, 0, 64))],
    DYNAMIC: [(0, 257, (64, 0, 0)), (257, 430, (40, 8, 16)), (430, 542, (16, 8, 32)), (542, 735, (4, 8, 52))],
    PRIORITY: [(0, 226, (64, 0, 0)), (226, 379, (40, 8, 16)), (379, 672, (4, 8, 52))],
}
TIMELINE_SCENARIO = "dynarl-7b-64-agentic"


def published() -> Iterator[tuple[str, str, float]]:
    """(scenario, policy, throughput as the simulator has it)."""
    for task, table, unit in (("math", MATH, 1e3), ("agentic", AGENTIC, 1.0)):
        for size, row in table.items():
            for policy, value in zip((STATIC, DYNAMIC, PRIORITY), row):
                yield f"dynarl-{size}-{task}", policy, unit * value


def simulated(scenario: str, policy: str, seeds: int) -> list[float]:
    """Throughput of each seed."""
    return [simulate(load_scenario(scenario), policy, seed)["throughput"] for seed in range(1, seeds + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*")
    parser.add_argument("--policy", action="append")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    known = {(scenario, policy): value for scenario, policy, value in published()}
    print(f"{'scenario':26} {'policy':20} {'published':>10} {'simulated':>10} {'deviation':>10} {'to best':>9} {'real s':>7}")
    gains = []
    for scenario in args.scenarios or dict.fromkeys(scenario for scenario, _ in known):
        found: dict[str, float] = defaultdict(float)
        for policy in args.policy or (STATIC, DYNAMIC, PRIORITY, OURS):
            if policy == PRIORITY and (scenario, policy) not in known:
                continue  # nothing comes back from tools
            began = time.perf_counter()
            found[policy] = statistics.fmean(simulated(scenario, policy, args.seeds))
            took = time.perf_counter() - began
            value = known.get((scenario, policy))
            deviation = f"{100 * (found[policy] / value - 1):+9.1f}%" if value else ""
            best = max(found[DYNAMIC], found[PRIORITY])
            gain = f"{100 * (found[policy] / best - 1):+8.1f}%" if policy == OURS and best else ""
            if gain:
                gains.append(math.log(found[policy] / best))
            shown = f"{value:10.5g}" if value else " " * 10
            print(f"{scenario:26} {policy:20} {shown} {found[policy]:10.5g} {deviation:>10} {gain:>9} {took:7.1f}", flush=True)
    if gains:
        print(f"dynarl over the best published policy, geometric mean: {100 * math.expm1(statistics.fmean(gains)):+.1f} %")


if __name__ == "__main__":
    main()
