"""Scalars of one iteration, under verl's names where verl has one."""

from __future__ import annotations

import statistics
from typing import Any

from dynarl.config.schema import Config
from dynarl.controller.iteration import Iteration
from dynarl.controller.overhead import Overhead
from dynarl.scheduler.policy import ROLES


def of_iteration(
    config: Config,
    run: Iteration,
    overhead: Overhead,
    steps: list[dict[str, Any]],
    num_nodes: int,
    began: float,
    ended: float,
) -> dict[str, float]:
    """`began`, `ended`: monotonic seconds of the iteration without the distribution of new weights. `alloc/nodes/*` are
    means over the iteration; `scheduling/share` is the controller's CPU time for decisions, routing of requests and
    telemetry (without its way through the socket), divided by the iteration's time."""
    groups = list(run.ledger.groups.values())
    lengths = [group.tokens[s] for group in groups for s in group.samples]
    rewards = [group.rewards[s] for group in groups for s in group.samples]
    cut = sum(finish == "length" for group in groups for finish in group.finish.values())
    advantages, stats, scores = run.results.advantages(), run.results.stats(), run.tally.score_stats
    tokens = max(stats.get("tokens", 0.0), 1.0)
    seconds = ended - began
    data = {
        "training/global_step": steps[-1]["version"],
        **_spread("critic/rewards", rewards),
        **_spread("critic/advantages", advantages),
        **_spread("response_length", lengths),
        "response_length/clip_ratio": cut / len(lengths),
        "actor/pg_loss": stats.get("pg_loss", 0.0) / tokens,
        "actor/pg_clipfrac": stats.get("pg_clipfrac", 0.0) / tokens,
        "actor/ppo_kl": stats.get("ppo_kl", 0.0) / tokens,
        "actor/entropy": stats.get("entropy", 0.0) / tokens,
        "actor/grad_norm": statistics.fmean(step["grad_norm"] for step in steps),
        "actor/lr": steps[-1]["lr"],
        "groups/zero_std_frac": run.results.num_flat_groups / len(groups),
        "reward/timeouts": run.tally.timed_out,
        "timing_s/step": seconds,
        "timing_s/gen": run.tally.generated_at - began,
        "timing_s/update_actor": sum(step["seconds"] for step in steps),
        "perf/total_num_tokens": sum(lengths) + run.tally.prompt_tokens,
        "perf/throughput": (sum(lengths) + run.tally.prompt_tokens)
        / seconds
        / (num_nodes * config.cluster.devices_per_node),
        "perf/tokens_per_s": sum(lengths) / seconds,
        "perf/time_per_step": seconds,
        "alloc/moved_requests": run.requests.num_moved,
        "alloc/switch_count": sum(outcome.committed for outcome in run.tally.switches),
        **{f"scheduling/{part}_s": spent for part, spent in sorted(overhead.seconds.items())},
        "scheduling/share": overhead.seconds.total() / seconds,
    }
    if "kl_loss" in stats:
        data["actor/kl_loss"] = stats["kl_loss"] / tokens
    if calls := sum(run.tally.tool_calls):
        data |= {
            "tools/calls/mean": statistics.fmean(run.tally.tool_calls),
            "tools/calls/max": max(run.tally.tool_calls),
            "tools/seconds/mean": run.tally.tool_seconds / calls,  # of a call, its wait for a free worker included
            "tools/masked_tokens_frac": run.results.num_masked_tokens / sum(lengths),
        }
    if run.tally.scored_at:
        data["timing_s/old_log_prob"] = run.tally.scored_at - began
    if scores.get("tokens"):
        data["training/rollout_probs_diff_mean"] = scores["rollout_probs_diff"] / scores["tokens"]
        data["training/rollout_probs_diff_max"] = scores.get("rollout_probs_diff_max", 0.0)
    run.role_changes.count_node_seconds()
    node_seconds = run.tally.node_seconds
    for role in ROLES:
        data[f"alloc/nodes/{role}"] = num_nodes * node_seconds.get(role, 0.0) / sum(node_seconds.values())
    committed = [outcome for outcome in run.tally.switches if outcome.committed]
    for phase in sorted({name for outcome in committed for name in outcome.phases}):
        data[f"timing_s/switch/{phase.removesuffix('_ms')}"] = 1e-3 * sum(
            outcome.phases.get(phase, 0.0) for outcome in committed
        )
    return data


def _spread(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}/mean": statistics.fmean(values), f"{name}/max": max(values), f"{name}/min": min(values)}
