from dynarl.rl.schedule import supervised_lr, warmed_up_lr


def test_warm_up_reaches_the_full_rate_at_its_last_step_and_stays_there():
    assert [warmed_up_lr(0.4, step, 4) for step in (0, 1, 3, 4, 100)] == [0.1, 0.2, 0.4, 0.4, 0.4]


def test_without_warm_up_the_first_step_runs_at_the_full_rate():
    assert warmed_up_lr(0.4, 0, 0) == 0.4


def test_the_supervised_rate_rises_then_falls_to_a_tenth():
    rates = [supervised_lr(1.0, step, 50) for step in range(50)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert 0.9 < max(rates) < 1.0 and rates[-1] == 0.1


def test_a_supervised_stage_of_one_step_runs_at_the_full_rate():
    assert supervised_lr(0.5, 0, 1) == 0.5
