"""`dynarl bench vps`, planning: how long plans of the largest published models take to compute, in how much memory,
and how long they would take to run.

Every measurement is a process of its own, with the layouts' caches cold (the ModelSpec is at hand, as it is in a job):
the whole table with relabelling by the one who decides, and the part of its busiest rank as that rank computes it. The
optimizer's state moves (master and both moments, 12 bytes a parameter), from which parameters are cast on arrival.

    python -m dynarl.bench.vps_plan CASE [RANK]     prints one measurement as JSON
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from dynarl.vps.layout import Layout
from dynarl.vps.layout_text import parse
from dynarl.vps.plan import Plan, plan_for_rank, plan_transition
from dynarl.vps.presets import preset

KINDS = ("master", "exp_avg", "exp_avg_sq")
RANKS_PER_NODE = 8
LINK_BYTES_PER_S = 25e9
REPEATS = 3
# name: model, from, to
CASES = {
    "70b-64-128": ("llama2-70b", "tp=8,pp=4,dp=2", "tp=8,pp=2,dp=8"),
    "70b-128-256": ("llama2-70b", "tp=8,pp=4,dp=4", "tp=4,pp=4,dp=16"),
    "235b-64-128": (
        "qwen3-235b-a22b",
        "tp=4,pp=4,dp=4,ep=8,etp=1,pp_layers=24:24:23:23",
        "tp=4,pp=2,dp=16,ep=16,etp=1",
    ),
    "235b-128-256": (
        "qwen3-235b-a22b",
        "tp=4,pp=8,dp=4,ep=8,etp=1,pp_layers=12*6:11*2",
        "tp=4,pp=2,dp=32,ep=16,etp=1",
    ),
}
# Seconds of a whole transition on 128 A800 (arXiv 2605.18815), by model.
PUBLISHED_S = {"llama2-70b": 2.0, "qwen3-235b-a22b": 4.36}


def measure(repeats: int = REPEATS) -> list[dict[str, Any]]:
    """Medians of each case, in fresh processes."""
    return [_measure(case, repeats) for case in CASES]


def _measure(case: str, repeats: int) -> dict[str, Any]:
    whole = [_run(case) for _ in range(repeats)]
    alone = [_run(case, str(whole[0]["busiest"]), *map(str, whole[0]["dst_ranks"])) for _ in range(repeats)]
    shown = {key: value for key, value in whole[0].items() if key not in ("busiest", "dst_ranks")}
    return shown | {
        "whole_s": statistics.median(run["seconds"] for run in whole),
        "whole_peak_bytes": max(run["peak_bytes"] for run in whole),
        "one_rank_s": statistics.median(run["seconds"] for run in alone),
        "one_rank_peak_bytes": max(run["peak_bytes"] for run in alone),
    }


def _run(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "dynarl.bench.vps_plan", *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout)


def _whole(case: str) -> dict[str, Any]:
    model, src, dst = _case(case)
    began = time.perf_counter()
    plan = plan_transition(model, src, dst, kinds=KINDS, links=LINK_BYTES_PER_S, ranks_per_node=RANKS_PER_NODE)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"case": case, "seconds": seconds, "peak_bytes": peak} | _figures(plan)


def _figures(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.spec.name,
        "ranks": [len(plan.src.ranks), len(plan.dst.ranks)],
        "bytes_held": sum(plan.destination_bytes.values()),
        "bytes_moved": sum(plan.bytes_received.values()),
        "bytes_saved_by_relabelling": plan.bytes_saved_by_relabelling,
        "largest_state": max(max(plan.source_bytes.values()), max(plan.destination_bytes.values())),
        "largest_peak": max(plan.peak_bytes.values()),
        "imbalance": plan.imbalance,
        "rounds": plan.num_rounds,
        "link_bytes_per_s": LINK_BYTES_PER_S,
        "projected_s": plan.seconds,
        "projected_at_best_s": plan.seconds_at_best,
        "published_s": PUBLISHED_S[plan.spec.name],
        "busiest": max(plan.ranks, key=lambda rank: plan.bytes_received[rank] + plan.bytes_sent[rank]),
        "dst_ranks": plan.dst.ranks,
    }


def _one_rank(case: str, rank: int, dst_ranks: list[int]) -> dict[str, Any]:
    model, src, dst = _case(case)
    dst = dst.relabelled(dst_ranks)
    began = time.perf_counter()
    plan_for_rank(model, src, dst, rank, kinds=KINDS, ranks_per_node=RANKS_PER_NODE)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def _case(case: str) -> tuple[Any, Layout, Layout]:
    # Libraries are loaded and the model is known, as in a job; nothing else is.
    plan_transition(preset("smollm2-135m"), parse("dp=2"), parse("tp=3"), kinds=KINDS, ranks_per_node=2)
    model, src, dst = CASES[case]
    spec = preset(model)
    assert spec.tensors and len(spec.shapes)  # computed now
    return spec, parse(src), parse(dst)


def main(arguments: list[str]) -> None:
    case, *rest = arguments
    print(json.dumps(_one_rank(case, int(rest[0]), list(map(int, rest[1:]))) if rest else _whole(case)))


if __name__ == "__main__":
    main(sys.argv[1:])
