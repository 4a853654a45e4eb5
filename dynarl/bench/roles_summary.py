"""What `dynarl bench roles` makes of its measurements: medians over rounds, ratios, and where the time went."""

from __future__ import annotations

import statistics
from typing import Any

# Static splits that are measured in every round; the others were much slower in the first.
FINALISTS = 6
STATIC, BY_ARRIVAL = "static ", " by arrival"

Measurements = dict[str, list[dict[str, float]]]  # candidate -> one for each round


def rollout_nodes(name: str) -> int:
    """
    >>> rollout_nodes("static 5:1:2"), rollout_nodes("adaptive")
    (5, 0)
    """
    return int(name.removeprefix(STATIC).partition(":")[0]) if name.startswith(STATIC) else 0


def cannot_win(name: str, results: Measurements) -> bool:
    """Whether a static split cannot be the fastest: to generate took longer with more nodes than another split took for
    everything.

    >>> done = {"static 6:1:1": [{"generate_s": 3.0, "seconds": 4.0}], "static 2:3:3": [{"generate_s": 5.0, "seconds": 6.0}]}
    >>> cannot_win("static 1:3:4", done), cannot_win("static 3:2:3", done), cannot_win("adaptive", done)
    (True, False, False)
    """
    nodes, measured = rollout_nodes(name), {other: each[0] for other, each in results.items() if rollout_nodes(other) and each}
    best_s = min((each["seconds"] for each in measured.values()), default=0.0)
    return bool(nodes) and any(
        rollout_nodes(other) > nodes and each["generate_s"] > best_s for other, each in measured.items()
    )


def finalists(results: Measurements) -> list[str]:
    """The candidates of the later rounds: the fastest static splits of the first, and all that are not static."""
    static = sorted((n for n in results if n.startswith(STATIC)), key=lambda n: results[n][0]["seconds"])
    return static[:FINALISTS] + [n for n in results if not n.startswith(STATIC)]


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """results: {nodes, work, rounds: Measurements, and where they were measured moves, restarts}."""
    measured: Measurements = results["rounds"]
    rounds = max(map(len, measured.values()))
    medians = {name: _medians(each) for name, each in measured.items()}
    finished = {name: medians[name] for name, each in measured.items() if len(each) == rounds}
    rate = {name: median["tokens_per_s"] for name, median in medians.items()}
    best = max((name for name in finished if name.startswith(STATIC)), key=rate.__getitem__)
    moving = [name for name in finished if not name.startswith(STATIC)]
    out = {
        "bench": "roles",
        "nodes": results["nodes"],
        "work": results["work"],
        "tokens_per_s": rate,
        "best_static": best,
        "ratio_to_best_static": rate["dynamic"] / rate[best],
        "ratio_to_colocated": rate["dynamic"] / rate["colocated"],
        "ratio_to_best": rate["dynamic"] / max(rate[best], rate["colocated"]),
        "adaptive_to_dynamic": rate["adaptive"] / rate["dynamic"],
        "to_best_static": {name: rate[name] / rate[best] for name in moving},
        "priority_to_arrival": {
            name: rate[name] / rate[name + BY_ARRIVAL] for name in moving if name + BY_ARRIVAL in rate
        },
        "breakdown": finished,
    }
    if results.get("moves") and results.get("restarts"):
        move = _medians(results["moves"])
        restart = _medians(results["restarts"])["pause_ms"]
        out |= {
            "move": move,
            "move_pause_without_drain_ms": move["pause_without_drain_ms"],
            "restart_pause_ms": restart,
            "restart_to_move": restart / move["pause_ms"],
        }
    return out


def _medians(measured: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(each[key] for each in measured) for key in measured[0]}
