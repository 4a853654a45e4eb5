"""When would this iteration end? A fluid model of what is left of it, for many plans at once.

The first component generates, the others (stages) take groups in pipeline order. A **plan** says how many nodes each
has now, and how many nodes rollout keeps from some later moment on; at the latest, its nodes leave with the last
answer.

- Generation: requests run in their order, as many as the nodes decode together; one that ends makes room for one that
  waits. After x steps of these, N(x) live (from the survival function). With other numbers of nodes the same work is
  done in the same order, by as many as they can decode; the last ends at the expected maximum. Where nodes leave, the
  others compute again the keys and values of what these had.
- Groups: one with k live members is complete with chance p^(k^h), as p of the live answers have ended. Were members
  independent, h would be 1. What was seen in this job, a share p^d of all groups of m members, makes it log d / log m
  so far; but members of a group differ by more the longer they get, so that what is to come is half-way between. Where
  requests wait, and groups begin one after another, it goes on as it was. Its tokens are the work of every stage.
- Stages: work that has arrived is done first come, first served, by all nodes of the stage: a queue's departures are
  the running maximum of (arrival, and all work since then). Groups are not split: a stage with G groups left is
  never faster than one group, and its n nodes do as much as G / ceil(G / n).
- A node that moves is missing for the move's cost. What rollout gives away later goes to the stages by the work that is
  left for each; a stage that is through passes its nodes on to the next.

Nothing here knows a component's name. Arrays are [plans, cells]; a cell is a span of x, or a part of what queues
already.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dynarl.scheduler.survival import Survival, grouped, points

CELLS = 32
# What queues at a stage is cut into so many parts, so that the next stage need not wait for all of it.
BACKLOG_CELLS = 8
# Cells in which the order of requests is played out.
FINE_CELLS = 128
NEVER = np.inf
# Two paths of equal length end 2 ** (1 / SHARPNESS) later than one: 4 %, as far as paths of five per cent error are
# apart.
SHARPNESS = 16
# Nodes of a stage that has none: a finish far away instead of a division by zero.
NO_NODES = 1e-9


@dataclass(frozen=True)
class Stage:
    """A component after the first. seconds_per_token: 0 leaves it out. groups: complete ones here, in work or not;
    tokens: theirs; unit: nodes of one instance; reachable: rollout nodes may come here; passes_on: its nodes may go
    on to the next stage when it is through.
    """

    seconds_per_token: float
    groups: int = 0
    tokens: float = 0.0
    unit: int = 1
    reachable: bool = True
    passes_on: bool = True


@dataclass(frozen=True)
class Generation:
    """What is left to generate, over x further steps. live[j]: requests alive at x[j]; work[j]: tokens decoded
    between x[j] and x[j + 1]; held[j]: tokens that a running request holds at x[j]; complete[j]: share of the
    unfinished groups complete by then. groups, tokens: number of them and of tokens they will have; last_tokens:
    those of the last. peak_kv_tokens: most tokens in KV memory at once from now on, should all requests run.
    """

    x: np.ndarray
    live: np.ndarray
    work: np.ndarray
    held: np.ndarray
    complete: np.ndarray
    groups: float
    tokens: float
    last_tokens: float
    peak_kv_tokens: float


def generation(
    survival: Survival,
    lengths,
    live_members: dict[int, int],
    finished_tokens: float,
    prompt_tokens: float = 0.0,
    written_per_sampled: float = 1.0,
    slots: float = np.inf,
    group_delay: float | None = None,
) -> Generation:
    """lengths: tokens so far of each live request; live_members: {live members: number of unfinished groups};
    finished_tokens: of finished answers in these groups; prompt_tokens: mean length of a prompt; written_per_sampled:
    tokens that an answer has, and the stages have to work on, for each that takes a decode step; slots: requests that
    are decoded together; group_delay: d."""
    kinds, counts = grouped(lengths)
    if not len(kinds):
        nothing = np.zeros(CELLS + 1)
        return Generation(nothing, nothing, nothing[1:], nothing, np.ones(CELLS + 1), 0.0, 0.0, 0.0, 0.0)
    furthest = max(survival.until_last(kinds, counts), 1.0)
    total = counts.sum()
    if total <= slots:
        x = points(furthest, CELLS)
        remains = survival.remains(kinds, x)
        live = counts @ remains
        live[-1] = 0.0
        work = 0.5 * (live[1:] + live[:-1]) * np.diff(x)
        held = counts @ (remains * (written_per_sampled * (kinds[:, None] + x) + prompt_tokens)) / np.maximum(live, 1e-9)
        peak = float((held * live).max())
        if (alive := live >= 1e-6).any():  # else all are longer than any is thought to get: they end at once
            held[~alive] = held[alive][-1]
    else:
        x, live, work, held = _in_order(survival, kinds, counts, slots, furthest)
        held = written_per_sampled * held + prompt_tokens
        together = points(furthest, CELLS)
        remains = survival.remains(kinds, together)
        peak = float(
            (counts @ (remains * (written_per_sampled * (kinds[:, None] + together) + prompt_tokens))).max()
        )
    groups = float(sum(live_members.values()))
    ended = 1.0 - live / total
    power, most = 1.0, max(live_members, default=1)
    if group_delay is not None and most > 1:
        seen = min(math.log(group_delay) / math.log(most), 1.0)
        waiting = max(total - slots, 0.0) / total
        power = waiting * seen + (1.0 - waiting) * 0.5 * (1.0 + seen)
    complete = sum(n * ended ** (k**power) for k, n in live_members.items()) / max(groups, 1.0)
    rest = survival.expected_remaining(kinds)
    tokens = finished_tokens + written_per_sampled * float(counts @ (kinds + rest))
    # The last group is longer than the mean by what its last answer is longer.
    longer = written_per_sampled * max(furthest - float(counts @ rest) / total, 0.0)
    last = tokens / max(groups, 1.0) + longer
    return Generation(x, live, work, held, complete, groups, tokens, min(last, tokens), peak)


def _in_order(
    survival: Survival, kinds: np.ndarray, counts: np.ndarray, slots: float, furthest: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(x, live, work, sampled tokens of a running one) where more live than are decoded together: those with the most
    tokens run, and as they end the others begin."""
    above = np.minimum(np.cumsum(counts[::-1])[::-1], slots)
    running = above - np.append(above[1:], 0.0)
    waiting = counts - running
    queued = waiting.sum()
    longest = furthest + queued * float(waiting @ survival.expected_remaining(kinds)) / queued / slots
    x = np.linspace(0.0, longest, FINE_CELLS + 1)
    width = x[1]
    first = survival.remains(kinds, x)
    last = waiting @ first / queued  # chance that one which waited still runs so long after its start
    mean = float(waiting @ kinds) / queued
    began, rest = np.zeros(FINE_CELLS + 1), queued
    run = running @ first
    for cell in range(FINE_CELLS + 1):
        still = run[cell] + (began[:cell] @ last[cell:0:-1] if cell else 0.0)
        began[cell] = min(max(slots - still, 0.0), rest)
        rest -= began[cell]
        if not rest:
            break
    run = run + np.convolve(began, last)[: FINE_CELLS + 1]
    held = running @ (first * (kinds[:, None] + x)) + np.convolve(began, last * (mean + x))[: FINE_CELLS + 1]
    live = run + queued - np.cumsum(began)
    # The last of many that end independently of each other.
    end = float(np.trapezoid(-np.expm1(-np.minimum(live, 50.0)), dx=width))
    done = np.concatenate([[0.0], np.cumsum(0.5 * (run[1:] + run[:-1]) * width)])
    at = points(end, CELLS)
    left = np.interp(at, x, live)
    left[-1] = 0.0
    return (
        at,
        left,
        np.diff(np.interp(at, x, done)),
        np.interp(at, x, held / np.maximum(run, 1e-9)),
    )


