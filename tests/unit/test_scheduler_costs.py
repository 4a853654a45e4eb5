import random

import pytest

from dynarl.scheduler.costs import DEFAULT_ERROR, DEFAULT_PAUSE_S, Costs, Errors, GroupDelay, MoveCost, StepTime, WorkRate
from dynarl.scheduler.telemetry import Instance, summarize


def test_a_step_is_learned_through_noise():
    source, model = random.Random(1), StepTime()
    for _ in range(400):
        running = source.randint(1, 64)
        model.observe(running, (0.012 + 0.0015 * running) * source.uniform(0.9, 1.1))
    assert model.seconds(1) == pytest.approx(0.0135, rel=0.1)
    assert model.seconds(64) == pytest.approx(0.108, rel=0.05)
    assert model.error.median < 0.08


def test_a_machine_that_becomes_slower_is_noticed():
    model = StepTime()
    for running in (1, 8, 32) * 50:
        model.observe(running, 0.01 + 0.001 * running)
    for running in (1, 8, 32) * 50:
        model.observe(running, 0.02 + 0.002 * running)
    assert model.seconds(16) == pytest.approx(0.052, rel=0.1)


def test_throughput_is_concave_in_running_requests():
    model = StepTime()
    for running in (1, 8, 32) * 20:
        model.observe(running, 0.01 + 0.001 * running)
    rates = [model.tokens_per_s(b) for b in (0, 1, 2, 4, 8, 16, 32, 64, 128)]
    gains = [after - before for before, after in zip(rates[1:], rates[2:])]
    assert rates == sorted(rates) and rates[0] == 0.0
    assert gains[0] / 1 > gains[1] / 2 > gains[2] / 4 > gains[4] / 16


def test_the_same_load_for_ever_does_not_make_the_estimate_explode():
    model = StepTime()
    source = random.Random(2)
    for _ in range(5000):
        model.observe(16, 0.03 * source.uniform(0.8, 1.2))
    assert model.seconds(16) == pytest.approx(0.03, rel=0.15)
    assert 0 < model.fixed_s < 0.03 * 1.2 and 0 < model.per_request_s < 0.03 / 8


def test_a_single_slow_step_does_not_overturn_what_is_known():
    model = StepTime()
    for running in (4, 16, 32) * 3:
        model.observe(running, 0.01 + 0.001 * running)
    before = model.seconds(16)
    model.observe(32, 0.4)
    assert model.seconds(16) < 4 * before


def test_nonsense_is_not_learned_from():
    model, rate = StepTime(), WorkRate()
    model.observe(0, 0.1)
    model.observe(3, 0.0)
    rate.observe(0, 1.0)
    assert not model.known and not rate.known


def test_a_role_that_was_never_seen_at_work_is_guessed_from_a_decode_step():
    """Nodes that train for the first time have no history; training is then three forward passes."""
    costs = Costs()
    costs.step.observe(8, 0.04)
    assert costs.seconds_per_token("training") == pytest.approx(3 * costs.seconds_per_token("inference"))
    costs.stages["training"] = WorkRate()
    costs.stages["training"].observe(tokens=1000, seconds=2.0)
    assert costs.seconds_per_token("training") == pytest.approx(0.002)


def test_a_move_costs_the_median_of_such_moves_else_of_all():
    cost = MoveCost()
    assert cost.seconds("rollout", "training") == DEFAULT_PAUSE_S
    for pause in (0.1, 0.2, 9.0):
        cost.observe("rollout", "training", pause)
    assert cost.seconds("rollout", "training") == cost.seconds("inference", "training") == 0.2


def test_trust_comes_from_predictions_that_came_true():
    errors = Errors()
    assert errors.median == DEFAULT_ERROR
    for predicted, actual in ((9.0, 10.0), (12.0, 10.0), (10.0, 10.0)):
        errors.add(predicted, actual)
    assert errors.median == pytest.approx(0.1)


def test_a_straggler_stays_visible_among_many():
    nodes = {f"n{i}": Instance(running=8, rate=100.0, kv_share=0.1) for i in range(99)}
    found = summarize("rollout", nodes | {"n99": Instance(running=8, rate=20.0, kv_share=0.95)})
    assert found.slowest == "n99" and found.behind == pytest.approx(5.0)
    assert found.kv_max == 0.95 and found.kv_p90 == 0.1 and found.kv_mean < 0.12
    assert found.flat()["rollout/behind"] == 5.0


def test_a_node_with_little_to_do_is_no_straggler():
    nodes = {
        "n1": Instance(running=8, rate=160.0),
        "n2": Instance(running=1, rate=50.0),
        "n3": Instance(running=8, rate=160.0),
    }
    model = {"n1": 160.0, "n2": 50.0, "n3": 160.0}
    assert summarize("rollout", nodes, expected_rate=model).behind == pytest.approx(1.0)


def test_what_requests_hold_is_told_from_their_number():
    model, source = StepTime(), random.Random(1)
    for _ in range(300):
        running = source.choice((4, 32, 128))
        held = running * source.randint(100, 20_000)
        model.observe(running, 0.005 + 8e-5 * running + 1e-8 * held, held)
    assert model.parts == pytest.approx((0.005, 8e-5, 1e-8), rel=0.05)


def test_what_was_seen_at_few_requests_is_not_forgotten_while_there_are_many():
    model = StepTime()
    for running in [1, 4, 16] * 10 + [256] * 400:
        model.observe(running, 0.004 + 1e-4 * running)
    assert model.seconds(2) == pytest.approx(0.0042, rel=0.1)


def test_groups_are_late_by_the_number_of_members_that_end_independently():
    def delay(alike: bool) -> float:
        found, source, groups, size = GroupDelay(200, 8), random.Random(2), range(200), 8
        shared = [source.random() for _ in groups]
        ends = sorted((shared[g] if alike else source.random(), g) for g in groups for _ in range(size))
        for _, group in ends:
            found.finished(str(group))
        found.next_iteration()
        return found.estimate

    assert delay(alike=True) == pytest.approx(1.0, abs=0.05) and delay(alike=False) == pytest.approx(8.0, rel=0.1)


def test_how_late_groups_are_is_that_of_the_iteration_before_until_enough_are_complete():
    delay = GroupDelay(100, 2)
    assert delay.estimate is None
    for group in range(100):
        delay.finished(str(group)), delay.finished(str(group))
    found = delay.estimate
    delay.next_iteration()
    delay.finished("1")
    assert delay.estimate == found


def test_what_is_taken_in_late_teaches_what_it_would_have_taught_at_once(monkeypatch):
    source, late, at_once = random.Random(2), StepTime(), StepTime()
    steps = [(source.choice((1, 3, 8, 24, 64)), source.uniform(0.01, 0.03), source.uniform(0, 1e5)) for _ in range(200)]
    for step in steps:
        late.observe(*step)
    monkeypatch.setattr("dynarl.scheduler.costs.MOST_UNLEARNED", 1)
    for step in steps:
        at_once.observe(*step)
    assert late.error.last == at_once.error.last
    assert late.parts == at_once.parts and late.per_request_s == at_once.per_request_s
