"""What the scheduler is told of each component: a few numbers, however many nodes and requests are behind them.

Means hide what matters most: one instance that is late holds the whole iteration. So utilisation comes as p90 and
maximum too, and the slowest instance is named with how far it is behind the median.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass


# The controller hears so many reports a second of all rollout workers together: receiving one takes it a tenth of a
# millisecond. But each worker reports at least, and at most, this often.
REPORTS_PER_S, LEAST_INTERVAL_S, MOST_INTERVAL_S = 16.0, 0.25, 5.0


def figures_interval_s(num_workers: int) -> float:
    """Seconds between two reports of one of so many rollout workers.

    >>> [figures_interval_s(n) for n in (1, 8, 1000)]
    [0.25, 0.5, 5.0]
    """
    return min(max(num_workers / REPORTS_PER_S, LEAST_INTERVAL_S), MOST_INTERVAL_S)


@dataclass(frozen=True)
class Instance:
    """One node's part. rate: tokens per second; kv_share: of its KV memory, 0 to 1; running, queued: requests."""

    running: int = 0
    queued: int = 0
    rate: float = 0.0
    kv_share: float = 0.0


@dataclass(frozen=True)
class Summary:
    """One component. finished: answers or leases so far; groups: complete groups put out; stage_s: median seconds of
    one lease (rollout: 0); slowest: the instance furthest behind, behind: its median rate divided by its own rate,
    at equal load (1: as fast as the others).
    """

    component: str
    instances: int = 0
    running: int = 0
    queued: int = 0
    finished: int = 0
    groups: int = 0
    tokens_per_s: float = 0.0
    kv_mean: float = 0.0
    kv_p90: float = 0.0
    kv_max: float = 0.0
    stage_s: float = 0.0
    slowest: str = ""
    behind: float = 1.0

    def flat(self) -> dict[str, float]:
        """Its numbers as {component/name: value}, as the journal has them."""
        return {f"{self.component}/{k}": round(v, 4) for k, v in asdict(self).items() if not isinstance(v, str)}


def summarize(
    component: str,
    instances: Mapping[str, Instance],
    *,
    finished: int = 0,
    groups: int = 0,
    stage_s: float = 0.0,
    expected_rate: Mapping[str, float] | None = None,
) -> Summary:
    """`expected_rate`: what each instance should do at its load; instances are compared by rate over that.

    >>> nodes = {"n1": Instance(4, rate=90.0), "n2": Instance(4, rate=30.0, kv_share=0.9), "n3": Instance(4, rate=90.0)}
    >>> found = summarize("rollout", nodes)
    >>> found.slowest, found.behind, found.kv_max, found.kv_p90
    ('n2', 3.0, 0.9, 0.9)
    """
    expected_rate = expected_rate or {}
    pace = {n: i.rate / expected_rate.get(n, 1.0) for n, i in instances.items() if i.running and i.rate > 0}
    slowest = min(pace, key=lambda node: (pace[node], node), default="")
    kv = sorted(instance.kv_share for instance in instances.values()) or [0.0]
    return Summary(
        component,
        len(instances),
        sum(i.running for i in instances.values()),
        sum(i.queued for i in instances.values()),
        finished,
        groups,
        sum(i.rate for i in instances.values()),
        statistics.fmean(kv),
        kv[math.ceil(0.9 * len(kv)) - 1],
        kv[-1],
        stage_s,
        slowest,
        statistics.median(pace.values()) / pace[slowest] if slowest else 1.0,
    )
