"""A queue between any number of producers and consumers, in which nothing is lost and nothing counts twice.

Life of an item::

    put -> offered -> leased (one consumer, until a time) -> done
              ^          |
              +----------+   given back, its consumer lost, or the time is up

What comes back is offered again in its old place. A consumer whose lease has expired may still be at work: its late
`done` is refused, and what it made must not be used, for somebody else has the items now.

The end of the data is something that consumers are told, not a silence: after `close` whoever asks, early or late, gets
`END` once nothing is offered or leased any more. While another consumer holds a lease the answer is None, ask again:
its items may come back. That wait is bounded, since every lease ends.

The capacity counts what is not done, leased items too: room is made by work that is finished, not by work that somebody
took, or items that come back would not fit.

>>> channel = Channel(capacity=8, lease_s=30.0)
>>> all(channel.put(name, weight) for name, weight in (("a", 3), ("b", 2), ("c", 2)))
True
>>> channel.put("d", 2)                          # full: the producer keeps it and tries again
False
>>> first = channel.get_batch("n1", 5, now=0.0)  # whole items up to a weight of 5
>>> first.items
('a', 'b')
>>> channel.get_batch("n2", 5, now=1.0)          # "c" is no full batch, and more may come
>>> channel.done(first), channel.put("d", 2), channel.close()
(True, True, None)
>>> channel.get_batch("n2", 5, now=2.0).items    # nothing more comes, so this is all
('c', 'd')
>>> channel.get_batch("n3", 5, now=3.0)          # n2 may still fail
>>> channel.get_batch("n3", 5, now=32.0).items   # and has not come back in time
('c', 'd')
>>> channel.lost("n3")
2
>>> channel.done(channel.get_batch("n4", 5, now=33.0))
True
>>> channel.get_batch("n1", 5, now=34.0) is channel.get_batch("never asked before", 5, now=34.0) is END
True

Pure: times are passed in. The books of an iteration's samples are the ledger's, which also knows groups, partial
answers and gradient buffers; a channel is for streams of which no more is to be known than who has what.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

Item = TypeVar("Item")
END: Final = "end"


@dataclass(frozen=True)
class Lease(Generic[Item]):
    """Items that one consumer has until `until_s`; `number` is never used again."""

    number: int
    consumer: str
    until_s: float
    items: tuple[Item, ...]


class Channel(Generic[Item]):
    """capacity: most weight of items that are not done (None: any); lease_s: how long a consumer may keep what it got."""

    def __init__(self, *, lease_s: float, capacity: float | None = None):
        self._lease_s, self._capacity = lease_s, capacity
        self._weight = 0.0  # of all that is not done
        self._places = itertools.count()
        self._numbers = itertools.count(1)
        self._offered: list[tuple[int, float, Item]] = []  # heap by place
        self._leased: dict[int, tuple[Lease[Item], list[tuple[int, float, Item]]]] = {}
        self.closed = False

    def put(self, item: Item, weight: float = 1.0) -> bool:
        """Offer an item. False: there is no room for it now. Raises RuntimeError after `close`, ValueError when there
        never is room.
        """
        if self.closed:
            raise RuntimeError(f"{item!r} came after the end of the data: put everything before close()")
        if self._capacity is not None and weight > self._capacity:
            raise ValueError(f"{item!r} weighs {weight:g}, the channel holds {self._capacity:g}: raise its capacity")
        if self._capacity is not None and self._weight + weight > self._capacity:
            return False
        self._weight += weight
        heapq.heappush(self._offered, (next(self._places), weight, item))
        return True

    def close(self) -> None:
        """Nothing more comes."""
        self.closed = True

    def get_batch(self, consumer: str, weight: float, now: float) -> Lease[Item] | Literal["end"] | None:
        """Lease the first items, as many as weigh no more than `weight` together; an item is never split.

        None: not enough is there, ask again. Raises ValueError when the first item alone weighs more.
        """
        self.expire(now)
        if not self._offered:
            return END if self.closed and not self._leased else None
        taken: list[tuple[int, float, Item]] = []
        left = weight
        while self._offered and self._offered[0][1] <= left:
            taken.append(heapq.heappop(self._offered))
            left -= taken[-1][1]
        if not taken:
            _, heavy, item = self._offered[0]
            raise ValueError(f"{item!r} weighs {heavy:g}, {consumer} takes {weight:g} at most")
        if not self._offered and left > 0 and not self.closed:  # the next item may still belong to this batch
            self._offer(taken)
            return None
        lease = Lease(next(self._numbers), consumer, now + self._lease_s, tuple(item for *_, item in taken))
        self._leased[lease.number] = lease, taken
        return lease

    def done(self, lease: Lease[Item]) -> bool:
        """These items are finished. False: the lease has ended before, so somebody else has them or had them."""
        _, taken = self._leased.pop(lease.number, (None, None))
        self._weight -= sum(weight for _, weight, _ in taken or ())
        return taken is not None

    def give_back(self, lease: Lease[Item]) -> bool:
        """Offer these items again. False: the lease has ended before."""
        _, taken = self._leased.pop(lease.number, (None, None))
        self._offer(taken or [])
        return taken is not None

    def lost(self, consumer: str) -> int:
        """The consumer is gone: what it had is offered again. Returns how many items."""
        return self._end(lambda lease: lease.consumer == consumer)

    def expire(self, now: float) -> int:
        """Offer again what was leased until `now` or before. Returns how many items; `get_batch` does it, too."""
        return self._end(lambda lease: lease.until_s <= now)

    def next_expiry(self) -> float | None:
        """When the first lease ends by itself: until then nothing comes back to who was told None, unless it is given."""
        return min((lease.until_s for lease, _ in self._leased.values()), default=None)

    def _end(self, is_meant: Callable[[Lease[Item]], bool]) -> int:
        ended = [lease for lease, _ in self._leased.values() if is_meant(lease)]
        return sum(len(lease.items) for lease in ended if self.give_back(lease))

    def _offer(self, taken: list[tuple[int, float, Item]]) -> None:
        for entry in taken:
            heapq.heappush(self._offered, entry)
