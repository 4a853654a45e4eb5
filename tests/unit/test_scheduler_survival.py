import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.scheduler.survival import FORGET, MAX_KINDS, Lengths, fit, grouped

CAP = 2000


def drawn(count: int, mean: float = 150.0, seed: int = 0) -> np.ndarray:
    return np.minimum(np.random.default_rng(seed).geometric(1 / mean, count), CAP)


def test_without_censoring_it_is_the_share_of_longer_answers():
    lengths = drawn(5000)
    survival = fit(lengths, [], CAP)
    for l in (10, 100, 300):
        assert survival.above[l] == pytest.approx((lengths > l).mean(), abs=1e-9)


def test_running_answers_count_as_longer_than_they_are():
    """Everything that has more than 100 tokens is still running: a mean over finished answers would say 47."""
    lengths = drawn(20000)
    short, running = lengths[lengths <= 100], np.full((lengths > 100).sum(), 100)
    assert short.mean() < 60
    assert fit(short, running, CAP).expected_remaining(0) == pytest.approx(150, rel=0.1)


def test_the_tail_beyond_the_longest_answer_is_neither_zero_nor_for_ever():
    survival = fit(drawn(400), [], CAP)
    longest = int(drawn(400).max())
    assert 50 < survival.expected_remaining(longest + 50) < 400


def test_answers_end_at_the_most_tokens_allowed_and_have_their_mass_there():
    survival = fit(np.full(50, 40), np.full(50, 60), max_tokens=100)
    assert survival.above[100] == 0.0 and survival.above[99] > 0.05
    assert survival.expected_remaining([100, 140]).tolist() == [0.0, 0.0]


def test_the_last_of_many_is_expected_later_than_the_last_of_few():
    survival = fit(drawn(5000), [], CAP)
    of_many, of_few, of_one = (survival.expected_max_remaining([0] * n) for n in (256, 8, 1))
    # The maximum of n exponentials has the mean's harmonic number.
    assert of_many == pytest.approx(150 * sum(1 / i for i in range(1, 257)), rel=0.12)
    assert of_one == pytest.approx(float(survival.expected_remaining(0)), rel=0.02)
    assert of_one < of_few < of_many
    assert survival.expected_max_remaining([]) == 0.0


def test_former_iterations_count_less():
    memory = Lengths(100)
    for _ in range(100):
        memory.finished(10)
    for _ in range(3):
        memory.next_iteration()
    assert memory.events.sum() == pytest.approx(100 * FORGET**3) == pytest.approx(50)
    for _ in range(100):
        memory.finished(50)
    assert memory.survival([]).above[20] == pytest.approx(2 / 3, abs=0.01)


def test_before_anything_has_finished_half_the_most_is_expected():
    assert 0.3 * CAP < Lengths(CAP).survival([0, 0]).expected_remaining(0) < 0.6 * CAP


def test_many_different_lengths_are_told_apart_only_roughly():
    lengths = list(range(1000))
    kinds, counts = grouped(lengths)
    assert len(kinds) == MAX_KINDS and counts.sum() == 1000
    assert (kinds * counts).sum() == pytest.approx(sum(lengths), rel=0.01)


lists = st.lists(st.integers(0, 60), max_size=40)


@settings(max_examples=200, deadline=None)
@given(lists, lists)
def test_it_never_rises_and_what_remains_fits_below_the_cap(finished, running):
    survival = fit(finished, running, max_tokens=50)
    assert (np.diff(survival.above) <= 1e-12).all() and 0.0 <= survival.above.min() and survival.above.max() <= 1.0
    rest = survival.expected_remaining(np.arange(51))
    assert (rest <= 50 - np.arange(51) + 1e-9).all() and (rest >= 0).all()
    assert survival.expected_max_remaining([0, 5]) <= 50 + 1e-9


def test_answers_cut_at_the_cap_and_running_ones_lengthen_the_tail():
    cut = fit([20] * 20 + [100] * 80, [], max_tokens=100)
    assert cut.above[99] == pytest.approx(0.8, abs=0.01)
    assert fit([], [90] * 50, max_tokens=100).expected_remaining(0) > 90
