"""Which instance gets which request, and which request is better off elsewhere.

An instance decodes its b requests together, and one step takes `fixed_s + per_request_s * b` seconds. A step gives
every request one token, so over all steps the b add up to the tokens that are left, and what an instance
has ends after

    finish = fixed_s * max(L, S / max_running) + per_request_s * S + prefill_s * P

seconds: S tokens left of all its requests, L of the longest, P tokens to prefill first. Exact while nothing waits for a
place, close to it otherwise. All preferences are prices in this one formula:

- A prefix that is on an instance already (its own request's, or a fellow's of the same group) costs no prefill there.
- A slow instance has larger coefficients, so it gets less; and none that would end there later than everything could,
  and later than on an instance that is full now: such a request rather waits for a place.
- `required`: only the instance that has the request's state, or none for now. `preferred`: the home has no prefill; once
  it is gone the request goes where it ends first, as with `none`.

Groups are placed whole, longest first, each where it ends first; then single requests move from the instance that ends
last to the one that ends first as long as both end earlier by it. So a group is cut only where that saves time.

>>> fast, slow = Instance("n1", 8), Instance("n2", 8, fixed_s=3.0, per_request_s=3.0)
>>> requests = [Request(f"1:{g}:{m}", f"1:{g}", prefix=10, remaining=100) for g in range(2) for m in range(4)]
>>> {name: len(samples) for name, samples in route(requests, [fast, slow]).assigned.items()}
{'n1': 7, 'n2': 1}

Pure and deterministic; O(n log n) in requests and instances together.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

# A request changes instances if it ends earlier by this many times what the change costs: estimates err.
PAYBACK = 2.0
# A slow instance may end this much later than all would together if work could be split at will: estimates err.
SLACK = 1.1
# Instances whose speeds differ by less than this share are compared by their finish alone.
SPEED_STEPS_PER_OCTAVE = 8


class Request(NamedTuple):
    """prefix: tokens that an instance without its keys and values must prefill; remaining: tokens still expected.

    home: the instance that has its prefix or its state; how much that binds says `affinity`.
    """

    sample: str
    group: str
    prefix: float
    remaining: float
    home: str | None = None
    affinity: Literal["none", "preferred", "required"] = "none"

    @property
    def kv_tokens(self) -> float:
        return self.prefix + self.remaining


@dataclass(frozen=True)
class Instance:
    """max_running: requests decoded together; of more than max_queued beyond these none is sent. kv_tokens: what the
    requests that it holds may take of KV memory, each at its end.
    """

    name: str
    max_running: int
    running: Sequence[Request] = ()
    fixed_s: float = 1.0
    per_request_s: float = 1.0
    prefill_s: float = 0.0
    kv_tokens: float = math.inf
    max_queued: int = 0

    @property
    def most(self) -> int:
        return self.max_running + self.max_queued


class Routing(NamedTuple):
    """assigned: instance -> samples; waiting: those that have no place now, in the order given."""

    assigned: dict[str, list[str]]
    waiting: list[str]


class Move(NamedTuple):
    """`sample` goes from `source` to `target`, where it is expected to end `gain_s` earlier."""

    sample: str
    source: str
    target: str
    gain_s: float


def route(requests: Iterable[Request], instances: Iterable[Instance], backlog: float = 0.0) -> Routing:
    """Give every request a place, where one is free and good. backlog: tokens expected of requests not listed here."""
    requests = list(requests)
    loads = {instance.name: _Load(instance) for instance in instances}
    placed: dict[str, list[Request]] = {name: [] for name in loads}
    waiting: set[str] = set()
    queue = _Queue(loads.values())
    fellows: dict[str, dict[str, None]] = defaultdict(dict)  # group -> instances that have members of it
    for load in loads.values():
        for request in load.instance.running:
            fellows[request.group][load.name] = None
    latest = SLACK * _water_level(loads.values(), backlog + sum(request.remaining for request in requests))

    def put(request: Request, load: _Load) -> None:
        load.add(request)
        queue.changed(load)
        fellows[request.group][load.name] = None
        placed[load.name].append(request)

    def best(members: list[Request]) -> _Load | None:
        """Where these fit and end first; at equal times rather where their prefix is."""
        one, earliest = members[0], queue.earliest()
        near = [loads[name] for name in (one.home, *fellows[one.group]) if name in loads]
        choices = [load for load in (*near, *earliest) if load.has_room(members)]
        if not choices and earliest and len(members) == 1:  # those have a place, but not the memory
            choices = [load for load in loads.values() if load.has_room(members)]
        if not choices and len(members) == 1 and not any(load.could_hold(one) for load in loads.values()):
            choices = [load for load in loads.values() if not load.left]  # alone, or it would wait for ever
        found = min(choices, key=lambda load: load.finish_with(members), default=None)
        if found is not None and (end := found.finish_with(members)) > latest:
            if any(load.is_full(len(members)) and load.finish_with(members) < end for load in loads.values()):
                return None  # there will be a place
        return found

    units: dict[tuple[str, str | None], list[Request]] = defaultdict(list)
    for request in requests:
        if request.affinity == "required":
            load = loads.get(request.home)
            alone = load is not None and not load.left and not load.could_hold(request)
            if load is not None and (alone or load.has_room([request])):
                put(request, load)
            else:
                waiting.add(request.sample)
        else:
            units[request.group, request.home].append(request)
    for members in sorted(units.values(), key=lambda members: -sum(request.remaining for request in members)):
        whole = best(members)
        for request in members:
            load = whole or best([request])
            if load is None:
                waiting.add(request.sample)
            else:
                put(request, load)
    free = {name: [request for request in mine if request.affinity != "required"] for name, mine in placed.items()}
    for request, source, target, _ in _level(loads, free):
        placed[source].remove(request)
        placed[target].append(request)
    return Routing({name: [r.sample for r in mine] for name, mine in placed.items() if mine},
                   [request.sample for request in requests if request.sample in waiting])


def rebalance(instances: Iterable[Instance], *, move_s: float, most: int = 32) -> list[Move]:
    """Running requests that should change instances, at most `most`; each request at most once. At the present loads
    each ends earlier by it, and the receiver not later than the giver would have.

    A change costs `move_s` and a prefill of the prefix at the receiver, for which all that run there wait, and is
    proposed when it pays that back PAYBACK times. Finished members of a group stay where they are: a group is whole in the ledger, which knows the
    holder of each of its answers, not on a node.
    """
    loads = {instance.name: _Load(instance) for instance in instances}
    movable = {name: [r for r in load.instance.running if r.affinity != "required"] for name, load in loads.items()}
    return [Move(request.sample, source, target, gain_s)
            for request, source, target, gain_s in _level(loads, movable, move_s, most)]


class Outline(NamedTuple):
    """What is enough to see that an instance has nothing to give: how many requests it has, tokens left of the longest,
    the shortest prefix; its speed as `Instance` has it."""

    requests: int
    longest: float
    prefix: float
    fixed_s: float
    per_request_s: float
    prefill_s: float

    def step_s(self, more: int = 0) -> float:
        return self.fixed_s + self.per_request_s * (self.requests + more)


def may_move(outlines: Sequence[Outline], move_s: float) -> bool:
    """False if `rebalance` would find nothing: even the longest request, were its prefix the shortest, would not gain
    what a change costs.

    >>> [may_move([Outline(n, 100.0, 10.0, 1.0, 0.1, 0.1), Outline(4, 9.0, 10.0, 1.0, 0.1, 0.1)], 1.0) for n in (5, 8)]
    [False, True]
    """
    return any(
        (source.step_s() - target.step_s(1)) * source.longest
        > PAYBACK * (move_s + target.prefill_s * source.prefix * (1 + target.requests))
        for source in outlines
        for target in outlines
        if source is not target
    )


@dataclass
class _Load:
    """An instance with what it was given so far."""

    instance: Instance
    left: list[float] = field(default_factory=list)  # tokens left of each request, ascending
    total: float = 0.0
    prefill: float = 0.0
    kv_tokens: float = 0.0
    groups: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        self.name = self.instance.name
        for request in self.instance.running:
            self.left.append(request.remaining)
            self.total += request.remaining
            self.kv_tokens += request.kv_tokens
            self.groups[request.group] += 1
        self.left.sort()

    def _count(self, request: Request, sign: int) -> None:
        if sign > 0:
            insort(self.left, request.remaining)
        else:
            del self.left[bisect_right(self.left, request.remaining) - 1]
        self.total += sign * request.remaining
        self.kv_tokens += sign * request.kv_tokens
        self.groups[request.group] += sign

    def add(self, request: Request) -> None:
        self.prefill += self.prefill_of(request)
        self._count(request, 1)

    def remove(self, request: Request) -> None:
        """Take it away again; what it was to prefill is not taken back, for a fellow may need it."""
        self._count(request, -1)

    def prefill_of(self, request: Request) -> float:
        return 0.0 if request.home == self.name or self.groups.get(request.group) else request.prefix

    def slope(self) -> float:
        """Seconds that a further token takes where many wait."""
        return self.instance.fixed_s / self.instance.max_running + self.instance.per_request_s

    def step_s(self, more: int = 0) -> float:
        return self.instance.fixed_s + self.instance.per_request_s * (len(self.left) + more)

    def is_full(self, wanted: int = 1) -> bool:
        return len(self.left) + wanted > self.instance.most

    def has_room(self, members: list[Request]) -> bool:
        return (not self.is_full(len(members))
                and self.kv_tokens + sum(r.kv_tokens for r in members) <= self.instance.kv_tokens)

    def could_hold(self, request: Request) -> bool:
        """Whether its memory is enough for this one."""
        return request.kv_tokens <= self.instance.kv_tokens

    def finish(self, more: float = 0.0, longest: float = 0.0, prefill: float = 0.0) -> float:
        of, total = self.instance, self.total + more
        steps = max(longest, self.left[-1] if self.left else 0.0, total / of.max_running)
        return of.fixed_s * steps + of.per_request_s * total + of.prefill_s * (self.prefill + prefill)

    def finish_with(self, members: list[Request]) -> float:
        more, longest = sum(r.remaining for r in members), max(r.remaining for r in members)
        return self.finish(more, longest, self.prefill_of(members[0]))

    def finish_without(self, request: Request) -> float:
        of, last = self.instance, self.left[-1]
        if last == request.remaining:
            last = self.left[-2] if len(self.left) > 1 else 0.0
        total = self.total - request.remaining
        return of.fixed_s * max(last, total / of.max_running) + of.per_request_s * total + of.prefill_s * self.prefill


class _Queue:
    """Of each class of equally fast instances, the one that ends first and has a place."""

    def __init__(self, loads: Iterable[_Load]):
        self._heaps: dict[int, list[tuple[float, int, _Load]]] = defaultdict(list)
        self._order: dict[str, int] = {}
        for load in loads:
            self._order[load.name] = len(self._order)
            self.changed(load)

    def changed(self, load: _Load) -> None:
        of = load.instance
        heap = self._heaps[round(SPEED_STEPS_PER_OCTAVE * math.log2(of.fixed_s + of.per_request_s))]
        heapq.heappush(heap, (load.finish(), self._order[load.name], load))

    def earliest(self) -> list[_Load]:
        found = []
        for heap in self._heaps.values():
            while heap and (heap[0][0] != heap[0][2].finish() or heap[0][2].is_full()):
                heapq.heappop(heap)
            found += [heap[0][2]] if heap else []
        return found


def _water_level(loads: Iterable[_Load], tokens: float) -> float:
    """When all would end together, if `tokens` more could be spread at will."""
    level = width = weighted = 0.0
    for end, slope in sorted((load.finish(), load.slope()) for load in loads):
        if width and end >= level:
            break
        width, weighted = width + 1 / slope, weighted + end / slope
        level = (tokens + weighted) / width
    return level


def _level(loads: dict[str, _Load], movable: dict[str, list[Request]], move_s: float | None = None,
           most: float = math.inf) -> list[tuple[Request, str, str, float]]:
    """Moves (request, source, target, gain), each from the instance that ends last to the one that ends first.

    move_s: what a move costs besides the prefill; None: the requests do not run yet, so there is nothing to pay back.
    """
    queue, order = _Queue(loads.values()), {name: index for index, name in enumerate(loads)}
    for requests in movable.values():
        requests.sort(key=lambda request: (request.remaining, -request.prefix, request.sample))
    late = [(-load.finish(), order[name], load) for name, load in loads.items()]
    heapq.heapify(late)
    moves: list[tuple[Request, str, str, float]] = []
    while late and len(moves) < most:
        end, _, source = late[0]
        targets = [load for load in queue.earliest() if load is not source] if -end == source.finish() else []
        gain, index, target = max((_best_move(source, target, movable[source.name], move_s) for target in targets),
                                  key=lambda found: found[0], default=(0.0, 0, source))
        if gain <= 0.0:  # out of date, or it can be relieved of nothing; the next may be
            heapq.heappop(late)
            continue
        request = movable[source.name].pop(index)
        source.remove(request)
        target.add(request)
        moves.append((request, source.name, target.name, gain))
        for load in (source, target):
            queue.changed(load)
            heapq.heappush(late, (-load.finish(), order[load.name], load))
    return moves


def _best_move(source: _Load, target: _Load, movable: list[Request], move_s: float | None) -> tuple[float, int, _Load]:
    """(gain, index, target) of the request whose change helps most: the longest, the shortest, or the one that halves
    the gap. Gain 0: none helps.
    """
    end, gap = source.finish(), source.finish() - target.finish()
    half = gap / (source.instance.per_request_s + target.instance.per_request_s or math.inf)
    middle = bisect_right(movable, half, key=lambda request: request.remaining) - 1
    best = 0.0, 0, target
    for index in sorted({0, max(middle, 0), len(movable) - 1}) if movable else ():
        request = movable[index]
        if not target.has_room([request]):
            continue
        # A running request takes more along than the prompt that it shares with its fellows.
        prefill = target.prefill_of(request) if move_s is None else request.prefix
        # All that run there wait for it.
        stall_s = target.instance.prefill_s * prefill * (1 + len(target.left))
        cost_s = 0.0 if move_s is None else move_s + stall_s
        arrival = target.finish(request.remaining, request.remaining, prefill) + (move_s or 0.0)
        if move_s is None:
            gain = end - max(source.finish_without(request), arrival)
        else:  # what it gains itself, if nothing ends later for it: on a slow instance others may be as long
            gain = (source.step_s() - target.step_s(1)) * request.remaining - cost_s if arrival <= end else 0.0
        if gain > max(PAYBACK * cost_s, 1e-9 * end, best[0]):
            best = gain, index, target
    return best
