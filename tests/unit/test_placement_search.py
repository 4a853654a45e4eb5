"""The search against everything that there is to choose from."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.errors import ConfigError
from dynarl.hypergraph import workflow
from dynarl.scheduler.placement.flow import Flow
from dynarl.scheduler.placement.plan import Alone, Execution, InTurn, SideBySide, leaves, mode, ranges, shape
from dynarl.scheduler.placement.search import chain, find_schedule
from dynarl.scheduler.placement.stage import Measured

GRPO = Flow.of(workflow.declared("grpo"))
PPO = Flow.of(workflow.declared("ppo-critic"))


def every_plan(flow, mask, level, shared, devices, numbers):
    """All trees of a set of stages on so many devices, with all splits and chunks."""
    if mask.bit_count() == 1:
        yield Alone(mask.bit_length() - 1, devices, shared)
        return
    for first, second in flow.cuts(mask):
        parts = [list(every_plan(flow, part, level, True, devices, numbers)) for part in (first, second)]
        for a, b in itertools.product(*parts):
            yield InTurn(a, b, devices)
        joined = flow.joined(first, second)
        for given in range(1, devices):
            left = list(every_plan(flow, first, level, shared, given, numbers))
            for finer in range(level, len(numbers)) if joined else [level]:
                right = list(every_plan(flow, second, finer, shared, devices - given, numbers))
                for a, b in itertools.product(left, right):
                    yield SideBySide(a, b, devices, numbers[finer] // numbers[level], joined)


def times(flow, stages, items, plan, sync_s=None):
    return Execution(flow, stages, items, sync_s or {}).run(plan)


costs = st.builds(
    Measured,
    seconds_seen=st.floats(5.0, 200.0),
    devices_seen=st.just(4),
    items_seen=st.just(8),
    unit=st.sampled_from([1, 1, 2]),
    fixed_s=st.floats(0.0, 4.0),
    level_s=st.sampled_from([0.0, 10.0, 60.0]),
    state_load_s=st.sampled_from([0.0, 1.0, 8.0]),
)


@settings(max_examples=25, deadline=None)
@given(st.tuples(costs, costs, costs), st.integers(3, 6), st.sampled_from([0.0, 3.0]))
def test_a_plan_is_within_two_percent_of_the_best_of_all(stages, devices, sync_s):
    sync = {0: sync_s, 1: sync_s}
    numbers = chain(8)
    plans = every_plan(GRPO, GRPO.everything, 0, False, devices, numbers)
    best = min(times(GRPO, stages, 8, plan, sync) for plan in plans)
    found = find_schedule(GRPO, stages, devices, 8, sync_s=sync)[0]
    assert found.seconds <= best * 1.02
    assert found.seconds >= best * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.lists(costs, min_size=4, max_size=4), st.integers(2, 40), st.sampled_from(["any", "temporal", "spatial"]))
def test_what_the_search_counts_is_what_carrying_the_plan_out_takes(stages, devices, wanted):
    try:
        found = find_schedule(PPO, stages, devices, 8, mode=wanted, sync_s={0: 1.0})
    except ConfigError:
        assert devices < sum(stage.unit for stage in stages)
        return
    for each in found:
        assert times(PPO, stages, 8, each.plan, {0: 1.0}) == pytest.approx(each.seconds)
        assert {leaf.stage for leaf in leaves(each.plan)} == set(range(4))
        assert wanted in ("any", mode(each.plan))
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)


@settings(max_examples=20, deadline=None)
@given(st.tuples(costs, costs, costs), st.integers(1, 40))
def test_more_devices_never_make_a_plan_slower(stages, devices):
    both = [find_schedule(GRPO, stages, number, 8) for number in (devices + 2, devices + 3)]
    assert both[1][0].seconds <= both[0][0].seconds * (1 + 1e-9)


def test_sizes_beyond_the_first_grid_are_found_as_well_as_if_all_were_tried(monkeypatch):
    stages = [
        Measured(500, 64, 512, 1, 0, 50, 3),
        Measured(40, 64, 512, 2, 0, 0, 2),
        Measured(430, 64, 512, 4, 4, 0, 5),
    ]
    quick = find_schedule(GRPO, stages, 480, 512)[0].seconds
    monkeypatch.setattr("dynarl.scheduler.placement.search.EXACT", 480)
    assert quick <= find_schedule(GRPO, stages, 480, 512)[0].seconds * 1.005


def test_a_stage_may_get_a_single_device():
    stages = [Measured(80, 8, 64), Measured(0.5, 8, 64, state_load_s=40), Measured(60, 8, 64, state_load_s=40)]
    plan = find_schedule(GRPO, stages, 8, 64)[0].plan
    assert {leaf.stage: leaf.devices for leaf in leaves(plan)}[1] == 1


def test_a_part_that_ends_later_but_begins_earlier_is_kept_for_what_comes_after():
    """In turn the first two stages end sooner; side by side their first items are ready sooner, and training can begin."""
    stages = [Measured(5, 4, 8), Measured(5, 4, 8), Measured(5, 4, 8, state_load_s=8)]
    found = find_schedule(GRPO, stages, 6, 8, sync_s={0: 3.0, 1: 3.0})[0]
    assert (found.seconds, shape(GRPO, found.plan)) == (21.0, "rollout | inference | training")


def test_switching_that_costs_nothing_is_taken_and_switching_that_costs_much_is_not():
    free = [Measured(30, 8, 7, unit=8), Measured(30, 8, 7, unit=4), Measured(30, 8, 7, unit=8)]
    assert shape(GRPO, find_schedule(GRPO, free, 8, 7)[0].plan) == "rollout > inference > training"
    dear = [Measured(30, 8, 64, state_load_s=1e4) for _ in range(3)]
    assert mode(find_schedule(GRPO, dear, 8, 64)[0].plan) == "spatial"


def test_stages_that_feed_each_other_nothing_run_at_the_same_time():
    stages = [Measured(4, 8, 8), Measured(30, 4, 8, level_s=30), Measured(30, 4, 8, level_s=30), Measured(4, 8, 8)]
    found = find_schedule(PPO, stages, 8, 8)[0]
    assert found.seconds == pytest.approx(38.0)
    assert shape(PPO, found.plan) == "rollout > (inference | critic) > training"


def test_devices_of_a_unit_are_given_together_and_belong_to_one_part():
    stages = [Measured(80, 8, 64, state_load_s=90), Measured(20, 8, 64), Measured(60, 8, 64)]
    found = find_schedule(GRPO, stages, 64, 64, unit=8, mode="spatial")[0]
    given = ranges(found.plan)
    assert all(first % 8 == 0 and end % 8 == 0 for first, end in given.values())
    used = sorted(given.values())
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(used)) and used[-1][1] <= 64


def test_what_does_not_fit_is_refused_with_the_arithmetic():
    stages = [Measured(80, 8, 64), Measured(80, 8, 64), Measured(80, 64, 64, unit=32)]
    with pytest.raises(ConfigError, match="training: a replica needs 32 devices, there are 16"):
        find_schedule(GRPO, stages, 16, 64)
    with pytest.raises(ConfigError, match="12 devices are not a whole number of 8"):
        find_schedule(GRPO, stages, 12, 64, unit=8)


def test_a_slow_last_item_holds_up_those_that_come_after_it():
    """Half of the items come at the very end: what is downstream cannot hide behind the first part."""

    class Late(Measured):
        def release(self, devices, items, shared, points):
            share = np.where(np.arange(1, points + 1) > points // 2, 1.0, 0.5)
            return self.seconds(devices, items, shared)[:, None] * share

    rest = [Measured(8, 4, 8, unit=4), Measured(40, 4, 8, unit=4)]
    plan = SideBySide(Alone(0, 4), InTurn(Alone(1, 4, True), Alone(2, 4, True), 4), 8, 8)
    # Six seconds of inference and training for each of eight groups; one every eight seconds, or four at the end of 64.
    assert times(GRPO, [Measured(64, 4, 8, level_s=64), *rest], 8, plan) == pytest.approx(64 + 6)
    assert times(GRPO, [Late(64, 4, 8, level_s=64), *rest], 8, plan) == pytest.approx(64 + 4 * 6)
