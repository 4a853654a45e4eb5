from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynarl.dataflow.channels import END, Channel

CONSUMERS = ["c1", "c2", "c3"]
CAPACITY, LEASE_S, HEAVIEST = 12, 10.0, 3


def filled(*weights: int, **options) -> Channel:
    channel = Channel(lease_s=LEASE_S, **options)
    for index, weight in enumerate(weights):
        assert channel.put(index, weight)
    return channel


def test_a_batch_is_the_first_whole_items_up_to_its_weight():
    channel = filled(3, 3, 3, 1)
    assert channel.get_batch("c1", 7, now=0).items == (0, 1)  # the third would straddle
    assert channel.get_batch("c2", 4, now=0).items == (2, 3)


def test_a_batch_that_is_not_full_waits_for_more_until_the_end():
    channel = filled(2)
    assert channel.get_batch("c1", 3, now=0) is None
    channel.put(1, 2)
    assert channel.get_batch("c1", 3, now=0).items == (0,)  # full: the next item does not fit
    assert channel.get_batch("c1", 3, now=0) is None
    channel.close()
    assert channel.get_batch("c1", 3, now=0).items == (1,)


def test_an_item_that_no_batch_of_this_weight_can_hold_is_named():
    with pytest.raises(ValueError, match="0 weighs 5, c1 takes 4 at most"):
        filled(5).get_batch("c1", 4, now=0)


def test_room_is_made_by_what_is_done_not_by_what_is_taken():
    channel = filled(2, 2, capacity=4)
    lease = channel.get_batch("c1", 2, now=0)
    assert not channel.put("more", 1)
    channel.give_back(lease)
    assert not channel.put("more", 1)
    assert channel.done(channel.get_batch("c1", 2, now=0)) and channel.put("more", 2)
    with pytest.raises(ValueError, match="weighs 5, the channel holds 4"):
        channel.put("never", 5)


def test_what_comes_back_is_offered_in_its_old_place():
    channel = filled(1, 1, 1, 1)
    first, second = channel.get_batch("c1", 1, now=0), channel.get_batch("c2", 1, now=0)
    channel.give_back(second)
    channel.give_back(first)
    assert channel.get_batch("c3", 4, now=0).items == (0, 1, 2, 3)


def test_a_lease_that_expired_completes_nothing():
    channel = filled(1)
    late = channel.get_batch("c1", 1, now=0)
    assert channel.next_expiry() == LEASE_S
    again = channel.get_batch("c2", 1, now=LEASE_S)
    assert again.items == late.items
    assert not channel.done(late) and not channel.give_back(late)
    assert channel.done(again) and not channel.done(again)


def test_consumers_that_come_after_the_end_are_told_so_too():
    channel = filled()
    channel.close()
    assert [channel.get_batch(name, 1, now=0) for name in ("c1", "c1", "late")] == [END] * 3
    with pytest.raises(RuntimeError, match="after the end"):
        channel.put("x")


def test_the_end_waits_for_what_others_have():
    channel = filled(1)
    channel.close()
    lease = channel.get_batch("c1", 1, now=0)
    assert channel.get_batch("c2", 1, now=0) is None
    assert channel.lost("c1") == 1 and not channel.done(lease)
    assert channel.done(channel.get_batch("c2", 1, now=0))
    assert channel.get_batch("c2", 1, now=0) == END


class History(RuleBasedStateMachine):
    """Producers, consumers that die or are slow, and time. `made`: what finished work is of, as a consumer hands it
    on.
    """

    def __init__(self):
        super().__init__()
        self.channel = Channel(capacity=CAPACITY, lease_s=LEASE_S)
        self.now, self.number = 0.0, 0
        self.weights, self.made, self.hands = {}, Counter(), []

    @precondition(lambda self: not self.channel.closed)
    @rule(weight=st.integers(1, HEAVIEST))
    def put(self, weight):
        room = sum(self.weights[item] for item in self.weights if not self.made[item]) + weight <= CAPACITY
        assert self.channel.put(self.number, weight) == room
        if room:
            self.weights[self.number] = weight
        self.number += 1

    @rule(consumer=st.sampled_from(CONSUMERS), weight=st.integers(HEAVIEST, 8))
    def get(self, consumer, weight):
        found = self.channel.get_batch(consumer, weight, self.now)
        if found == END:
            assert self.channel.closed and set(self.made) == set(self.weights)
        elif found is not None:
            assert sum(self.weights[item] for item in found.items) <= weight
            assert list(found.items) == sorted(found.items) and not any(self.made[item] for item in found.items)
            self.hands.append(found)

    @precondition(lambda self: self.hands)
    @rule(index=st.integers(0, 99), again=st.booleans())
    def done(self, index, again):
        """`again`: the message comes twice."""
        lease = self.hands.pop(index % len(self.hands))
        if self.channel.done(lease):
            self.made.update(lease.items)
        if again:
            assert not self.channel.done(lease)

    @precondition(lambda self: self.hands)
    @rule(index=st.integers(0, 99))
    def give_back(self, index):
        self.channel.give_back(self.hands[index % len(self.hands)])  # the consumer may go on with it all the same

    @rule(consumer=st.sampled_from(CONSUMERS), tells=st.booleans())
    def dies(self, consumer, tells):
        """Without a word (`tells` False) only the time brings back what it had."""
        self.hands = [lease for lease in self.hands if lease.consumer != consumer]
        if tells:
            self.channel.lost(consumer)

    @rule(seconds=st.sampled_from([1.0, LEASE_S / 2, LEASE_S]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def close(self):
        self.channel.close()

    @invariant()
    def nothing_counts_twice(self):
        assert max(self.made.values(), default=1) == 1

    def teardown(self):
        """After the end nobody waits for ever, and nothing was lost. One consumer works, another only asks."""
        self.channel.close()
        for _ in range(3 * len(self.weights) + 3):
            found = self.channel.get_batch("worker", HEAVIEST, self.now)
            if found == END:
                break
            if found is None:
                self.now = self.channel.next_expiry()
            elif self.channel.done(found):
                self.made.update(found.items)
        assert self.channel.get_batch("worker", 1, self.now) == self.channel.get_batch("idle", 1, self.now) == END
        assert self.made == Counter(dict.fromkeys(self.weights, 1))


History.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_any_history_loses_nothing_doubles_nothing_and_ends = History.TestCase
