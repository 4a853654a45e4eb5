"""`dynarl bench scheduler`: how long a decision takes, and how good it is. Needs neither Slurm nor torch.

- Time: one decision in the middle of an iteration, for sizes up to 8192 devices, 8 components and 65536 live requests.
- Search: on small random situations, the forecast of what was decided against that of the best of all allocations.
- Iterations: whole ones on paper (`scheduler.replay`) against the best schedule that a search finds which knows every
  length, against a bound that no schedule beats (`scheduler.bound`), and the other policies beside it.

Deterministic but for the times.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from dynarl.config.schema import Policy
from dynarl.scheduler import adaptive
from dynarl.scheduler import policy as rules
from dynarl.scheduler.allocations import Pool
from dynarl.scheduler.bound import least_s
from dynarl.scheduler.costs import Costs, WorkRate
from dynarl.scheduler.replay import Replay, Work
from dynarl.scheduler.situation import Queue, Situation
from dynarl.scheduler.survival import Lengths, Survival, fit

# (devices, components, live requests), one at a time away from the middle, and the largest of all.
SIZES = [
    (8, 3, 512),
    (64, 3, 4096),
    (1024, 3, 512),
    (1024, 3, 8192),
    (1024, 3, 65536),
    (1024, 5, 8192),
    (1024, 8, 8192),
    (8192, 3, 65536),
    (8192, 8, 65536),
]
DECISIONS = 50
MAX_TOKENS = 2048
SEARCHES, ITERATIONS, SCHEDULES = 60, 24, 240
POLICY = Policy(name="adaptive", lend_owners=True, dwell_s=0.1)


def measure(note: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """All figures. `note` is told what is going on."""
    rows = []
    for devices, components, live in SIZES:
        note(f"{devices} devices, {components} components, {live} live requests")
        rows.append(decision_time(devices, components, live))
    note(f"{SEARCHES} situations against all allocations")
    search = [search_quality(seed) for seed in range(SEARCHES)]
    cases = []
    for seed in range(ITERATIONS):
        note(f"iteration {seed + 1} of {ITERATIONS} on paper")
        cases.append(iteration_quality(seed))
    adaptive_s = [case["adaptive_s"] for case in cases]
    against = {
        name: statistics.fmean(mine / case[f"{name}_s"] for mine, case in zip(adaptive_s, cases))
        for name in ("clairvoyant", "bound", "threshold", "colocated")
    }
    return {
        "schema": 1,
        "bench": "scheduler",
        "rows": rows,
        "ratio_to_exhaustive": {"mean": statistics.fmean(search), "worst": max(search)},
        "seconds_to": against,
        "cases": cases,
    }


# --- time


def decision_time(devices: int, components: int, live: int) -> dict[str, Any]:
    """Median and p99 of a decision in milliseconds of its thread, the survival estimate included."""
    source = random.Random(devices * 31 + components * 7 + live)
    names = ["rollout", *(f"stage{i}" for i in range(1, components - 1)), "training"]
    costs, finished = learned(names[1:], source), lengths(source, 4096)
    took = []
    for _ in range(DECISIONS):
        situation = middle(source, devices, names, live)
        began = time.thread_time()
        adaptive.decide(POLICY, situation, fit(finished, situation.lengths, MAX_TOKENS), costs)
        took.append(1e3 * (time.thread_time() - began))
    took.sort()
    return {
        "devices": devices,
        "components": components,
        "live_requests": live,
        "p50_ms": statistics.median(took),
        "p99_ms": took[-(-99 * len(took) // 100) - 1],
    }


def lengths(source: random.Random, count: int) -> list[int]:
    """Tokens of answers: log-normal, as those of reasoning models are about, cut at the most that is allowed."""
    return [min(MAX_TOKENS, 1 + int(source.lognormvariate(5.3, 0.9))) for _ in range(count)]


def learned(stages: list[str], source: random.Random) -> Costs:
    costs = Costs()
    fixed, each = source.choice([0.005, 0.01, 0.02]), source.choice([0.0005, 0.001, 0.002])
    observe(costs, (fixed, each), {stage: source.choice([1e-4, 3e-4, 1e-3]) for stage in stages}, 0.3)
    return costs


def observe(costs: Costs, step: tuple[float, float], stages: Mapping[str, float], move_s: float) -> None:
    for running in (1, 4, 16, 64) * 8:
        costs.step.observe(running, step[0] + step[1] * running)
    for stage, seconds_per_token in stages.items():
        rate = costs.stages[stage] = WorkRate()
        rate.observe(1000, 1000 * seconds_per_token)
        rate.observe(1000, 1000 * seconds_per_token)
    costs.moves.observe("rollout", "training", move_s)


def middle(source: random.Random, devices: int, names: list[str], live: int, size: int = 8) -> Situation:
    """Somewhere in the middle of an iteration: most nodes generate, some groups are complete."""
    stages = names[1:]
    roles = {f"n{i}": names[0] if source.random() < 0.6 else source.choice(stages) for i in range(devices)}
    roles["n0"] = names[0]
    generators = [node for node, role in roles.items() if role == names[0]]
    running = dict.fromkeys(generators, live // len(generators))
    running[generators[0]] += live % len(generators)
    queues = {
        stage: Queue(source.randrange(4 * devices), source.randrange(devices + 1), source.randrange(1, 2000 * devices))
        for stage in stages
    }
    members: dict[int, int] = {}
    left = live
    while left:
        alive = min(left, source.randint(1, size))
        members[alive] = members.get(alive, 0) + 1
        left -= alive
    everything = frozenset(names)
    return Situation(
        roles,
        dict.fromkeys(roles, everything),
        queues,
        names[0],
        running,
        0,
        lengths(source, live),
        members,
        100.0 * live,
        64.0,
        max_running=max(64, 2 * live // len(generators)),
    )


# --- search


def search_quality(seed: int) -> float:
    """Forecast of what was decided over that of the best of all allocations of a few nodes, at most 1 when nothing
    is missed."""
    source = random.Random(seed)
    names = ["rollout", "inference", "training"]
    situation, costs = middle(source, source.randint(4, 24), names, source.randint(8, 200)), learned(names[1:], source)
    survival = fit(lengths(source, 500), situation.lengths, MAX_TOKENS)
    chosen, best = (
        adaptive.decide(POLICY, situation, survival, costs, **options)
        for options in ({}, {"allocations": every_allocation})
    )
    return chosen.finish_s / best.finish_s


def every_allocation(
    situation: Situation, pool: Pool, may_leave: int, may_return: int, work: list[float]
) -> list[tuple[int, ...]]:
    """All ways to put all nodes somewhere, the present one first."""
    now = tuple(pool.now[component] for component in situation.components)
    total, found = len(situation.roles), [now]
    for rollout in range(now[0] - may_leave, now[0] + may_return + 1):
        for parts in itertools.product(range(total - rollout + 1), repeat=len(now) - 2):
            if sum(parts) <= total - rollout and (allocation := (rollout, *parts, total - rollout - sum(parts))) != now:
                found.append(allocation)
    return found


# --- iterations


def iteration_quality(seed: int) -> dict[str, float]:
    """Seconds of one iteration on paper: adaptive, clairvoyant, the bound, and the other policies."""
    source = random.Random(seed)
    nodes, groups, size = source.choice([4, 8, 16]), source.choice([24, 48]), 8
    cap = 768

    def draw(count: int) -> list[int]:
        return [min(cap, 1 + int(source.lognormvariate(4.3, 0.9))) for _ in range(count)]

    work = Work(
        [draw(size) for _ in range(groups)],
        (source.choice([0.005, 0.01, 0.02]), source.choice([0.0005, 0.001, 0.002])),
        {"inference": source.choice([1e-4, 3e-4]), "training": source.choice([3e-4, 1e-3])},
        96,
    )
    home = {f"n{i}": role for i, role in enumerate(["training", "inference", *["rollout"] * (nodes - 2)])}
    memory = Lengths(cap)
    for length in draw(groups * size):  # the former iteration
        memory.finished(length)
    results = {"seed": seed, "nodes": nodes, "groups": groups, "bound_s": least_s(work, nodes)}
    asks = {"adaptive": ask_adaptive(POLICY, work, memory)}
    asks |= {name: ask_rules(Policy(name=name, threshold=16, lend_owners=True)) for name in ("threshold", "colocated")}
    everybody = dict.fromkeys(home, "rollout")
    for name, ask in asks.items():
        may = rules.capabilities(Policy(name=name, lend_owners=True), home)
        results[f"{name}_s"] = Replay(work, everybody, may, ask).run()
    results["clairvoyant_s"] = clairvoyant(work, everybody, rules.capabilities(POLICY, home), source)
    return results


def ask_adaptive(policy: Policy, work: Work, memory: Lengths) -> Callable[[Replay], Mapping[str, str]]:
    """The adaptive policy for a replay; it learns lengths as answers finish, and costs it has seen before."""
    costs, known = Costs(), 0
    observe(costs, work.step, work.stages, work.move_s)

    def ask(replay: Replay) -> Mapping[str, str]:
        nonlocal known
        for sample in replay.finished[known:]:
            memory.finished(replay.length[sample])
        known = len(replay.finished)
        situation = replay.situation()
        survival: Survival = memory.survival(situation.lengths)
        return adaptive.decide(policy, situation, survival, costs, replay.t - replay.moved_at).moves

    return ask


def ask_rules(policy: Policy) -> Callable[[Replay], Mapping[str, str]]:
    """Threshold or colocated for a replay."""

    def ask(replay: Replay) -> Mapping[str, str]:
        seen = replay.situation()
        score, train = seen.queues["inference"], seen.queues["training"]
        return rules.decide(
            policy,
            rules.View(
                dict(seen.roles),
                dict(seen.may),
                dict(seen.running),
                seen.waiting,
                sum(seen.live_members.values()),
                True,
                score.waiting,
                score.in_work,
                train.waiting,
                train.in_work,
            ),
        )

    return ask


Schedule = list[tuple[float, tuple[int, ...]]]


def clairvoyant(work: Work, roles: dict[str, str], may: Mapping[str, frozenset[str]], source: random.Random) -> float:
    """Seconds of the best schedule found by trying `SCHEDULES` of them on the very lengths: [(share of answers
    finished, nodes of each component)], the first at random, the others changes of the best."""
    best, best_s = [], float("inf")
    for attempt in range(SCHEDULES):
        schedule = (
            random_schedule(len(roles), source) if attempt < SCHEDULES // 3 else changed(best, len(roles), source)
        )
        try:
            seconds = Replay(work, roles, may, follow(schedule)).run(limit_s=best_s)
        except RuntimeError:  # it leaves work without nodes, or takes longer than the best
            continue
        if seconds < best_s:
            best, best_s = schedule, seconds
    return best_s


def follow(schedule: Schedule) -> Callable[[Replay], Mapping[str, str]]:
    """Carries out each change when so many answers have finished; what a stage has no more work for goes on to the
    next."""

    def ask(replay: Replay) -> Mapping[str, str]:
        share = len(replay.finished) / len(replay.length)
        due = [allocation for at, allocation in schedule if share >= at]
        situation = replay.situation()
        if not due or not situation.roles:
            return {}
        pool = Pool(situation)
        target = list(due[-1])
        if not situation.live:
            target = [0, *target[1:-1], target[-1] + target[0]]
            for stage, queue in enumerate(list(situation.queues.values())[:-1], 1):
                if not queue.groups and not any(q.groups for q in list(situation.queues.values())[: stage - 1]):
                    target[-1], target[stage] = target[-1] + target[stage], 0
        flows = pool.flows(tuple(target))
        return pool.pick(flows) or {} if flows else {}

    return ask


def random_schedule(nodes: int, source: random.Random) -> Schedule:
    changes = sorted(
        (source.uniform(0.2, 1.0), source.random(), source.uniform(0.05, 0.5)) for _ in range(source.randint(1, 3))
    )
    rollout, schedule = nodes, []
    for at, fewer, scoring in [*changes, (1.0, 1.0, changes[-1][2])]:
        rollout = 0 if at == 1.0 else max(1, round(rollout * fewer))
        scorers = min(nodes - rollout, max(1, round((nodes - rollout) * scoring))) if rollout < nodes else 0
        schedule.append((at, (rollout, scorers, nodes - rollout - scorers)))
    return schedule


def changed(schedule: Schedule, nodes: int, source: random.Random) -> Schedule:
    """One change somewhere: when, or a node from one component to another, or one entry more."""
    new = list(schedule)
    index = source.randrange(len(new))
    at, allocation = new[index]
    what = source.random()
    if what < 0.4 and at < 1.0:
        new[index] = (min(max(at + source.gauss(0, 0.1), 0.05), 0.999), allocation)
    elif what < 0.5 and len(new) < 6:
        new.insert(index, (max(at - source.uniform(0.02, 0.3), 0.05), allocation))
    else:
        giver, taker = source.sample(range(3), 2)
        parts = list(allocation)
        if parts[giver] > (giver == 0 and at < 1.0) and not (taker == 0 and at == 1.0):
            parts[giver], parts[taker] = parts[giver] - 1, parts[taker] + 1
        new[index] = (at, tuple(parts))
    return sorted(new, key=lambda entry: entry[0])
