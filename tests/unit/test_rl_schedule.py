from dynarl.rl.schedule import warmed_up_lr


def test_warm_up_reaches_the_full_rate_at_its_last_step_and_stays_there():
    assert [warmed_up_lr(0.4, step, 4) for step in (0, 1, 3, 4, 100)] == [0.1, 0.2, 0.4, 0.4, 0.4]


def test_without_warm_up_the_first_step_runs_at_the_full_rate():
    assert warmed_up_lr(0.4, 0, 0) == 0.4
