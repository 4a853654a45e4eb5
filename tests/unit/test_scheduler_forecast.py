"""The forecast against iterations played out on paper, and against what can be worked out by hand."""

import heapq
import random

import numpy as np
import pytest

from dynarl.scheduler.forecast import CELLS, Problem, Stage, finish_times, generation
from dynarl.scheduler.replay import Replay, Work
from dynarl.scheduler.survival import fit

STEP = (0.01, 0.001)


def drawn(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [min(768, 1 + int(source.lognormvariate(4.3, 0.9))) for _ in range(count)]


SURVIVAL = fit(drawn(5000), [], 768)
NOTHING = generation(SURVIVAL, [], {}, 0.0)


def ends(
    problem: Problem, *allocations: tuple[int, ...], pause_s: float = 0.0, incoming=None, keep=None, cell: int = CELLS
) -> list[float]:
    nodes = np.array(allocations)
    incoming = np.zeros_like(nodes) if incoming is None else np.array([incoming] * len(nodes))
    generators = np.repeat(nodes[:, :1].astype(float), CELLS, axis=1)
    if keep is not None:
        generators[:, cell:] = np.minimum(generators[:, cell:], keep)
    return finish_times(problem, nodes, incoming, np.full(len(nodes), pause_s), generators).tolist()


def problem(made=NOTHING, stages=(Stage(2e-4), Stage(6e-4, passes_on=False)), step=STEP, **options) -> Problem:
    return Problem(made, stages, (*step, 0.0), options.pop("max_running", 64), options.pop("move_s", 0.0), **options)


@pytest.mark.parametrize("training", [1, 2, 5, 10])
def test_a_queue_alone_ends_when_its_groups_are_shared_out(training):
    found = ends(problem(stages=(Stage(1e-3, groups=10, tokens=10_000),)), (0, training))
    assert found == pytest.approx([10 / training], rel=0.01)


def test_groups_are_not_split():
    queue = problem(stages=(Stage(1e-3, groups=3, tokens=3000),))
    assert ends(queue, (0, 2), (0, 3), (0, 9)) == pytest.approx([2.0, 1.0, 1.0], rel=0.1)


def test_a_moved_node_is_missing_for_its_cost():
    queue = problem(stages=(Stage(1e-3, groups=40, tokens=40_000),))
    alone, both, dear = (
        ends(queue, (0, 1)),
        ends(queue, (0, 2), incoming=(0, 1), pause_s=1.0),
        ends(queue, (0, 2), incoming=(0, 1), pause_s=10.0),
    )
    assert (alone[0], both[0], dear[0]) == pytest.approx((40.0, 20.5, 25.0), rel=0.02)


def test_a_stage_without_nodes_never_ends_unless_another_passes_its_on():
    stages = lambda passes_on: (Stage(1e-3, 4, 4000, passes_on=passes_on), Stage(1e-3, passes_on=False))  # noqa: E731
    assert ends(problem(stages=stages(False)), (0, 2, 0))[0] > 1e6
    assert ends(problem(stages=stages(True)), (0, 2, 0)) == pytest.approx([4.0], rel=0.15)


def test_requests_without_a_node_never_end():
    assert ends(problem(generation(SURVIVAL, [0] * 8, {8: 1}, 0.0)), (0, 1, 1)) == [float("inf")]


@pytest.mark.parametrize("allocation", [(8, 0, 0), (6, 1, 1), (4, 1, 3), (2, 2, 4)], ids=str)
@pytest.mark.parametrize("groups", [16, 48])
def test_it_foretells_how_iterations_end(allocation, groups):
    """Mean over iterations of one allocation, whose nodes leave rollout with the last answer, within a tenth."""
    forecast = ends(
        problem(
            generation(SURVIVAL, [0] * 8 * groups, {8: groups}, 0.0),
            (Stage(2e-4), Stage(6e-4, passes_on=False)),
            move_s=0.2,
        ),
        allocation,
    )
    played = [play(allocation, [drawn(8, 1000 * seed + g) for g in range(groups)]) for seed in range(16)]
    assert forecast[0] == pytest.approx(float(np.mean(played)), rel=0.1)


def play(allocation: tuple[int, ...], lengths) -> float:
    roles = [role for role, count in zip(("rollout", "inference", "training"), allocation) for _ in range(count)]
    nodes = {f"n{i}": role for i, role in enumerate(roles)}

    def leave_at_the_end(replay):
        seen = replay.situation()
        total = sum(allocation)
        if seen.live:
            return {}
        if "rollout" in seen.roles.values():
            scorers = max(allocation[1], round(total * 0.25))
            free = [n for n, role in seen.roles.items() if role == "rollout"]
            return {n: "inference" if i < scorers - allocation[1] else "training" for i, n in enumerate(free)}
        if not seen.queues["inference"].groups:
            return {n: "training" for n, role in seen.roles.items() if role == "inference"}
        return {}

    work = Work(lengths, STEP, {"inference": 2e-4, "training": 6e-4}, 64, 0.2)
    return Replay(
        work, nodes, dict.fromkeys(nodes, frozenset(("rollout", "inference", "training"))), leave_at_the_end
    ).run()


def test_nodes_that_leave_later_serve_the_stages_from_then_on():
    made = generation(SURVIVAL, [60] * 24, {8: 3}, 0.0)
    busy = problem(made, (Stage(2e-4, 20, 20_000), Stage(6e-4, 30, 30_000, passes_on=False)))
    never, late, early = (
        ends(busy, (6, 1, 1)),
        ends(busy, (6, 1, 1), keep=1, cell=24),
        ends(busy, (6, 1, 1), keep=1, cell=2),
    )
    assert early[0] < never[0] and late[0] < never[0]


def test_what_tools_write_is_work_and_memory_but_takes_no_decode_step():
    plain, tools = (
        generation(SURVIVAL, [0] * 64, {8: 8}, 100.0, written_per_sampled=share) for share in (1.0, 2.0)
    )
    assert (tools.x == plain.x).all() and (tools.live == plain.live).all()
    assert tools.tokens - 100.0 == pytest.approx(2 * (plain.tokens - 100.0))
    assert tools.peak_kv_tokens == pytest.approx(2 * plain.peak_kv_tokens)


def test_the_kv_memory_is_that_of_the_fullest_moment_to_come():
    made = generation(SURVIVAL, [0] * 64, {8: 8}, 0.0, prompt_tokens=50.0)
    assert made.peak_kv_tokens > 64 * 50 and made.peak_kv_tokens < 64 * (50 + 768)
    assert made.live[0] == 64 and made.live[-1] == 0 and made.complete[0] == 0 and made.complete[-1] == pytest.approx(1)


def test_requests_that_wait_begin_as_others_end():
    """Against the same number of slots filled by hand: when the last ends, and what is decoded."""
    made = generation(SURVIVAL, [0] * 400, {8: 50}, 0.0, slots=100)
    lasts, totals = [], []
    for seed in range(20):
        free = [0] * 100
        for length in drawn(400, seed):
            heapq.heapreplace(free, free[0] + length)
        lasts.append(max(free)), totals.append(sum(drawn(400, seed)))
    assert made.x[-1] == pytest.approx(np.mean(lasts), rel=0.1)
    assert made.work.sum() == pytest.approx(np.mean(totals), rel=0.1)
    assert made.live[0] == 400 and made.live[-1] == 0 and (np.diff(made.live) <= 1e-9).all()


def test_groups_are_complete_sooner_where_their_members_are_alike():
    def complete(**options) -> np.ndarray:
        return generation(SURVIVAL, [0] * 400, {8: 50}, 0.0, slots=100, **options).complete

    alike, independent = complete(group_delay=1.2), complete()
    assert (alike >= independent - 1e-9).all() and alike[10] > independent[10] + 0.05
    assert alike[0] == 0 and alike[-1] == pytest.approx(1)


def test_a_group_with_one_answer_to_come_is_complete_when_that_ends():
    def complete(members: dict[int, int], delay: float | None) -> np.ndarray:
        return generation(SURVIVAL, [50] * 80, members, 0.0, group_delay=delay).complete

    last = complete({1: 80}, None)
    assert complete({1: 80}, 3.0) == pytest.approx(last), "whatever was seen of groups with more"
    assert (complete({8: 10}, 3.0)[1:-1] < last[1:-1]).all()


def test_groups_that_differ_more_the_longer_they_get():
    """Drawn as lengths of answers are: a body alike within a group, and a tail that is not."""
    source = np.random.default_rng(3)
    body = np.exp(0.4 * (0.77 * source.normal(size=(200, 1)) + 0.63 * source.normal(size=(200, 16)))) * 200
    drawn = np.minimum(np.where(source.random((200, 16)) < 0.02, 400 / np.sqrt(source.random((200, 16))), body), 760)
    drawn = drawn.astype(int)
    answers = np.sort(drawn, axis=None)
    for now in (220, 300, 400):
        live = (drawn > now).sum(axis=1)
        delay = np.log((live == 0).mean()) / np.log((answers <= now).mean())
        members = dict(zip(*(part.tolist() for part in np.unique(live[live > 0], return_counts=True))))
        made = generation(fit(answers, [], 768), [now] * int(live.sum()), members, 0.0, group_delay=delay)
        late = drawn.max(axis=1)[live > 0]
        seen = [(late <= now + x).mean() for x in made.x]
        assert np.abs(made.complete - seen).mean() < 0.08


def test_steps_take_longer_the_more_tokens_are_held_and_fewer_run_where_memory_is_short():
    made = generation(SURVIVAL, [0] * 64, {8: 8}, 0.0)
    stages = (Stage(0.0), Stage(0.0))
    short, long = (ends(Problem(made, stages, (0.01, 0.001, k), 64, 0.0), (2, 0, 0))[0] for k in (0.0, 1e-5))
    tight = ends(Problem(made, stages, (0.01, 0.001, 0.0), 64, 0.0, kv_tokens=500.0), (2, 0, 0))[0]
    assert long > 1.1 * short and tight > 1.1 * short


def test_answers_that_wait_for_tools_end_later_unless_others_fill_their_places():
    def rollout(live: int, wait_s: float) -> float:
        made = generation(SURVIVAL, [0] * live, {8: live // 8}, 0.0, slots=2.0 * 64)
        return ends(Problem(made, (Stage(0.0), Stage(0.0)), (0.01, 0.001, 0.0), 64, 0.0, wait_s=wait_s), (2, 0, 0))[0]

    alone, crowded = (rollout(live, 0.01) / rollout(live, 0.0) for live in (16, 1600))
    # A step takes 18 ms with eight requests and 11 with the last one, to which 10 are added.
    assert 1.5 < alone < 1.95 and crowded < 1.15


def test_who_leaves_rollout_leaves_its_keys_and_values_to_be_computed_again():
    made = generation(SURVIVAL, [100] * 64, {8: 8}, 0.0)

    def end(refill_s: float, rollout: int) -> float:
        return ends(
            Problem(made, (Stage(0.0), Stage(0.0)), (0.01, 0.001, 0.0), 64, 0.0, rollout=rollout, refill_s=refill_s),
            (2, 0, 0),
        )[0]

    assert end(1e-3, rollout=2) == end(0.0, rollout=4), "nobody leaves, or it costs nothing"
    # Half of the requests, with a bit more than 100 tokens each, on two nodes.
    assert end(1e-3, rollout=4) - end(0.0, rollout=4) == pytest.approx(1e-3 * 32 * 100 / 2, rel=0.1)


def test_answers_longer_than_any_is_thought_to_get_end_at_once():
    survival = fit([10] * 20, [], 100, tail_at_risk=0.0)
    made = generation(survival, [20] * 4, {2: 2}, 0.0)
    assert made.work.sum() == 0 and made.complete[-1] == 1.0
    assert ends(problem(made), (1, 1, 1)) == ends(problem(made), (2, 1, 1))
