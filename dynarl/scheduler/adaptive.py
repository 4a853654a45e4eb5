"""The adaptive policy: compare forecasts of the iteration's end, and move only what pays.

The rule, in six lines:
- Each allocation worth a look gets a forecast, staying among them: with all other moves left until the last answer, and
  with the best of some ways in which rollout becomes smaller before it, in large steps or small ones.
- A move has to pay: what it gains over staying must be more than its measured cost by `PAYBACK`, and more than what the
  forecasts are usually wrong by, times `NOISE_SHARE`. So noise moves nobody.
- And it has to be now: when the best plan that starts with staying is better, the scheduler waits and looks again.
- Nobody leaves rollout unless the others hold all live requests and their KV memory, there are complete groups that
  nobody works on, one each, and `min_rollout_nodes` stay. While requests live and nobody generates, one node returns
  at once.
- A stage that was never seen at work is tried before it is reckoned with: one instance of it goes there as soon as
  `TRIED_SHARE` of the answers have ended, and nobody leaves rollout on a guess. What it takes decides all the rest.
- Nothing moves while weights are on their way, nor, as long as requests live, within `dwell_s` of the last move.

Components come from the situation, in pipeline order; nothing here names one. Pure: what is the same gets the same
answer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from dynarl.config.schema import Policy
from dynarl.scheduler.allocations import Flows, Pool, ladder, targets
from dynarl.scheduler.costs import Costs
from dynarl.scheduler.forecast import CELLS, NO_NODES, Generation, Problem, Stage, finish_times, generation
from dynarl.scheduler.situation import Candidate, Decision, Situation
from dynarl.scheduler.survival import Survival

# A move that costs 1 s has to gain half a second beyond that: costs are forecast too low rather than too high, since
# the first step in a new role is slow.
PAYBACK = 0.5
# Forecasts of two allocations err in the same direction; this share of the usual error is left in their difference.
NOISE_SHARE = 0.2
# Work flows down the pipeline and nodes with it. One that goes back up is often called down again a moment later, so
# this share of the time that is left has to be gained by it.
BACK_SHARE = 0.05
# However good the past forecasts were.
LEAST_ERROR = 0.1
# A node that generates can leave when it pays, one that does not hardly comes back. So fewer generate at first only
# if that is forecast to end earlier by this share.
START_SHARE = 0.1
# Of all answers, ended before the first instance of a stage of unknown speed leaves rollout: soon enough to know, before
# nodes have to leave, what they leave for; and it finds groups to work on.
TRIED_SHARE = 0.5
# Finishes that differ by less are the same: then fewer moves win.
SAME = 5e-3
# Rollout begins to become smaller in one of these cells of the forecast (it has `CELLS`, denser at the beginning). From
# there on it keeps a share of its nodes, or of them this power of the share of requests that still live: one large
# step, or many small ones. Were there only the first, a move now would be preferred for the step that it adds.
LATER_CELLS = (4, 11, 20)
KEPT_SHARES, KEPT_POWERS = (0.75, 0.5, 0.25), (0.3, 0.6, 1.0)
# Allocations of each number of rollout nodes that are looked at with later changes, and all of them together.
BEST_OF_EACH, MOST_LOOKED_AT = 3, 12
SHOWN = 8
# A finish so far away means never: a stage has work and will have no node.
FAR_S, NEVER_S = 1e6, 1e12

@dataclass(frozen=True)
class _Plan:
    target: tuple[int, ...]
    flows: Flows
    pause_s: float = 0.0
    moved: int = 0
    back: bool = False


def decide(
    policy: Policy,
    situation: Situation,
    survival: Survival,
    costs: Costs,
    since_move_s: float = math.inf,
    allocations: Callable[..., list[tuple[int, ...]]] = targets,
) -> Decision:
    """What to do now. since_move_s: seconds since the last move was done; allocations: which ones are compared."""
    pool = Pool(situation)
    if situation.live and not pool.now[situation.generator]:
        return _call_back(situation, pool)
    if situation.live and since_move_s < policy.dwell_s:
        return Decision(
            {}, f"Stay: the last move was {since_move_s:.2f} s ago, and policy.dwell_s is {policy.dwell_s:g}."
        )
    made = _generation(situation, pool, survival)
    problem = _problem(situation, pool, made, costs)
    leave, held_by = _may_leave(policy, situation, pool, made)
    if situation.live and (unknown := next((name for name in situation.queues if not costs.knows(name)), None)):
        if tried := _try(situation, pool, leave, unknown):
            return tried
        leave, held_by = 0, held_by or f"{unknown} was not seen at work yet"
    plans = _plans(situation, pool, costs, leave, problem, allocations)
    alone = _finish(problem, situation, pool, plans)
    chosen, best_s, why = _choose(problem, situation, pool, plans, alone, costs.error)
    return _answer(situation, pool, plans, alone, chosen, best_s, held_by or why, costs, made)


def start_roles(
    policy: Policy, home: Mapping[str, str], situation: Situation, survival: Survival, costs: Costs
) -> dict[str, str]:
    """Roles for the beginning of an iteration: `home`, or with more nodes generating where that is allowed and ends
    earlier.

    situation: of the iteration that is to begin, all of its requests waiting, every node in its home role.
    """
    pool = Pool(situation)
    made = _generation(situation, pool, survival)
    problem = _problem(situation, pool, made, costs)
    now = tuple(pool.now[component] for component in situation.components)
    plans = [_Plan(now, {})]
    able = {stage: pool.able[stage, situation.generator] for stage in situation.queues}
    for count in ladder(sum(able.values())):
        given = dict.fromkeys(able, 0)
        for _ in range(count):  # from the stage that has most left; ties from the last, which has work last
            giver = max(
                able,
                key=lambda stage: (given[stage] < able[stage], pool.now[stage] - given[stage], list(able).index(stage)),
            )
            given[giver] += 1
        flows = {(stage, situation.generator): n for stage, n in given.items() if n}
        plans.append(
            _Plan((now[0] + count, *(n - given[stage] for stage, n in zip(able, now[1:]))), flows, moved=count)
        )
    alone = _finish(problem, situation, pool, plans)
    ends = _with_later(problem, situation, pool, plans, alone)
    best = max(i for i, end_s in enumerate(ends) if end_s <= ends.min() * (1.0 + START_SHARE))
    return {**home, **(pool.pick(plans[best].flows) or {})}


def _call_back(situation: Situation, pool: Pool) -> Decision:
    """Requests live and nobody generates: a fault took the last generating worker. One node returns, rather one of
    the free pool or of an early stage."""
    for giver in (None, *situation.queues):
        if pool.able[giver, situation.generator]:
            moves = pool.pick({(giver, situation.generator): 1})
            break
    else:
        # Gradients can be computed again, answers cannot be waited for.
        able = sorted(n for n, may in situation.may.items() if situation.generator in may and n in situation.roles)
        moves = dict.fromkeys(able[:1], situation.generator)
    reason = f"{situation.live} requests live and nobody generates"
    if not moves:
        return Decision({}, f"Stay: {reason}, and nobody may.")
    ways = Candidate({}, math.inf, 0.0, 0.0), Candidate(moves, math.inf, 0.0, 0.0)  # no forecast was made
    return Decision(moves, f"{reason}: one node returns at once.", ways, 1, math.inf)


def _try(situation: Situation, pool: Pool, leave: int, stage: str) -> Decision | None:
    """One instance to a stage of unknown speed, once it is time and there is something to do."""
    queue, unit, generator = situation.queues[stage], situation.units.get(stage, 1), situation.generator
    if pool.now[stage] or not queue.waiting or situation.finished_share < TRIED_SHARE:
        return None
    if min(leave, pool.able[generator, stage]) < unit:
        return None
    moves = pool.pick({(generator, stage): unit})
    ways = Candidate({}, math.inf, 0.0, 0.0), Candidate(moves, math.inf, 0.0, 0.0)  # no forecast was made
    reason = f"{stage} was not seen at work yet, and {queue.waiting} groups wait: {unit} from {generator} to it."
    return Decision(moves, reason, ways, 1, math.inf)


def _generation(situation: Situation, pool: Pool, survival: Survival) -> Generation:
    return generation(
        survival,
        situation.lengths,
        dict(situation.live_members),
        situation.finished_tokens,
        situation.prompt_tokens,
        situation.written_per_sampled,
        max(pool.now[situation.generator], 1) * situation.max_running,
        situation.group_delay,
    )


def _problem(situation: Situation, pool: Pool, made: Generation, costs: Costs) -> Problem:
    # A stage that nobody can take now (its workers are down) is left out: it would make every end infinite.
    names, kinds = list(situation.queues), {situation.may[node] for node in situation.roles}
    stages = tuple(
        Stage(
            costs.seconds_per_token(name) if any(name in may for may in kinds) else 0.0,
            queue.groups,
            queue.tokens,
            situation.units.get(name, 1),
            reachable=any({situation.generator, name} <= may for may in kinds),
            passes_on=any({name, following} <= may for may in kinds for following in names[index + 1 : index + 2]),
        )
        for index, (name, queue) in enumerate(situation.queues.items())
    )
    stuck = pool.now[situation.generator] - pool.movable[situation.generator]
    busy = sum(count > 0 for count in situation.running.values())
    move_s = costs.moves.seconds(situation.generator, names[-1]) if names else 0.0
    running_share = situation.max_running / situation.most
    kv_tokens = math.inf if situation.kv_tokens is None else situation.kv_tokens * running_share
    return Problem(
        made,
        stages,
        costs.step.parts,
        situation.max_running,
        move_s,
        math.inf if situation.waiting or not busy else busy,
        stuck,
        kv_tokens,
        situation.wait_s,
        pool.now[situation.generator],
        costs.forward_s,
    )


def _may_leave(policy: Policy, situation: Situation, pool: Pool, made: Generation) -> tuple[int, str]:
    """How many nodes may leave generation now, and what keeps the others there."""
    there, movable = pool.now[situation.generator], pool.movable[situation.generator]
    if not situation.live:
        return movable, ""
    limits = {
        f"policy.min_rollout_nodes is {policy.min_rollout_nodes}": there - max(policy.min_rollout_nodes, 1),
        f"{situation.live} live requests need the others": there - -(-situation.live // situation.most),
        "no complete group waits for a node": sum(
            queue.waiting for name, queue in situation.queues.items() if pool.able[situation.generator, name]
        ),
        "the others can be nothing else": movable,
    }
    if situation.kv_tokens:
        limits["live requests need the others' KV memory"] = there - math.ceil(
            made.peak_kv_tokens / situation.kv_tokens
        )
    tightest = min(limits, key=limits.get)
    return max(limits[tightest], 0), "" if limits[tightest] > 0 else tightest


def _plans(
    situation: Situation,
    pool: Pool,
    costs: Costs,
    leave: int,
    problem: Problem,
    allocations: Callable[..., list[tuple[int, ...]]],
) -> list[_Plan]:
    generator = situation.generator
    back = 0
    if situation.live > pool.now[generator]:  # a node for each request is enough
        able = sum(pool.able[giver, generator] for giver in situation.queues) + pool.able[None, generator]
        back = min(situation.live - pool.now[generator], able)
    left = [
        stage.seconds_per_token * (problem.generation.tokens + sum(s.tokens for s in problem.stages[: i + 1]))
        for i, stage in enumerate(problem.stages)
    ]
    order = situation.components
    pause_s = functools.cache(lambda flow: costs.moves.seconds(*flow))
    plans = []
    for target in allocations(situation, pool, leave, back, left):
        flows = pool.flows(target)
        if flows is not None:
            back = any(giver and order.index(giver) > order.index(taker) for giver, taker in flows)
            ways: dict[str, float] = {}
            for flow in flows:
                ways[flow[1]] = max(pause_s(flow), ways.get(flow[1], 0.0))
            cost_s = sum(ways.values()) if situation.one_by_one else max(ways.values(), default=0.0)
            plans.append(_Plan(target, flows, cost_s, sum(flows.values()), back))
    return plans


def _finish(
    problem: Problem,
    situation: Situation,
    pool: Pool,
    plans: list[_Plan],
    rows: np.ndarray | slice = slice(None),
    later: np.ndarray | None = None,
) -> np.ndarray:
    """Seconds to the end for each plan, or for those in `rows`; later: [rows, cells] rollout nodes that these keep."""
    now = np.array([pool.now[c] for c in situation.components])
    nodes, pause_s = np.array([plan.target for plan in plans])[rows], np.array([plan.pause_s for plan in plans])[rows]
    generators = np.repeat(nodes[:, :1], CELLS, axis=1) if later is None else later
    ends = finish_times(problem, nodes, np.maximum(nodes - now, 0), pause_s, generators)
    return np.where(ends < FAR_S, ends, NEVER_S)


def _choose(
    problem: Problem, situation: Situation, pool: Pool, plans: list[_Plan], alone: np.ndarray, error: float
) -> tuple[int, float, str]:
    """Index of the plan to take, its forecast with later changes, and why if it is to stay."""
    looked_at = _promising(plans, alone)
    # To generate again must gain by itself, not by what else moves along.
    generator = situation.generator
    returns = np.array([any(giver and taker == generator for giver, taker in plans[i].flows) for i in looked_at])
    gains = np.where(returns, alone[looked_at][~returns].min(), alone[0]) - alone[looked_at]
    noise_s = NOISE_SHARE * max(error, LEAST_ERROR) * min(alone[0], FAR_S)
    back_s = BACK_SHARE * min(alone[0], FAR_S)
    worth = [
        i
        for i, gain in zip(looked_at.tolist(), gains)
        if i and gain > max(PAYBACK * plans[i].pause_s, back_s if plans[i].back else noise_s)
    ]
    kept = [0, *worth]
    stay_s, *best_s = _with_later(problem, situation, pool, [plans[i] for i in kept], alone[kept]).tolist()
    if not worth:
        return 0, stay_s, "no move gains more than it costs"
    first = min(best_s)
    if first > stay_s:
        return 0, stay_s, "the same later is better than a move now"
    ties = [(plans[i].moved, best, i) for i, best in zip(worth, best_s) if best <= first * (1.0 + SAME)]
    _, best, index = min(ties)
    return index, best, ""


def _promising(plans: list[_Plan], alone: np.ndarray) -> np.ndarray:
    """Staying, and of each number of rollout nodes the best: small steps are not the best for ever, but may be for
    now."""
    picked, seen = [0], {}
    as_many = [i for i, plan in enumerate(plans) if i and plan.target[0] == plans[0].target[0]]
    if as_many:  # what can be done without taking from rollout
        picked.append(min(as_many, key=lambda i: alone[i]))
    for index in np.argsort(alone, kind="stable").tolist():
        rollout = plans[index].target[0]
        if index not in picked and seen.get(rollout, 0) < BEST_OF_EACH and len(picked) < MOST_LOOKED_AT:
            seen[rollout] = seen.get(rollout, 0) + 1
            picked.append(index)
    return np.array(picked)


def _with_later(
    problem: Problem, situation: Situation, pool: Pool, plans: list[_Plan], alone: np.ndarray
) -> np.ndarray:
    """The best forecast of each plan when rollout may become smaller before the last answer."""
    if not situation.live:
        return alone
    live = np.maximum(problem.generation.live[:-1], NO_NODES)
    least = max(problem.stuck, 1, -(-int(live[0] * 0.5) // max(situation.most, 1)))
    begun = np.arange(CELLS) >= np.array(LATER_CELLS)[:, None, None]
    shares = np.array([[np.minimum(live / live[cell], 1.0) ** power for power in KEPT_POWERS] for cell in LATER_CELLS])

    @functools.cache
    def ways(have: int) -> np.ndarray:
        """[ways, cells] rollout nodes that are kept of so many."""
        fewer = sorted({max(least, round(have * part)) for part in KEPT_SHARES} | {max(have - 1, least)})
        fewer = np.array([keep for keep in fewer if keep < have], dtype=float)
        at_once = np.broadcast_to(fewer[:, None], (len(LATER_CELLS), len(fewer), CELLS))
        kept = np.concatenate([at_once, np.clip(np.ceil(have * shares), least, have)], axis=1)
        return np.where(begun, kept, have).reshape(-1, CELLS)

    later = {index: ways(plan.target[0]) for index, plan in enumerate(plans) if plan.target[0] > least}
    if not later:
        return alone
    rows = np.repeat(list(later), [len(each) for each in later.values()])
    found = _finish(problem, situation, pool, plans, rows, np.concatenate(list(later.values())))
    best = alone.copy()
    np.minimum.at(best, rows, found)
    return best


def _answer(
    situation: Situation,
    pool: Pool,
    plans: list[_Plan],
    alone: np.ndarray,
    chosen: int,
    best_s: float,
    why: str,
    costs: Costs,
    made: Generation,
) -> Decision:
    moves = pool.pick(plans[chosen].flows)
    if moves is None:  # two flows want the same node; looked at again in a moment
        chosen, moves, why = 0, {}, "the nodes that could move are wanted in two places"
    others = [i for i in np.argsort(alone, kind="stable").tolist() if i not in (0, chosen)]
    shown = list(dict.fromkeys([0, chosen, *others]))[:SHOWN]
    candidates = tuple(
        Candidate(pool.pick(plans[i].flows) or {}, _time(alone[i]), plans[i].pause_s, _time(alone[0] - alone[i]))
        for i in shown
    )
    seen = _seen(situation, pool, costs, made)
    if not moves:
        reason = f"Stay: {why or 'no other allocation ends earlier'}; the end is {_in_words(best_s)} away."
    else:
        parts = ", ".join(
            f"{n} from {giver or 'the free pool'} to {taker}" for (giver, taker), n in plans[chosen].flows.items()
        )
        found = candidates[shown.index(chosen)]
        without = "them" if plans[chosen].moved > 1 else "it"
        reason = (
            f"Move {parts}: the end is {_in_words(found.finish_s)} away instead of "
            f"{_in_words(candidates[0].finish_s)}, for {found.cost_s:.2f} s without {without}; {situation.live} live."
        )
    return Decision(moves, reason, candidates, shown.index(chosen), _time(best_s), seen)


def _time(seconds: float) -> float:
    return float(seconds) if abs(seconds) < FAR_S else math.copysign(math.inf, seconds)


def _in_words(seconds: float) -> str:
    return f"{seconds:.1f} s" if abs(seconds) < FAR_S else "infinitely far"


def _seen(situation: Situation, pool: Pool, costs: Costs, made: Generation) -> dict[str, float]:
    seen = {f"nodes/{name}": pool.now[name] for name in situation.components}
    seen |= {
        "nodes/free": pool.now[None],
        "requests/running": situation.live - situation.waiting,
        "requests/waiting": situation.waiting,
        "groups/generating": made.groups,
        "tokens/to_come": round(made.tokens, 1),
        "tokens/longest_to_come": round(float(made.x[-1]), 1),
        "step/fixed_s": costs.step.fixed_s,
        "step/per_request_s": costs.step.per_request_s,
        "group_delay": situation.group_delay or 0.0,
        "error": round(costs.error, 4),
    }
    for name, queue in situation.queues.items():
        seen |= {
            f"groups/{name}/waiting": queue.waiting,
            f"groups/{name}/in_work": queue.in_work,
            f"{name}/seconds_per_token": costs.seconds_per_token(name),
        }
    return seen
