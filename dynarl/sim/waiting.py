"""Requests in a simulated engine, and which of those that wait is next: `dataflow.priority` for thousands of them.

The live engine's desk looks at every waiting request for each one that it takes in. Here ranks are kept in a heap, and
a request is given another rank only when what it depends on changes. Who is overdue needs no search: a younger request
has neither waited longer nor been passed over more often, so if anybody is, the oldest is.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator

from dynarl.dataflow.priority import MOST_PASSES, MOST_WAIT_S
from dynarl.sim.workload import SimRequest

FS_PER_S = 10**15


class Sequence:
    """A request in the engine. `done`: its response's tokens at step `step`; while it runs, one more every step since.

    number: in the order of arrival; admissions, since: of the engine and its clock (fs) when it came.
    """

    __slots__ = (
        "request", "group", "number", "admissions", "since", "prompt", "done", "turn", "turn_end", "step",
        "finish_step", "rank",
    )  # fmt: skip

    def __init__(self, request: SimRequest, number: int, admissions: int, since: int, tokens_done: int):
        self.request = request
        self.group = request.group
        self.number, self.admissions, self.since = number, admissions, since
        self.prompt = request.prompt_tokens
        self.done = tokens_done
        self.turn, self.turn_end = request.position(tokens_done)
        self.step = self.finish_step = 0
        self.rank = (0, 0, number)

    @property
    def context(self) -> int:
        return self.prompt + self.done


class Queue:
    """ordered: by priority, else by arrival alone."""

    def __init__(self, ordered: bool):
        self._ordered = ordered
        self._members: dict[int, Sequence] = {}
        self._fellows: dict[str, dict[int, Sequence]] = defaultdict(dict)
        # An entry is stale once its request has another rank, or waits no longer.
        self._ranked: list[tuple[int, int, int]] = []
        self._aged: list[int] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    def __contains__(self, one: Sequence) -> bool:
        return one.number in self._members

    def fellows(self, group: str) -> list[Sequence]:
        """Those of this group that wait, if it matters for their rank."""
        return list(self._fellows[group].values()) if self._ordered and group in self._fellows else []

    def put(self, one: Sequence, cached: int) -> None:
        """cached: tokens of its prefix that need no prefill."""
        self._members[one.number] = one
        self._fellows[one.group][one.number] = one
        heapq.heappush(self._aged, one.number)
        self.rank(one, cached)

    def rank(self, one: Sequence, cached: int) -> None:
        """Another number of tokens is cached."""
        if self._ordered:
            one.rank = (-one.turn, -cached, one.number)
        heapq.heappush(self._ranked, one.rank)

    def take(self, one: Sequence) -> None:
        del self._members[one.number]
        fellows = self._fellows[one.group]
        del fellows[one.number]
        if not fellows:
            del self._fellows[one.group]

    def first(self, now: int, admissions: int) -> Sequence:
        """The oldest if it is overdue at `now` (fs), else the first in rank."""
        members, aged, ranked = self._members, self._aged, self._ranked
        while aged[0] not in members:
            heapq.heappop(aged)
        oldest = members[aged[0]]
        if admissions - oldest.admissions >= MOST_PASSES or now - oldest.since >= MOST_WAIT_S * FS_PER_S:
            return oldest
        while (one := members.get(ranked[0][2])) is None or one.rank != ranked[0]:
            heapq.heappop(ranked)
        return one
