"""`dynarl bench roles`, the part that runs inside the job: what is moving nodes worth, and what does a move cost?

One job, all nodes able to take every role. Each candidate gets the very same work: same weights (the learning rate is
0), same sample ids, hence the same answers. A measurement is a whole iteration, from the start roles to the new weights
on every node. Candidates, interleaved in every round:

- every static split of the nodes into rollout, inference and training (each at least one node); the fastest of the
  first round go on to the later ones, and the medians are over all rounds;
- colocated: all nodes take the roles in turn;
- dynamic: the threshold rule;
- adaptive: forecasts of the end, by what it has learned in all iterations before;
- where answers call tools, the last two with requests that wait in the engines by arrival instead of by priority.

Then, where they do not, moves: a node leaves rollout for training while answers are being generated, live; and the same
change of split by ending the step and starting it again.
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
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from dynarl.bench.roles_summary import BY_ARRIVAL, STATIC, Measurements, cannot_win, finalists, rollout_nodes
from dynarl.config.schema import Policy
from dynarl.controller.__main__ import main
from dynarl.controller.iteration import Iteration
from dynarl.controller.job import Job
from dynarl.controller.router import Router
from dynarl.controller.telemetry import Monitor
from dynarl.scheduler.policy import ROLES

log = logging.getLogger(__name__)

ROUNDS = 3
MOVES = 10
RESTARTS = 3
# How often it is looked which nodes are at work: a hundred times in the shortest phases that matter.
LOOK_S = 0.05


@dataclass(frozen=True)
class Candidate:
    """roles: those at the start, None for what the policy begins with; order: of requests that wait in an engine."""

    name: str
    policy: Policy
    roles: dict[str, str] | None = None
    order: str = "priority"


class RolesBench(Job):
    """The job with its body replaced by measurements; results go to <run>/bench.json."""

    work: dict[str, float]  # what the last iteration had to do

    async def body(self) -> None:
        if self.config.warm_start.steps and not self.progress.warm_start_done:
            await self.warm_start()
        agentic = self.config.algorithm.workflow == "agentic"
        candidates = self.candidates(agentic)
        # What the adaptive policy learns it learns in its own iterations, as in a job of its own; the others share.
        own = Monitor(self.config, self.journal)
        own.numbers = self.monitor.numbers  # one journal has the decisions of both
        self.learned = {False: (self.monitor, self.router), True: (own, Router(self.config, own.lengths, own.figures_gap_s))}
        # Not counted: first forward passes, communicators, and what the adaptive policy learns in its first iteration.
        for name, candidate in candidates.items():
            if not name.startswith(STATIC) and candidate.order == "priority":
                await self.measure(candidate)
        rounds: Measurements = {name: [] for name in candidates}
        for round_ in range(ROUNDS):
            names = list(candidates) if round_ == 0 else finalists(rounds)
            random.Random(round_).shuffle(names)
            if round_ == 0:  # most rollout nodes first, so that those with too few are known
                names.sort(key=rollout_nodes, reverse=True)
            for name in names:
                if round_ == 0 and cannot_win(name, rounds):
                    del rounds[name]
                    log.info("%s is not measured: with more rollout nodes answers alone took longer than another split", name)
                    continue
                rounds[name].append(found := await self.measure(candidates[name]))
                seconds, rate = found["seconds"], found["tokens_per_s"]
                log.info("round %d, %s: %.2f s, %.0f tokens/s", round_ + 1, name, seconds, rate)
                self.write(rounds=rounds)
        if not agentic:
            moves = [await self.measure_move(i) for i in range(MOVES)]
            restarts = [await self.measure_restart() for _ in range(RESTARTS)]
            self.write(rounds=rounds, moves=moves, restarts=restarts)

    def candidates(self, agentic: bool) -> dict[str, Candidate]:
        """By name; static ones as `static rollout:inference:training`."""
        nodes = sorted(self.home, key=lambda n: self.home[n] != "training")  # owners first
        out = {}
        for rollout, inference in itertools.product(range(1, len(nodes) - 1), repeat=2):
            training = len(nodes) - rollout - inference
            if training >= 1:
                roles = ["training"] * training + ["inference"] * inference + ["rollout"] * rollout
                name = f"{STATIC}{rollout}:{inference}:{training}"
                out[name] = Candidate(name, Policy(name="static"), dict(zip(nodes, roles)))
        dynamic = msgspec.structs.replace(self.config.policy, name="threshold", lend_owners=True)
        out["colocated"] = Candidate("colocated", Policy(name="colocated"))
        out["dynamic"] = Candidate("dynamic", dynamic)
        out["adaptive"] = Candidate("adaptive", msgspec.structs.replace(dynamic, name="adaptive"))
        for name in ("dynamic", "adaptive") if agentic else ():
            out[name + BY_ARRIVAL] = replace(out[name], name=name + BY_ARRIVAL, order="arrival")
        return out

    def write(self, **results: Any) -> None:
        """Replace the results file; a reader sees the old or the new one."""
        part = self.run_dir / "bench.json.part"
        part.write_text(json.dumps({"nodes": len(self.home), "work": self.work, **results}))
        part.replace(self.run_dir / "bench.json")

    async def measure(self, candidate: Candidate) -> dict[str, float]:
        """One iteration of the fixed work. `*_node_s`: node-seconds until the last gradient."""
        policy, algorithm = candidate.policy, self.config.algorithm
        self.monitor, self.router = self.learned[policy.name == "adaptive"]
        self.config.rollout.order = candidate.order
        prefilled, reused = await self.prefills()
        began = time.monotonic()
        roles = candidate.roles or self.monitor.start_roles(
            policy, self.home, self.offers, algorithm.prompts_per_step, algorithm.group_size, True
        )
        await self.enter(roles, f"bench: {policy.name}")
        entered = time.monotonic()
        self.monitor.begin(1)
        self.stage = run = self._new_iteration(self.draw(1), temperature=algorithm.temperature, policy=policy)
        await self.trainer.begin(1, "grpo")
        node_seconds: dict[str, float] = defaultdict(float)
        watching = asyncio.ensure_future(self.watch(run, node_seconds))
        try:
            await run.accumulate(0)
        finally:
            watching.cancel()
        accumulated = time.monotonic()
        self.monitor.conclude()
        groups = await run.awake(0, self.trainer.owner_nodes)
        await self.trainer.step({g.node for g in groups}, run.results.counted_tokens(groups), 0.0)
        stepped = time.monotonic()
        await self.staging.everywhere()
        self.stage = None
        await self.fleet.call_each(self.home, "forget", iteration=1)
        ended = time.monotonic()
        self.work = work_of(run)
        self.writer.trace(self.monitor.trace.line(
            candidate=candidate.name, policy=policy.name, roles=roles, enter_s=entered - began,
            step_s=[stepped - accumulated], sync_s=ended - stepped, seconds=ended - began,
            switches=[outcome.phases for outcome in run.tally.switches if outcome.committed]))
        after = await self.prefills()
        prefilled, reused = after[0] - prefilled, after[1] - reused
        return {
            "seconds": ended - began,
            "tokens_per_s": self.work["tokens"] / (ended - began),
            "enter_s": entered - began,
            "generate_s": run.tally.generated_at - entered,
            "finish_s": accumulated - run.tally.generated_at,
            "step_s": stepped - accumulated,
            "sync_s": ended - stepped,
            "moves": sum(outcome.committed for outcome in run.tally.switches),
            "prefill_tokens": prefilled,
            "prefill_saved": reused / max(prefilled + reused, 1),
            "moving_node_s": node_seconds["moving"],
            **{f"{role}_{what}_node_s": node_seconds[f"{role}_{what}"] for role in ROLES for what in ("busy", "idle")},
        }

    async def prefills(self) -> tuple[int, int]:
        """Prompt and answer tokens that all engines have prefilled, and that kept prefixes have saved, ever."""
        devices = range(self.config.cluster.devices_per_node)
        figures = await asyncio.gather(
            *(self.fleet.worker(node, "rollout", device, "figures") for node in self.home for device in devices)
        )
        return sum(f["prefill_tokens"] for f in figures), sum(f["reused_tokens"] for f in figures)

    async def watch(self, run: Iteration, node_seconds: dict[str, float]) -> None:
        """Add up until cancelled what nodes do: `ROLE_busy`, `ROLE_idle` (none of its work is there), `moving`."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            at_work = {(node, "rollout") for node in run.ledger.running.values()}
            at_work |= {(node, role) for role, replica in run.leases.at.values() for node in replica.nodes}
            for node, role in self.epochs.roles.items():
                what = f"{role}_busy" if (node, role) in at_work else f"{role}_idle"
                node_seconds["moving" if node in run.hand_outs.leaving else what] += now - last
            last = now

    async def measure_move(self, number: int) -> dict[str, float]:
        """A node leaves rollout for training while it generates; phases in milliseconds."""
        await self.enter(dict.fromkeys(self.home, "rollout"), "bench: move")
        self.stage = run = self._new_iteration(self.draw(1), policy=Policy(name="static"), train=False)
        generating = asyncio.ensure_future(run.generate())
        await asyncio.sleep(1.0)
        node = sorted(n for n, home in self.home.items() if home == "rollout")[number % self.config.split.rollout]
        run.hand_outs.leaving.add(node)
        outcome = await self.epochs.change({node: "training"}, self.weights, "bench: move", run.role_changes.take_back)
        run.hand_outs.leaving.discard(node)
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


def work_of(run: Iteration) -> dict[str, float]:
    """What an iteration had to do; the same for all candidates."""
    lengths = [tokens for group in run.ledger.groups.values() for tokens in group.tokens.values()]
    calls = Counter(run.tally.tool_calls)
    return {
        "answers": len(lengths),
        "tokens": sum(lengths),
        "median_tokens": statistics.median(lengths),
        "longest_tokens": max(lengths),
        "tool_calls": sum(number * count for number, count in calls.items()),
        "most_tool_calls": max(calls),
        "tool_tokens": run.results.num_masked_tokens,
    }


if __name__ == "__main__":
    sys.exit(main(RolesBench))
