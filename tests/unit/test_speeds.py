import random

import pytest

from dynarl.dataflow.speeds import MOST_OCTAVES, Speeds


def engine(speeds: Speeds, name: str, fixed_s: float, each_s: float, loads: list[int], now: float = 0.0, per_load_s: float = 1.0) -> float:
    """Readings of an engine that keeps each load for a while; returns the time after that."""
    tokens = 0
    for load in loads:
        for _ in range(3):
            speeds.note(name, now, tokens, load)
            now += per_load_s
            tokens += round(per_load_s / (fixed_s + each_s * load) * load)
    return now


def test_the_line_is_found_from_different_loads():
    speeds = Speeds()
    engine(speeds, "n1", 0.01, 0.002, [1, 8, 30, 16, 2])
    assert speeds.of("n1") == pytest.approx((0.01, 0.002), rel=0.15)


def test_a_straggler_is_known_by_its_factor_at_whatever_load():
    speeds = Speeds()
    now = 0.0
    for load in (4, 16, 2, 8) * 2:
        for name in ("n1", "n2", "n3"):
            engine(speeds, name, 0.01, 0.001, [load], now)
        now = engine(speeds, "slow", 0.04, 0.004, [load], now)
    fast, slow = speeds.of("n1"), speeds.of("slow")
    assert speeds.of("n2") == fast and slow[1] / fast[1] == pytest.approx(4, rel=0.2)


def test_at_one_load_half_is_fixed():
    speeds = Speeds()
    engine(speeds, "n1", 0.01, 0.01, [9])
    fixed, each = speeds.of("n1")
    assert fixed == pytest.approx(0.05, rel=0.1) and 9 * each == pytest.approx(fixed)


def test_an_instance_that_was_never_seen_is_as_fast_as_the_line_and_no_measurement_is_one_and_one():
    speeds = Speeds()
    assert speeds.of("n1") == (1, 1) and not speeds.known()
    engine(speeds, "n1", 0.01, 0.002, [1, 8, 30] * 3)
    assert speeds.known() and speeds.of("n9") == pytest.approx((0.01, 0.002), rel=0.15)


def test_idle_times_new_engines_and_wild_readings_do_no_harm():
    speeds = Speeds()
    now = engine(speeds, "n1", 0.01, 0.002, [4, 16])
    before = speeds.of("n1")
    speeds.note("n1", now, 10**6, 0)  # idle
    speeds.note("n1", now + 1000, 10**6, 4)
    speeds.note("n1", now + 1001, 5, 4)  # a new engine counts from the beginning
    assert speeds.of("n1") == before
    for second in range(20):  # stopped, all but for one token
        speeds.note("n1", now + 2000 + 500 * second, 10 + second, 16)
    fixed, each = speeds.of("n1")
    line = speeds.of("never seen")
    assert fixed + each <= 2**MOST_OCTAVES * sum(line) + 1e-9


def test_a_reading_in_which_moved_requests_were_prefilled_says_nothing():
    speeds = Speeds()
    now = engine(speeds, "n1", 0.01, 0.001, [8, 16])
    before = speeds.of("n1")
    for second in range(1, 20):  # ten times as slow, and far more was prefilled than decoded
        speeds.note("n1", now + second, 100_000 + 80 * second, 8, 1000 * second)
    assert speeds.of("n1") == before


def test_an_instance_that_was_slow_in_a_bad_moment_is_given_work_again():
    """It would get nothing for being slow, hence never be measured again, and stay slow for ever."""
    speeds = Speeds()
    for second in range(9):
        speeds.note("quick", second, 8 * second, 4)
        speeds.note("slow then", second, second, 4)
    assert speeds.of("slow then")[0] > 3 * speeds.of("quick")[0]
    for second in range(9, 40):
        speeds.note("quick", second, 8 * second, 4)
    assert speeds.of("slow then") == speeds.of("one that was never seen")


def test_a_pause_between_two_iterations_says_nothing_of_the_speed():
    speeds = Speeds(most_s=2.5)
    now = engine(speeds, "n1", 0.01, 0.001, [8, 16])
    before = speeds.of("n1")
    speeds.note("n1", now + 60.0, 10_000, 16)  # the last report and this one have requests running, a minute apart
    assert speeds.of("n1") == before


def test_reports_that_come_together_are_timed_by_the_clock_of_who_made_them():
    late, prompt = Speeds(), Speeds()
    for second in range(6):
        prompt.note("n1", second, 80 * second, 8)
        late.note("n1", 2.0 * (second // 2), 80 * second, 8, made_s=1e6 + second)
    assert late.of("n1") == prompt.of("n1")


def test_an_instance_whose_clock_began_anew_is_measured_on():
    speeds = Speeds()
    for second in range(6):
        speeds.note("n1", second, 80 * second, 8, made_s=1e6 + second)
        speeds.note("n2", second, 80 * second, 8, made_s=1e6 + second)
    for second in range(60, 70):  # and it is slower now
        speeds.note("n1", second, 80 * second, 8, made_s=1e6 + second)
        speeds.note("n2", second, 20 * second, 8, made_s=second - 50.0)
    assert speeds.of("n2")[0] > 1.5 * speeds.of("n1")[0] > 0


def test_equal_instances_with_noisy_readings_are_equal():
    speeds, noise = Speeds(), random.Random(1)
    for second in range(12):
        for name in ("n1", "n2", "n3", "n4"):
            speeds.note(name, second + noise.uniform(-0.15, 0.15), 80 * second, 8)
    assert len({speeds.of(name) for name in ("n1", "n2", "n3", "n4")}) == 1


def test_noise_at_about_one_load_does_not_make_requests_free():
    speeds, noise = Speeds(), random.Random(2)
    second = 0.0
    for _ in range(8):
        for load in (40, 36):  # the lower load happens to take as long
            speeds.note("n1", second, round(1000 * second), load)
            second += noise.uniform(0.9, 1.1)
    fixed, each = speeds.of("n1")
    assert 0.3 < 38 * each / (fixed + 38 * each) < 0.7
