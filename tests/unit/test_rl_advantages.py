import math

from hypothesis import given
from hypothesis import strategies as st

from dynarl.rl.advantages import group_advantages, is_flat

REWARDS = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


def test_a_right_and_a_wrong_answer_have_opposite_advantages():
    right, wrong = group_advantages([1.0, 0.0])
    # Sample standard deviation of (1, 0) is 1/sqrt(2).
    assert math.isclose(right, 0.5 * math.sqrt(2), rel_tol=1e-5) and wrong == -right


def test_equal_rewards_that_are_not_binary_fractions_give_exact_zeros():
    # sum([0.1] * 10) / 10 is not 0.1 in floating point; dividing by so tiny a deviation would blow the error up.
    assert group_advantages([0.1] * 10) == [0.0] * 10
    assert is_flat([0.1] * 10) and not is_flat([0.1, 0.1, 0.2])


def test_without_normalisation_only_the_mean_is_taken_off():
    assert group_advantages([3.0, 1.0, 2.0], normalize_std=False) == [1.0, -1.0, 0.0]


@given(REWARDS, st.booleans())
def test_advantages_sum_to_zero_and_keep_the_order_of_the_rewards(rewards, normalize):
    advantages = group_advantages(rewards, normalize)
    assert len(advantages) == len(rewards)
    assert abs(math.fsum(advantages)) < 1e-6 * max(1.0, max(map(abs, advantages)))
    for a, b in zip(sorted(zip(rewards, advantages)), sorted(zip(rewards, advantages))[1:]):
        assert a[1] <= b[1]
