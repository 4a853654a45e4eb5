"""Which of the waiting requests an engine takes in next.

- The request with the most completed tool calls: later turns are shorter, and their keys and values are still there;
  behind all first turns they would be evicted and computed again (DynaRL, algorithm 2).
- Among those the one with the longest prefix in the cache, for the same reason; then the one that has waited longest.
- A request is overdue after MOST_PASSES admissions of others, or MOST_WAIT_S seconds. Overdue ones go before all
  others, the longest waiting first.

With order `arrival` age is all that counts, and one that comes back from a tool is the youngest.

So no request starves: once it is overdue only those can still go before it that came before it. If W requests waited
when it came, it is passed over at most MOST_PASSES + W times; and after MOST_WAIT_S seconds at most W times.

>>> desk = Desk()
>>> first, second, again = desk.ticket(0, now=0.0), desk.ticket(0, now=1.0), desk.ticket(2, now=2.0)
>>> desk.draw([first, second, again], cached=[0, 0, 0], now=3.0)  # has called a tool twice
2
>>> desk.draw([first, second], cached=[0, 40], now=3.0)  # 40 tokens of its prompt are there
1
>>> late = [desk.ticket(1, now=999.0), first]
>>> desk.draw(late, cached=[100, 0], now=999.0)  # overdue
1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# An engine that is given twice what it runs has first turns waiting for minutes, passed over by every turn that follows a
# tool. Were they overdue by then, priority would be the order of arrival, just where it matters. So both limits are about
# an iteration: nobody waits for much longer.
MOST_PASSES = 4096
MOST_WAIT_S = 600.0


@dataclass(frozen=True)
class Ticket:
    """A waiting request: its number in the order of arrival, the admissions and the time when it came."""

    number: int
    admissions: int
    since_s: float
    tool_calls: int
    order: str = "priority"


class Desk:
    """Hands out tickets and says whose turn it is. It counts admissions, but does not keep the requests."""

    def __init__(self, most_passes: int = MOST_PASSES, most_wait_s: float = MOST_WAIT_S):
        self._most_passes, self._most_wait_s = most_passes, most_wait_s
        self._issued = self._admissions = 0

    def ticket(self, tool_calls: int, now: float, order: str = "priority") -> Ticket:
        """For a request that comes now. It keeps the ticket as long as it is in the engine."""
        self._issued += 1
        return Ticket(self._issued, self._admissions, now, tool_calls, order)

    def draw(self, waiting: Sequence[Ticket], cached: Sequence[int], now: float) -> int:
        """Index of the one that is admitted now; `cached`: tokens of each one's prefix that need no prefill."""
        def rank(index: int) -> tuple:
            ticket = waiting[index]
            overdue = (self._admissions - ticket.admissions >= self._most_passes
                       or now - ticket.since_s >= self._most_wait_s)
            merit = (0, 0) if overdue or ticket.order == "arrival" else (-ticket.tool_calls, -cached[index])
            return not overdue, *merit, ticket.number

        chosen = min(range(len(waiting)), key=rank)
        self._admissions += 1
        return chosen
