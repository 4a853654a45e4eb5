import pytest

from dynarl.rl.truncation import judge


@pytest.mark.parametrize("rule", ["keep", "zero_reward", "mask"])
def test_a_finished_answer_is_never_touched(rule):
    assert judge(rule, 0.7, "stop") == (0.7, 1.0)


def test_each_rule_does_one_thing_to_a_cut_answer():
    assert judge("keep", 0.7, "length") == (0.7, 1.0)
    assert judge("zero_reward", 0.7, "length") == (0.0, 1.0)
    assert judge("mask", 0.7, "length") == (0.7, 0.0)


def test_an_unknown_rule_is_refused_even_for_a_finished_answer():
    with pytest.raises(ValueError, match="drop"):
        judge("drop", 1.0, "stop")
