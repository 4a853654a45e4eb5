"""The bound on iterations on paper: no schedule beats it, and where one can reason what is possible it is just that."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.scheduler.bound import least_s
from dynarl.scheduler.replay import Replay, Work

ROLES = ("rollout", "inference", "training")


def drawn(seed: int) -> tuple[Work, int]:
    source = random.Random(seed)
    groups = [[source.randint(1, 80) for _ in range(source.randint(1, 5))] for _ in range(source.randint(1, 9))]
    stages = {"inference": source.choice([1e-4, 1e-3]), "training": source.choice([1e-3, 5e-3])}
    running = source.choice([3, 64])
    step = source.choice([0.001, 0.02]), source.choice([0.0, 0.001, 0.01])
    return Work(groups, step, stages, running, source.choice([0.0, 0.2]), look_s=0.05), source.randint(2, 6)


def at_random(source: random.Random):
    """Any moves at all, as long as somebody generates while requests live and there is a node for each stage's work."""

    def ask(replay: Replay) -> dict[str, str]:
        seen = replay.situation()
        busy = [stage for stage, queue in seen.queues.items() if queue.waiting]
        if not seen.live:
            return {n: source.choice(busy or ["training"]) for n, r in seen.roles.items() if r not in busy}
        first, *others = seen.roles
        changed = {node: source.choice(ROLES) for node in others if source.random() < 0.3}
        return changed | ({first: "rollout"} if seen.roles[first] != "rollout" else {})

    return ask


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_no_schedule_beats_the_bound(seed):
    work, nodes = drawn(seed)
    least, names = least_s(work, nodes), [f"n{i}" for i in range(nodes)]
    for attempt in range(3):
        ask = at_random(random.Random(seed + attempt))
        replay = Replay(work, dict.fromkeys(names, "rollout"), dict.fromkeys(names, frozenset(ROLES)), ask)
        assert replay.run(limit_s=1e4) >= least - 1e-6


def test_one_group_takes_its_longest_answer_and_its_own_work():
    work = Work([[100, 40]], (0.01, 0.001), {"training": 0.002}, move_s=0.0)
    assert least_s(work, 4) == pytest.approx(100 * 0.011 + 140 * 0.002)


def test_answers_that_share_a_node_wait_for_each_other():
    work = Work([[100] * 8], (0.01, 0.001), {"training": 1e-9}, move_s=0.0)
    assert least_s(work, 1) == pytest.approx(100 * 0.018, rel=1e-3)
    assert least_s(work, 4) == pytest.approx(100 * 0.012, rel=1e-3)


def test_work_after_the_last_answer_is_shared_by_all_nodes():
    work = Work([[10]] * 40, (0.01, 0.0), {"training": 0.1}, move_s=0.0)
    assert least_s(work, 4) == pytest.approx(10 * 0.01 + 40 / 4, rel=0.01)


def test_work_that_is_there_before_the_last_answer_can_be_done_meanwhile():
    """Nine short groups are trained by one node while the other generates the long answer."""
    work = Work([[10]] * 9 + [[1000]], (0.01, 0.0), {"training": 0.01}, move_s=0.0)
    assert least_s(work, 2) == pytest.approx(1000 * 0.01 + 10, rel=0.01)


def test_nodes_that_have_to_move_lose_that_time():
    """Most of it is work of the stage, so each node has to come, and loses the move."""
    work = Work([[10]] * 40, (0.01, 0.0), {"training": 0.1}, move_s=0.5)
    assert least_s(work, 4) == pytest.approx(10 * 0.01 + 40 / 4 + 0.5, rel=0.02)
