"""What simulations of several policies and seeds say together: means with confidence intervals, and ratios of policies
seed by seed, as data for the table, the JSON and the page of `dynarl simulate`."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

# In the order in which a picture stacks them; idle is everything on the move or without a role.
KINDS = ("rollout", "inference", "training", "idle")
# Two-sided 95 % quantiles of Student's t for 1, 2, 3 ... degrees of freedom; beyond them a series around the normal one.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Run = Mapping[str, Any]  # policy, seed, makespan_s, throughput, timeline


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and half the width of its 95 % confidence interval; None for one value.

    >>> mean, half = interval([1.0, 2.0, 3.0])
    >>> mean, round(half, 3)
    (2.0, 2.484)
    """
    mean, freedom = statistics.fmean(values), len(values) - 1
    if freedom < 1:
        return mean, None
    if freedom <= len(T95):
        quantile = T95[freedom - 1]
    else:
        z = statistics.NormalDist().inv_cdf(0.975)
        # Abramowitz and Stegun 26.7.5, its first terms
        quantile = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return mean, quantile * statistics.stdev(values) / math.sqrt(len(values))


def summary(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """By policy: `makespan_s`, `throughput` (mean over seeds), their `*_half` widths, `faster` = makespan of the first
    policy divided by its own, seed by seed, and `share` of all GPU time by kind."""
    by_policy: dict[str, dict[int, Run]] = defaultdict(dict)
    for run in runs:
        by_policy[run["policy"]][run["seed"]] = run
    base = next(iter(by_policy.values()), {})
    found = {}
    for policy, seeds in by_policy.items():
        faster = [base[seed]["makespan_s"] / run["makespan_s"] for seed, run in seeds.items() if seed in base]
        entry: dict[str, Any] = {"seeds": sorted(seeds), "share": shares(list(seeds.values()))}
        for name, values in (
            ("makespan_s", [run["makespan_s"] for run in seeds.values()]),
            ("throughput", [run["throughput"] for run in seeds.values()]),
            ("faster", faster),
        ):
            entry[name], entry[f"{name}_half"] = interval(values)
        found[policy] = entry
    return found


def shares(runs: Sequence[Run]) -> dict[str, float]:
    """Part of all GPU seconds of these runs in each kind."""
    seconds = dict.fromkeys(KINDS, 0.0)
    for run in runs:
        for span in run["timeline"]:
            for kind in KINDS:
                seconds[kind] += span[kind] * (span["end_s"] - span["start_s"])
    total = sum(seconds.values()) or 1.0
    return {kind: value / total for kind, value in seconds.items()}


def drawn_s(runs: Sequence[Run]) -> float:
    """Seconds that a picture of these runs has to show. A timeline is of the last iteration, which may take longer than
    `makespan_s`, the mean of all."""
    return max(run["timeline"][-1]["end_s"] for run in runs)


def sampled(timeline: Sequence[Mapping[str, float]], times: int, end_s: float) -> list[dict[str, float]]:
    """Mean GPUs in each kind in `times` equal parts of 0..end_s; nothing after the end of the run."""
    width = end_s / times
    parts = [dict.fromkeys(KINDS, 0.0) for _ in range(times)]
    for span in timeline:
        first, last = int(span["start_s"] / width), min(int(span["end_s"] / width), times - 1)
        for index in range(first, last + 1):
            covered = min(span["end_s"], (index + 1) * width) - max(span["start_s"], index * width)
            if covered > 0:
                for kind in KINDS:
                    parts[index][kind] += span[kind] * covered / width
    return parts