@dataclass(frozen=True)
class Problem:
    """step: (a, c, k) of a decode step; max_running: requests that one node decodes together; move_s: seconds that a
    node that moves later is missing; at_work: rollout nodes that have requests, where the others of those now get none;
    stuck: rollout nodes that can be nothing else; kv_tokens: that those of one node hold together; wait_s: that a request
    is not decoded, for tools, for each token that is; rollout: nodes that generate now; refill_s: of a node, for each
    token whose keys and values are computed again."""

    generation: Generation
    stages: tuple[Stage, ...]
    step: tuple[float, float, float]
    max_running: int
    move_s: float
    at_work: float = np.inf
    stuck: int = 0
    kv_tokens: float = np.inf
    wait_s: float = 0.0
    rollout: int = 0
    refill_s: float = 0.0


def finish_times(
    problem: Problem, nodes: np.ndarray, incoming: np.ndarray, pause_s: np.ndarray, generators: np.ndarray
) -> np.ndarray:
    """[plans] seconds until the last stage is through. nodes, incoming: [plans, components] nodes after the first
    change, and how many of them are new there; pause_s: [plans] how long these are missing; generators: [plans, cells]
    rollout nodes, which never become more."""
    nodes = nodes.astype(float)
    lost = (nodes[:, 0] <= 0) & (problem.generation.live[0] > 0)
    nodes[lost, 0] = 1.0  # for finite numbers; the answer is NEVER
    generators = np.maximum(np.where(lost[:, None], 1.0, generators), NO_NODES)
    ends = _generate(problem, generators)
    stages, rollout = problem.stages, nodes[:, 0]
    spans = np.diff(ends, axis=1)
    work = np.array([_work_left(problem, s) for s in range(len(stages))])
    work = work * [stage.reachable for stage in stages]
    left = generators[:, -1]
    gone = (rollout[:, None] - generators) / np.maximum(rollout - left, NO_NODES)[:, None]
    leavers = _spread(rollout - left, work, nodes[:, 1:])
    freed = np.maximum(rollout - problem.stuck, 0.0) if problem.generation.groups else np.zeros(len(nodes))
    freed = _spread(freed, work, nodes[:, 1:])
    departures = np.zeros((len(nodes), 0))
    # The last answer and its group; all the work of each stage, and one group after it.
    paths = [ends[:, -1]] if problem.generation.groups else []
    passed_at, passed = ends[:, -1], np.zeros(len(nodes))
    for s, stage in enumerate(stages):
        arrivals, size, group_s = _arrivals(problem, s, ends, departures, len(nodes))
        if not stage.seconds_per_token:
            departures = arrivals
            continue
        own = np.floor(nodes[:, 1 + s] / stage.unit) * stage.unit
        future = problem.generation.groups + sum(up.groups for up in stages[: s + 1])
        during = own[:, None] + leavers[:, s, None] * gone
        after = own + freed[:, s]
        last = after + passed
        at_last = _whole(last, future)
        edges, capacity = _capacity(
            problem,
            ends,
            spans,
            _whole(during, future),
            _whole(after, future),
            at_last,
            incoming[:, 1 + s],
            pause_s,
            np.maximum(passed_at, ends[:, -1]),
        )
        slope = np.maximum(at_last, NO_NODES)
        at = _read(arrivals, edges, capacity, slope)
        done = np.cumsum(size)
        in_capacity = done + np.maximum.accumulate(at - (done - size), axis=1)
        all_work = np.full((len(nodes), 1), done[-1])
        through = _read(np.append(in_capacity, all_work, axis=1), capacity, edges, 1.0 / slope)
        departures = np.maximum(through[:, :-1], arrivals + group_s * (size > 0))
        paths = [*(path + group_s for path in paths), through[:, -1]]
        # What is through already passes nothing on by itself: that is for a decision now.
        if stage.passes_on and future:
            passed_at, passed = departures[:, -1] + problem.move_s, last
        else:
            passed_at, passed = departures[:, -1], np.zeros(len(nodes))
    finish = np.maximum(departures[:, -1], _latest(np.array(paths))) if paths and stages else ends[:, -1]
    return np.where(lost, NEVER, finish)


