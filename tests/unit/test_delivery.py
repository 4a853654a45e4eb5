"""What two ends agree on when the connection between them loses messages."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynarl.delivery import Delivery


class Ends:
    """Two processes and what each has been delivered. `lost` messages never arrive; the others do, in order."""

    def __init__(self):
        self.ends, self.got = [Delivery(10), Delivery(20)], [[], []]

    def carry(self, to: int, frames: tuple[bytes, bytes]) -> None:
        if self.ends[to].take(frames[0]):
            self.got[to].append(frames[1])

    def say(self, to: int, data: bytes, lost: bool = False) -> None:
        frames = self.ends[1 - to].pack(data)
        if not lost:
            self.carry(to, frames)

    def beat(self, to: int, lost: bool = False) -> None:
        """A heartbeat, and before it what has to be sent once more."""
        outgoing = [*self.ends[1 - to].again(), self.ends[1 - to].pack(b"beat", numbered=False)]
        for frames in outgoing if not lost else ():
            if self.ends[to].take(frames[0]) and frames[1] != b"beat":
                self.got[to].append(frames[1])


@given(st.lists(st.tuples(st.sampled_from(["say", "beat"]), st.sampled_from([0, 1]), st.booleans())))
def test_whatever_is_lost_on_the_way_everything_arrives_once_and_in_order(story):
    ends, said = Ends(), [[], []]
    for number, (what, to, lost) in enumerate(story):
        if what == "say":
            said[to].append(b"%d" % number)
            ends.say(to, said[to][-1], lost)
        else:
            ends.beat(to, lost)
        assert all(got == all_said[: len(got)] for got, all_said in zip(ends.got, said))
    for _ in range(3):
        for to in (0, 1):
            ends.beat(to)
    assert ends.got == said
    assert all(end.again() == end.again() == [] for end in ends.ends), "kept for ever"


def test_nothing_is_sent_again_while_nothing_is_lost():
    ends = Ends()
    for number in range(3):
        ends.say(0, b"%d" % number)
        ends.say(1, b"%d" % number)
        assert ends.ends[0].again() == ends.ends[1].again() == []
        ends.beat(0)
        ends.beat(1)


def test_what_was_meant_for_a_process_does_not_reach_the_one_that_took_its_place():
    ends = Ends()
    ends.say(1, b"hello")
    ends.say(0, b"for the first", lost=True)
    late = ends.ends[0].pack(b"of the first")
    ends.ends[0], ends.got[0] = Delivery(11), []
    ends.beat(0)
    ends.beat(0)
    assert ends.got[0] == []
    ends.say(1, b"hello again")
    ends.say(0, b"for the second")
    ends.carry(1, late)
    assert ends.got == [[b"for the second"], [b"hello", b"hello again"]]


def test_a_header_of_something_else_is_refused():
    with pytest.raises(struct.error):
        Delivery(1).take(b"n1")
