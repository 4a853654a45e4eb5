"""The order within an instance, on a simulated clock."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from dynarl.dataflow.priority import MOST_PASSES, MOST_WAIT_S, Desk


class Engine:
    """Admits one request at a time. Requests: name -> (ticket, cached tokens)."""

    def __init__(self, by="priority", **limits):
        self.desk, self.by, self.waiting, self.order, self.now = Desk(**limits), by, {}, [], 0.0

    def come(self, name, tool_calls=0, cached=0):
        self.waiting[name] = self.desk.ticket(tool_calls, self.now, self.by), cached

    def admit(self):
        names = list(self.waiting)
        name = names[self.desk.draw([self.waiting[n][0] for n in names], [self.waiting[n][1] for n in names], self.now)]
        del self.waiting[name]
        self.order.append(name)
        return name

    def drain(self):
        while self.waiting:
            self.admit()
        return self.order


def test_more_tool_calls_go_first_then_longer_prefixes_then_age():
    engine = Engine()
    engine.come("first turn, came first")
    engine.come("first turn, cached", cached=50)
    engine.come("second turn, short prefix", tool_calls=1, cached=10)
    engine.come("second turn, long prefix", tool_calls=1, cached=90)
    engine.come("third turn", tool_calls=2)
    assert engine.drain() == ["third turn", "second turn, long prefix", "second turn, short prefix", "first turn, cached",
                              "first turn, came first"]


def test_by_arrival_neither_tool_calls_nor_prefixes_count_and_who_comes_back_is_the_last():
    engine = Engine(by="arrival")
    engine.come("first turn")
    engine.come("cached", cached=50)
    engine.admit()
    engine.come("second turn", tool_calls=1, cached=90)
    assert engine.drain() == ["first turn", "cached", "second turn"]


def test_equal_requests_are_taken_in_the_order_in_which_they_came():
    """Edge case: stable ties. Also when the list that is drawn from is in another order."""
    desk = Desk()
    tickets = [desk.ticket(1, now=0.0) for _ in range(6)]
    mixed = random.Random(1).sample(tickets, 6)
    order = []
    while mixed:
        order.append(mixed.pop(desk.draw(mixed, [7] * len(mixed), now=0.0)))
    assert order == tickets


def test_a_first_turn_is_passed_over_a_bounded_number_of_times():
    """Edge case: starvation of round 0. Later turns never stop coming."""
    engine = Engine()
    for number in range(5):
        engine.come(f"earlier {number}")
    engine.come("poor")
    for number in range(10 * MOST_PASSES):
        engine.come(f"rich {number}", tool_calls=3, cached=1000)
        if engine.admit() == "poor":
            break
    assert engine.order.index("poor") == MOST_PASSES + 5


def test_a_first_turn_waits_a_bounded_time_when_admissions_are_rare():
    engine = Engine()
    engine.come("poor")
    while engine.waiting.get("poor"):
        engine.come(f"rich {engine.now}", tool_calls=3)
        engine.now += 7.0
        engine.admit()
    assert MOST_WAIT_S <= engine.now < MOST_WAIT_S + 7.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100), st.integers(0, 2), st.floats(0, 3)), min_size=1, max_size=120),
       st.integers(1, 12), st.sampled_from([20.0, float("inf")]))
def test_nobody_is_passed_over_more_often_than_the_bound(history, most_passes, most_wait_s):
    """history: (tool calls, cached tokens, admissions that follow, seconds that pass) of each arrival."""
    engine = Engine(most_passes=most_passes, most_wait_s=most_wait_s)
    ahead, came_at, came_when = {}, {}, {}
    for name, (tool_calls, cached, admissions, seconds) in enumerate(history):
        ahead[name], came_at[name], came_when[name] = len(engine.waiting), len(engine.order), engine.now
        engine.come(name, tool_calls, cached)
        for _ in range(min(admissions, len(engine.waiting))):
            taken = engine.admit()
            older = [n for n in engine.waiting if engine.now - came_when[n] >= most_wait_s and n < taken]
            assert not older, "one that waited too long was passed over by a later one"
        engine.now += seconds
    engine.drain()
    assert sorted(engine.order) == list(range(len(history)))
    for place, name in enumerate(engine.order):
        assert place - came_at[name] <= most_passes + ahead[name]


def test_it_is_in_no_order_of_its_own():
    """Without ages or tool calls, and nothing cached, it is first come, first served."""
    engine = Engine()
    for number in range(2 * MOST_PASSES):
        engine.come(number)
    assert engine.drain() == list(range(2 * MOST_PASSES))


def test_nothing_to_draw_from_is_an_error():
    with pytest.raises(ValueError):
        Desk().draw([], [], 0.0)