def _generate(problem: Problem, generators: np.ndarray) -> np.ndarray:
    """[plans, cells + 1] times at which cells end, beginning with 0."""
    if problem.at_work < problem.rollout:
        generators = np.minimum(generators, problem.at_work)  # nor would one that comes get what the idle ones do not
    (a, c, k), made = problem.step, problem.generation
    steps = np.diff(made.x)
    held = 0.5 * (made.held[1:] + made.held[:-1])
    live = np.maximum(0.5 * (made.live[1:] + made.live[:-1]), made.work / np.maximum(steps, NO_NODES))
    most = np.clip(problem.kv_tokens / np.maximum(held, 1.0), 1.0, problem.max_running)
    # Requests change nodes, so all nodes have about as many. Of these some are at a tool.
    have = live / generators
    each = np.minimum(have, most)
    step_s = a + np.maximum(each, 1.0) * (c + k * held)
    if problem.wait_s:
        each = np.minimum(have * (step_s / (step_s + problem.wait_s)), most)
        step_s = a + np.maximum(each, 1.0) * (c + k * held)
        each = np.minimum(have * (step_s / (step_s + problem.wait_s)), most)
    alone_s = np.where(live < 1.0, steps * (step_s + problem.wait_s), 0.0)
    spans = np.maximum(made.work / np.maximum(each * generators, NO_NODES) * step_s, alone_s)
    rollout = np.full((len(generators), 1), min(problem.rollout, problem.at_work))
    before = np.concatenate([rollout, generators[:, :-1]], axis=1)
    leaving = np.maximum(before - generators, 0.0)
    handed_over = leaving * np.minimum(live / np.maximum(before, 1.0), most) * held
    spans += problem.refill_s * handed_over / generators
    return np.concatenate([np.zeros((len(generators), 1)), np.cumsum(spans, axis=1)], axis=1)


def _latest(paths: np.ndarray) -> np.ndarray:
    """[plans] the expected latest of [paths, plans] times that are themselves uncertain: a little more than the
    largest where others are close to it. So it pays to shorten a path that is only almost the longest."""
    largest = np.maximum(paths.max(axis=0), 1e-9)
    return largest * ((paths / largest) ** SHARPNESS).sum(axis=0) ** (1.0 / SHARPNESS)


