"""`dynarl bench roles`, the part that runs inside the job: what is moving nodes worth, and what does a move cost?

One job, all nodes able to take every role. Each candidate gets the very same work: same weights (the learning rate is
0), same sample ids, hence the same answers. A measurement is a whole iteration, from the start roles to the new weights
on every node. Candidates, interleaved in every round:

- every static split of the nodes into rollout, inference and training (each at least one node); the fastest of the
  first round go on to the later ones, and the medians are over all rounds;
- colocated: all nodes take the roles in turn;
- dynamic: the threshold rule;
- adaptive: forecasts of the end.

Then moves: a node leaves rollout for training while answers are being generated, live; and the same change of split by
ending the step and starting it again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import statistics
import sys
import time
from typing import Any

import msgspec

from dynarl.config.schema import Policy
from dynarl.controller.__main__ import main
from dynarl.controller.job import Job
from dynarl.scheduler.policy import start_roles

log = logging.getLogger(__name__)

ROUNDS = 3
# Static splits that are measured in every round; the others were much slower in the first.
FINALISTS = 6
MOVES = 10
RESTARTS = 3


class RolesBench(Job):
    """The job with its body replaced by measurements; results go to <run>/bench.json."""

    async def body(self) -> None:
        if self.config.warm_start.steps and not self.progress.warm_start_done:
            await self.warm_start()
        nodes = sorted(self.home, key=lambda n: self.home[n] != "training")  # owners first
        candidates: dict[str, tuple[Policy, dict[str, str]]] = {}
        for rollout, inference in itertools.product(range(1, len(nodes) - 1), repeat=2):
            training = len(nodes) - rollout - inference
            if training >= 1:
                roles = ["training"] * training + ["inference"] * inference + ["rollout"] * rollout
                candidates[f"static {rollout}:{inference}:{training}"] = (
                    Policy(name="static"),
                    dict(zip(nodes, roles)),
                )
        candidates["colocated"] = (Policy(name="colocated"), dict.fromkeys(nodes, "rollout"))
        dynamic = msgspec.structs.replace(self.config.policy, name="threshold", lend_owners=True)
        candidates["dynamic"] = (dynamic, start_roles(dynamic, self.home))
        adaptive = msgspec.structs.replace(dynamic, name="adaptive")
        candidates["adaptive"] = (adaptive, start_roles(adaptive, self.home))
        results: dict[str, list[dict[str, float]]] = {name: [] for name in candidates}
        await self.measure(*candidates["colocated"])  # warm: first forward passes, communicators
        for round_ in range(ROUNDS):
            names = list(candidates) if round_ == 0 else finalists(results)
            random.Random(round_).shuffle(names)
            for name in names:
                results[name].append(await self.measure(*candidates[name]))
                log.info(
                    "round %d, %s: %.2f s, %.0f tokens/s",
                    round_ + 1,
                    name,
                    results[name][-1]["seconds"],
                    results[name][-1]["tokens_per_s"],
                )
                self.write({"rounds": results})
        moves = [await self.measure_move(i) for i in range(MOVES)]
        self.write({"rounds": results, "moves": moves})
        restarts = [await self.measure_restart() for _ in range(RESTARTS)]
        self.write({"rounds": results, "moves": moves, "restarts": restarts})

    def write(self, results: dict[str, Any]) -> None:
        """Replace the results file; a reader sees the old or the new one."""
        part = self.run_dir / "bench.json.part"
        part.write_text(json.dumps({"nodes": len(self.home), **results}))
        part.replace(self.run_dir / "bench.json")

    async def measure(self, policy: Policy, roles: dict[str, str]) -> dict[str, float]:
        """One iteration of the fixed work under `policy`, starting in `roles`."""
        began = time.monotonic()
        await self.enter(roles, f"bench: {policy.name}")
        entered = time.monotonic()
        self.monitor.begin(1)
        self.stage = run = self._new_iteration(
            self.draw(1), temperature=self.config.algorithm.temperature, policy=policy
        )
        await self.trainer.begin(1, "grpo")
        groups = await run.accumulate(0)
        accumulated = time.monotonic()
        self.monitor.conclude()
        contributors = {g.node for g in groups}
        await run.train_on({*self.trainer.owner_nodes, *contributors})
        await self.trainer.step(contributors, run.counted_tokens(groups), 0.0)
        stepped = time.monotonic()
        await self.staging.everywhere()
        self.stage = None
        await self.fleet.call_each(self.home, "forget", iteration=1)
        ended = time.monotonic()
        tokens = sum(g.num_tokens for g in groups)
        return {
            "seconds": ended - began,
            "tokens_per_s": tokens / (ended - began),
            "tokens": tokens,
            "enter_s": entered - began,
            "generate_s": run.tally.generated_at - entered,
            "accumulate_s": accumulated - entered,
            "step_s": stepped - accumulated,
            "sync_s": ended - stepped,
            "moves": sum(outcome.committed for outcome in run.tally.switches),
        }

    async def measure_move(self, number: int) -> dict[str, float]:
        """A node leaves rollout for training while it generates; phases in milliseconds."""
        await self.enter(dict.fromkeys(self.home, "rollout"), "bench: move")
        self.stage = run = self._new_iteration(self.draw(1), policy=Policy(name="static"), train=False)
        generating = asyncio.ensure_future(run.generate())
        await asyncio.sleep(1.0)
        node = sorted(n for n, home in self.home.items() if home == "rollout")[number % self.config.split.rollout]
        run._leaving.add(node)
        outcome = await self.epochs.change({node: "training"}, self.weights, "bench: move", run._take_back)
        run._leaving.discard(node)
        await generating
        self.stage = None
        await self.fleet.call_each(self.home, "forget", iteration=1)
        if not outcome.committed:
            raise RuntimeError(f"the move was cancelled: {outcome.reason}")
        given_up = sum(len(g) for g in outcome.given_up.values())
        return {
            **outcome.phases,
            "pause_ms": outcome.pause_ms,
            "pause_without_drain_ms": outcome.pause_ms - outcome.phases["drain_ms"],
            "requests_moved": given_up,
        }

    async def measure_restart(self) -> dict[str, float]:
        """The same change of split by ending the step and starting it with the other split, up to the same readiness.
        """
        began = time.monotonic()
        await self.fleet.stop()
        stopped = time.monotonic()
        await self.set_up()
        ended = time.monotonic()
        return {
            "stop_ms": 1e3 * (stopped - began),
            "start_ms": 1e3 * (ended - stopped),
            "pause_ms": 1e3 * (ended - began),
            "step_ms": 1e3 * (self.step_started - stopped),
        }


def finalists(results: dict[str, list[dict[str, float]]]) -> list[str]:
    """The candidates of the later rounds: the fastest static splits of the first, and all that are not static."""
    static = sorted((n for n in results if n.startswith("static")), key=lambda n: results[n][0]["seconds"])
    return static[:FINALISTS] + [n for n in results if not n.startswith("static")]


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """Medians and ratios from what the job wrote."""
    rate = {name: statistics.median(m["tokens_per_s"] for m in ms) for name, ms in results["rounds"].items()}
    rounds = max(len(ms) for ms in results["rounds"].values())
    finished = [name for name, ms in results["rounds"].items() if len(ms) == rounds]
    static = {name: rate[name] for name in finished if name.startswith("static")}
    best = max(static, key=static.get)
    pauses = sorted(m["pause_without_drain_ms"] for m in results.get("moves", []))
    phases = (
        {p: statistics.median(m[p] for m in results["moves"]) for p in results["moves"][0]}
        if results.get("moves")
        else {}
    )
    restart = statistics.median(r["pause_ms"] for r in results["restarts"]) if results.get("restarts") else None
    out = {
        "schema": 1,
        "bench": "roles",
        "nodes": results["nodes"],
        "tokens_per_s": rate,
        "best_static": best,
        "ratio_to_best_static": rate["dynamic"] / rate[best],
        "ratio_to_colocated": rate["dynamic"] / rate["colocated"],
        "adaptive_to_dynamic": rate["adaptive"] / rate["dynamic"] if "adaptive" in rate else None,
        "ratio_to_best": rate["dynamic"] / max(rate[best], rate["colocated"]),
        "move": phases,
    }
    if pauses and restart:
        out |= {"move_pause_without_drain_ms": statistics.median(pauses), "restart_pause_ms": restart,
                "restart_to_move": restart / phases["pause_ms"]}
    return out


if __name__ == "__main__":
    sys.exit(main(RolesBench))
