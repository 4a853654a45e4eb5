"""Turns of components at the devices of a node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynarl.dataflow.device_lock import DeviceLock

ORDER = ("rollout", "inference", "training")
# What happens: a component enters, or the turn at this place of all open ones leaves.
STEPS = st.lists(st.one_of(st.sampled_from(ORDER), st.integers(0, 20)), max_size=60)


def play(steps):
    """Yields the lock and its open turns after each step."""
    lock, turns = DeviceLock(ORDER), []
    for step in steps:
        if isinstance(step, str):
            turns.append(lock.enter(step))
        elif turns:
            turn = turns.pop(step % len(turns))
            before = {id(t) for t in turns if t.holds}
            begun = lock.leave(turn)
            assert {id(t) for t in begun} == {id(t) for t in turns if t.holds} - before, "all that begin are named"
        yield lock, turns


@given(STEPS)
def test_one_component_at_a_time_has_the_devices_and_somebody_has_them_while_anybody_wants_them(steps):
    for lock, turns in play(steps):
        inside = {turn.component for turn in turns if turn.holds}
        assert inside == ({lock.holder} if turns else set()) and len(inside) <= 1
        assert sorted(lock.waiting) == sorted(turn.component for turn in turns if not turn.holds)


@given(STEPS, st.data())
def test_whatever_the_order_in_which_turns_end_all_of_them_come_to_an_end(steps, data):
    lock, turns = None, []
    for lock, turns in play(steps):
        pass
    for _ in range(len(turns)):
        inside = [turn for turn in turns if turn.holds]
        assert inside, "those that are left wait for nobody"
        turn = data.draw(st.sampled_from(inside))
        turns.remove(turn)
        lock.leave(turn)
    assert lock is None or (lock.holder is None and not lock.waiting)


@given(STEPS, st.sampled_from(ORDER), st.lists(st.sampled_from(ORDER), max_size=60))
def test_nobody_starves(steps, component, others):
    """However many come later, one turn of each component further up goes before it, and nobody else."""
    lock, turns = DeviceLock(ORDER), []
    for lock, turns in play(steps):
        pass
    inside = [turn for turn in turns if turn.holds]
    turn = lock.enter(component)
    later = [lock.enter(other) for other in others]
    while not turn.holds:
        inside += lock.leave(inside.pop(0))
    before = [each for each in later if each.holds and each.component != component]
    assert len(before) <= ORDER.index(component)


def test_a_component_enters_again_while_nobody_waits():
    lock = DeviceLock(ORDER)
    first, second = lock.enter("rollout"), lock.enter("rollout")
    assert first.holds and second.holds
    waiting = lock.enter("training")
    assert lock.leave(first) == [] and lock.leave(second) == [waiting] and lock.holder == "training"


def test_further_up_goes_first_and_equals_go_as_they_came():
    lock = DeviceLock(ORDER)
    held = lock.enter("training")
    turns = [lock.enter(component) for component in ("inference", "training", "rollout", "rollout", "inference")]
    # The second rollout turn has to wait behind those that the first one passed.
    assert lock.waiting == ("rollout", "inference", "training", "rollout", "inference")
    assert lock.leave(held) == [turns[2]] and lock.leave(turns[2]) == [turns[0]]


def test_a_turn_may_give_up_its_wait():
    lock = DeviceLock(ORDER)
    held, given_up, last = lock.enter("rollout"), lock.enter("inference"), lock.enter("training")
    assert lock.leave(given_up) == [] and lock.waiting == ("training",)
    assert lock.leave(held) == [last]


def test_a_component_that_does_not_share_the_devices_is_refused():
    with pytest.raises(KeyError, match="critic"):
        DeviceLock(ORDER).enter("critic")
