"""What training sums up about its tokens (see rl.losses)."""

from __future__ import annotations

from collections.abc import Sequence

Stats = dict[str, float]
STATS_BYTES = 2048  # more than any set of statistics takes as JSON


def add_stats(parts: Sequence[Stats]) -> Stats:
    """Sum of statistics; names in _max take the maximum.

    >>> add_stats([{"tokens": 2.0, "x_max": 1.0}, {"tokens": 3.0, "x_max": 0.5}])
    {'tokens': 5.0, 'x_max': 1.0}
    """
    total: Stats = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value
            else:
                total[name] = max(total[name], value) if name.endswith("_max") else total[name] + value
    return total
