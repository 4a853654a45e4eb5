from dynarl.hypergraph import workflow
from dynarl.scheduler.placement.flow import Flow
from dynarl.scheduler.placement.plan import Alone, InTurn, SideBySide
from dynarl.scheduler.placement.search import find_schedule
from dynarl.scheduler.placement.stability import stability
from dynarl.scheduler.placement.stage import Measured

GRPO = Flow.of(workflow.declared("grpo"))
STAGES = [Measured(40, 8, 64), Measured(10, 8, 64), Measured(30, 8, 64)]
TURNS = InTurn(Alone(0, 8, True), InTurn(Alone(1, 8, True), Alone(2, 8, True), 8), 8)
APART = SideBySide(SideBySide(Alone(0, 4), Alone(1, 1), 5, 64), Alone(2, 3), 8, 64)


def test_a_plan_that_is_far_ahead_stays_the_best():
    found = stability(GRPO, [*STAGES[:2], Measured(30, 8, 64, state_load_s=200)], 64, [APART, TURNS])
    assert (found.best, found.close, found.loss, found.draws) == (1.0, 1.0, 0.0, 64)


def test_of_two_that_are_level_each_is_the_best_in_some_draws():
    plans = [
        SideBySide(Alone(0, n), InTurn(Alone(1, 8 - n, True), Alone(2, 8 - n, True), 8 - n), 8, 64) for n in (4, 5)
    ]
    level = [Measured(40, 8, 64), Measured(10, 8, 64), Measured(19, 8, 64)]
    found = stability(GRPO, level, 64, plans)
    assert 0 < found.best < 1 and found.best <= found.close and 0 < found.loss < 0.5
    assert stability(GRPO, level, 64, plans) == found


def test_costs_that_are_certain_change_nothing():
    plans = [each.plan for each in find_schedule(GRPO, STAGES, 8, 64)]
    assert stability(GRPO, STAGES, 64, plans, error=0.0)[:3] == (1.0, 1.0, 0.0)