def _work_left(problem: Problem, stage: int) -> float:
    tokens = problem.generation.tokens + sum(up.tokens for up in problem.stages[: stage + 1])
    return problem.stages[stage].seconds_per_token * tokens


def _spread(leavers: np.ndarray, work: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """[plans, stages] how many of the nodes that leave later go to each: whole nodes, to where less than a stage's
    share is."""
    if not work.sum():
        work = np.ones(len(work))
    fair = work / work.sum() * (nodes.sum(axis=1) + leavers)[:, None]
    missing = np.where(work > 0, np.maximum(fair - nodes, 1e-9), 0.0)
    exact = leavers[:, None] * missing / missing.sum(axis=1, keepdims=True)
    whole = np.floor(exact + 1e-9)
    # The nodes that are left over go to the largest remainders; ties to the earlier stage, which feeds the others.
    order = np.argsort(np.argsort(whole - exact, axis=1, kind="stable"), axis=1, kind="stable")
    return whole + (order < np.rint(leavers - whole.sum(axis=1))[:, None])


def _whole(nodes: np.ndarray, groups: float) -> np.ndarray:
    """Nodes that have work when `groups` are shared out whole: 3 groups take 2 nodes as long as they take 1.5."""
    if groups <= 0:
        return nodes
    return groups / np.ceil(groups / np.maximum(nodes, NO_NODES) - 1e-9)


def _capacity(
    problem: Problem,
    ends: np.ndarray,
    spans: np.ndarray,
    during: np.ndarray,
    after: np.ndarray,
    last: np.ndarray,
    incoming: np.ndarray,
    pause_s: np.ndarray,
    passed_at: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Node-seconds [plans, edges] that a stage has had by the times of the edges."""
    pause = problem.move_s
    passed_at = np.maximum(passed_at, pause_s)
    edges = np.concatenate([ends, passed_at[:, None]], axis=1)
    grown = np.cumsum(np.maximum(np.diff(during, axis=1), 0.0), axis=1) * pause
    capacity = np.cumsum(during * spans, axis=1)
    capacity[:, 1:] -= grown
    final = (
        capacity[:, -1:] + (after * (passed_at - ends[:, -1]) - pause * np.maximum(after - during[:, -1], 0.0))[:, None]
    )
    capacity = np.concatenate([np.zeros((len(ends), 1)), capacity, final], axis=1)
    capacity -= incoming[:, None] * np.minimum(edges, pause_s[:, None])
    return edges, np.maximum.accumulate(np.maximum(capacity, 0.0), axis=1)


def _arrivals(
    problem: Problem, s: int, ends: np.ndarray, upstream: np.ndarray, plans: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """When work comes to stage s, in its order: times [plans, cells], node-seconds [cells], and those of one group."""
    stage, made = problem.stages[s], problem.generation
    here = np.full(BACKLOG_CELLS, stage.tokens / BACKLOG_CELLS) * stage.seconds_per_token
    if s:
        before = sum(up.tokens for up in problem.stages[:s])
        coming = np.concatenate(
            [
                *(np.full(BACKLOG_CELLS, up.tokens / BACKLOG_CELLS) for up in reversed(problem.stages[:s])),
                made.tokens * np.diff(made.complete),
            ]
        )
        times = upstream
    else:
        before = 0.0
        coming = made.tokens * np.diff(made.complete)
        times = 0.5 * (ends[:, 1:] + ends[:, :-1])
        times[:, -1] = ends[:, -1]
    tokens, groups = made.tokens + before + stage.tokens, made.groups + sum(up.groups for up in problem.stages[: s + 1])
    # The last to arrive decides the end; where nothing is generated any more, any group.
    one = made.last_tokens if made.groups else tokens / max(groups, 1.0)
    size = np.concatenate([here, coming * stage.seconds_per_token])
    return np.concatenate([np.zeros((plans, BACKLOG_CELLS)), times], axis=1), size, one * stage.seconds_per_token


def _read(at: np.ndarray, places: np.ndarray, values: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """Row by row: the value at `at` of the line through (places, values), going on with `slope` after its end."""
    end = np.maximum(places[:, -1:], 1e-12)
    # One call for all rows: each on a unit of its own, behind that of the one before.
    shift = 2.0 * np.arange(len(at))[:, None]
    found = np.interp((np.minimum(at / end, 1.0) + shift).ravel(), (places / end + shift).ravel(), values.ravel())
    return found.reshape(at.shape) + np.maximum(at - end, 0.0) * slope[:, None]
