"""A rollout engine as it looks from outside: when does which answer end, and what does it hold until then.

What the engine does, step after step, is what an engine with continuous batching and a paged cache does:

- A step is a prefill (of what waits and fits, while anything does), or one token for every running request.
- A request is taken in if a place is free, and blocks for what it has so far and one more for every running request.
  Who is next: `dataflow.priority`, the same rules as in the live engine.
- Where the next step needs more blocks than there are, the request that was taken in last goes back to those that wait.
  Its keys and values are computed again later.
- Blocks that nobody uses keep what was computed until somebody needs them, the oldest going first: an answer that
  comes back from a tool, and the members of a group behind its first one, are prefilled from there on.

Between two events nothing changes but the lengths, each by one per step. So `n` steps take

    n * a(b) + c * (n * K + b * n * (n - 1) / 2)

for b requests that hold K tokens, and the engine goes from event to event in O(log n), never from token to token. Times
are integers inside (femtoseconds): the sum is exactly what steps one by one add up to. Outside they are nanoseconds,
rounded up.

    add -> waiting -> prefill -> running -> turn ended or finished: an Event, and the engine knows it no more
              ^____ preempted ____|  |___ remove: the caller has it

>>> from dynarl.perf.rollout import StepModel
>>> from dynarl.sim.workload import SimRequest, Turn
>>> engine = DecodeEngine(StepModel(0.010, 0.001, 0.0), kv_capacity_tokens=1024, max_running=8)
>>> engine.add(0, SimRequest("1:0:0", 100, (Turn(50),)))
>>> engine.add(0, SimRequest("1:0:1", 100, (Turn(20),)))
>>> events = []
>>> while (at_ns := engine.next_ns()) is not None:
...     events += engine.advance(at_ns)
>>> [(event.sample, event.kind, event.tokens_done) for event in events]
[('1:0:1', 'finished', 20), ('1:0:0', 'finished', 50)]
"""

from __future__ import annotations

import functools
import heapq
import math
from typing import Literal, NamedTuple

from dynarl.perf.rollout import StepModel
from dynarl.sim.prefixes import Prefixes
from dynarl.sim.waiting import FS_PER_S, Queue, Sequence
from dynarl.sim.workload import SimRequest

FS_PER_NS = 1_000_000

# Tokens of one prefill: bounds how long running requests wait for it. A longer prompt is taken in alone.
PREFILL_TOKENS = 8192

Order = Literal["priority", "arrival"]


class EngineError(ValueError):
    """Something is asked of an engine that it cannot do."""


class Event(NamedTuple):
    """An answer left the engine at `at_ns`: "finished", or "turn" where it waits for the tool call of `turn`.

    tokens_done: of its response, with the results of the tools before. It may come back with these and the result's.
    """

    at_ns: int
    sample: str
    kind: Literal["turn", "finished"]
    tokens_done: int
    turn: int


@functools.cache  # the engines of a job are all alike
def _batch_fs(model: StepModel, most: int) -> list[int]:
    """Femtoseconds of a step by the number of its requests, without what their tokens take."""
    return [round(model.batch_seconds(batch) * FS_PER_S) for batch in range(most + 1)]


class DecodeEngine:
    """Times are integer nanoseconds and never go back. What is added at one instant is taken in together.

    kv_capacity_tokens: of all requests that run; whole blocks of `block_tokens` count.
    """

    def __init__(
        self,
        step_model: StepModel,
        kv_capacity_tokens: int,
        max_running: int,
        order: Order = "priority",
        block_tokens: int = 16,
    ):
        if max_running < 1 or block_tokens < 1:
            raise EngineError(f"max_running = {max_running} and block_tokens = {block_tokens} must be at least 1")
        self._model = step_model
        self._capacity = kv_capacity_tokens // block_tokens
        self._max_running = max_running
        self._block = block_tokens
        self._batch_fs = _batch_fs(step_model, max_running)
        self._token_fs = round(step_model.per_kv_token_s * FS_PER_S)
        if min(self._batch_fs[1:]) <= 0:
            raise EngineError(f"a step of {step_model} takes no time: give it a fixed_s")

        self._known: dict[str, Sequence] = {}
        self._running: dict[int, Sequence] = {}  # by number, in the order in which they were taken in
        self._finishing: list[tuple[int, int]] = []  # heap of (finish_step, number)
        self._context = 0  # tokens of the running requests
        self._blocks = 0  # that these have
        # How many of them need a further block in step `s`: _phases[-s % block_tokens].
        self._phases = [0] * block_tokens

        self._queue = Queue(order == "priority")
        self._prefixes = Prefixes()
        self._issued = self._admissions = 0
        self._stuck = False  # nobody fits, and nobody can until something leaves or comes

        # From `_start` on `_left` steps until `_end`, the first of `_first` fs and each `_growth` longer than the one
        # before. None left: at `_start` it is to be decided what comes next.
        self._now = self._start = self._end = self._left = self._first = self._growth = 0
        self._step = 0
        self._events: list[Event] = []
        self.tokens_generated = self.prefilled_tokens = self.reused_tokens = self.preemptions = 0

    # ---- what it holds, as of the last call with a time

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def kv_tokens(self) -> int:
        """Tokens of the running requests."""
        return self._context

    @property
    def kv_share(self) -> float:
        """Share of the blocks that the running requests have."""
        return self._blocks / self._capacity

    def tokens_done(self) -> dict[str, int]:
        """Tokens of each answer so far, also of those that wait."""
        step, running = self._step, self._running
        return {
            sample: one.done + (step - one.step if one.number in running else 0) for sample, one in self._known.items()
        }

    def lengths(self) -> list[int]:
        """The same numbers alone, in no order."""
        step = self._step
        return [step - one.step + one.done for one in self._running.values()] + [one.done for one in self._queue]

    # ---- what comes and goes

    def add(self, now_ns: int, request: SimRequest, tokens_done: int = 0) -> None:
        """A new request, one from another engine, or one that is back from a tool (whose tokens `tokens_done` counts).

        Raises EngineError if the engine has it, or could not hold it at its end.
        """
        self._to(now_ns * FS_PER_NS)
        if request.sample in self._known:
            raise EngineError(f"{request.sample} is in this engine already")
        needed = self._blocks_of(request.total_tokens)
        if needed > self._capacity:
            raise EngineError(
                f"{request.sample} has {request.total_tokens} tokens at its end = {needed} blocks of {self._block}; "
                f"the engine has {self._capacity}: give it more GPUs or a larger share of their memory, or a lower cap"
            )
        self._issued += 1
        one = Sequence(request, self._issued, self._admissions, self._now, tokens_done)
        self._known[request.sample] = one
        self._wait(one)
        if len(self._running) < self._max_running:
            self._end_after_step()

    def remove(self, now_ns: int, sample: str) -> int | None:
        """Take a request out; what it has of its response. None: it has left already, and its event is yet to be told.

        A step under way goes on for the others as it began. Raises EngineError if the engine does not know it.
        """
        self._to(now_ns * FS_PER_NS)
        one = self._known.pop(sample, None)
        if one is None:
            if any(event.sample == sample for event in self._events):
                return None
            raise EngineError(f"{sample} is not in this engine")
        if one.number in self._running:
            self._leave(one)
        else:
            self._queue.take(one)
            self._stuck = False
        self._end_after_step()
        return one.done

    def flush(self) -> None:
        """Forget the prefixes of requests that left: the weights have changed. Raises EngineError if any are here."""
        if self._known:
            raise EngineError(f"{len(self._known)} requests are in the engine: remove them before its weights change")
        self._prefixes.clear()

    # ---- time

    def next_ns(self) -> int | None:
        """When to call `advance` next. None: nothing is here. The engine begins what it does at this instant."""
        if self._events:
            return self._events[0].at_ns
        if not self._known:
            return None
        while not self._left and self._start <= self._now:
            self._decide()
        return -(-(self._end if self._left else self._start) // FS_PER_NS)

    def advance(self, now_ns: int) -> list[Event]:
        """Go to `now_ns`. All that left until then, in the order of time."""
        self._to(now_ns * FS_PER_NS)
        events, self._events = self._events, []
        return events

    def _to(self, now: int) -> None:
        self._now = now
        while True:
            if self._left:
                if self._end > now:
                    break
                self._steps(self._left)
                self._start, self._left = self._end, 0
                self._finish()
            elif not self._known:
                self._start = max(self._start, now)
                return
            elif self._start < now:
                self._decide()
            else:
                return
        if now - self._start >= self._first:
            complete = self._complete_steps(now - self._start)
            self._steps(complete)
            self._start += complete * self._first + self._growth * (complete * (complete - 1) // 2)
            self._first += self._growth * complete
            self._left -= complete

    def _complete_steps(self, elapsed: int) -> int:
        """The most steps n with n * first + growth * n * (n - 1) / 2 <= elapsed; exact, in integers."""
        if not self._growth:
            return elapsed // self._first
        linear = 2 * self._first - self._growth
        return (math.isqrt(linear * linear + 8 * self._growth * elapsed) - linear) // (2 * self._growth)

    def _end_after_step(self) -> None:
        """What comes next is to be decided anew, after the step under way."""
        if self._left:
            self._left = int(self._start < self._now)
            self._end = self._start + self._first * self._left

    def _steps(self, count: int) -> None:
        tokens = count * len(self._running)
        self._blocks += self._further_blocks(count)
        self._context += tokens
        self.tokens_generated += tokens
        self._step += count
        self._make_room()

    def _finish(self) -> None:
        """Let those go that are at the end of their turn."""
        while self._finishing and self._finishing[0][0] <= self._step:
            finish_step, number = heapq.heappop(self._finishing)
            one = self._running.get(number)
            if one is None or one.finish_step != finish_step:
                continue
            self._leave(one)
            request = one.request
            del self._known[request.sample]
            kind: Literal["turn", "finished"] = "finished" if one.turn == len(request.turns) - 1 else "turn"
            self._events.append(Event(-(-self._start // FS_PER_NS), request.sample, kind, one.done, one.turn))

    # ---- what comes next

    def _decide(self) -> None:
        """Begin a prefill or steps at `_start`."""
        if self._queue and not self._stuck and len(self._running) < self._max_running:
            tokens, pairs = self._admit()
            if tokens:
                self._start += round(self._model.prefill_batch_seconds(tokens, pairs) * FS_PER_S)
                return
        while not (count := self._steps_that_fit()):
            last = next(reversed(self._running.values()))
            self._leave(last)
            self._wait(last)
            # What it gave up is for those that still run.
            self._stuck = True
            self.preemptions += 1
        batch = len(self._running)
        self._first = first = self._batch_fs[batch] + self._token_fs * self._context
        self._growth = growth = self._token_fs * batch
        self._left = count
        self._end = self._start + count * first + growth * (count * (count - 1) // 2)

    def _steps_that_fit(self) -> int:
        """Steps until the first of the running ends, or as many as there are blocks for."""
        heap, running, block = self._finishing, self._running, self._block
        while heap[0][1] not in running or running[heap[0][1]].finish_step != heap[0][0]:
            heapq.heappop(heap)
        most = heap[0][0] - self._step
        free, batch = self._capacity - self._blocks, len(running)
        if -(-most // block) * batch <= free:
            return most
        rounds = free // batch
        steps, free = rounds * block, free - rounds * batch
        while steps < most and (needed := self._phases[-(self._step + steps) % block]) <= free:
            free -= needed
            steps += 1
        return min(steps, most)

    def _further_blocks(self, steps: int) -> int:
        """Blocks that the running requests take in their next steps."""
        block, phases = self._block, self._phases
        rounds, rest = divmod(steps, block)
        blocks = rounds * len(self._running)
        for step in range(self._step, self._step + rest):
            blocks += phases[-step % block]
        return blocks

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._block)

    def _admit(self) -> tuple[int, int]:
        """Take in what fits, the first in rank first. Tokens to prefill, and pairs of these with those before them."""
        tokens = pairs = 0
        while self._queue and len(self._running) < self._max_running:
            one = self._queue.first(self._start, self._admissions)
            self._admissions += 1
            blocks = self._blocks_of(one.context)
            held = self._cached(one)
            new = one.context - held
            if tokens and tokens + new > PREFILL_TOKENS:
                break
            others = len(self._running)
            if others and self._blocks + blocks + others + 1 > self._capacity:
                self._stuck = True
                break
            tokens += new
            pairs += new * held + new * (new - 1) // 2
            self.reused_tokens += held
            self._take(one, blocks)
        self.prefilled_tokens += tokens
        return tokens, pairs

    def _take(self, one: Sequence, blocks: int) -> None:
        self._queue.take(one)
        context = one.context
        one.step = self._step
        one.finish_step = self._step + one.turn_end - one.done
        self._running[one.number] = one
        heapq.heappush(self._finishing, (one.finish_step, one.number))
        self._context += context
        self._blocks += blocks
        self._phases[(context - self._step) % self._block] += 1
        if self._prefixes.use(one.request.sample, one.group):
            self._rank_fellows(one.group)
        self._make_room()

    def _leave(self, one: Sequence) -> None:
        """A running request gives up its place. Its keys and values stay until their blocks are needed."""
        del self._running[one.number]
        one.done += self._step - one.step
        context = one.context
        blocks = self._blocks_of(context)
        self._context -= context
        self._blocks -= blocks
        self._phases[(context - self._step) % self._block] -= 1
        self._prefixes.keep(one.request.sample, one.group, context, blocks)
        self._stuck = False
        self._make_room()

    def _wait(self, one: Sequence) -> None:
        self._queue.put(one, self._cached(one))
        self._stuck = False

    # ---- prefixes that are still there

    def _cached(self, one: Sequence) -> int:
        """Tokens that need no prefill. One token must go through the model."""
        return min(self._prefixes.tokens(one.request.sample, one.group, one.prompt), one.context - 1)

    def _make_room(self) -> None:
        """Give up prefixes where their blocks are needed."""
        room = self._capacity - self._blocks
        if self._prefixes.blocks <= room:
            return
        for sample, lost_group in self._prefixes.fit(room):
            one = self._known.get(sample)
            if one is not None and one in self._queue:
                self._queue.rank(one, self._cached(one))
            if lost_group is not None:
                self._rank_fellows(lost_group)

    def _rank_fellows(self, group: str) -> None:
        """The prompt of this group is there now, or no longer."""
        for fellow in self._queue.fellows(group):
            self._queue.rank(fellow, self._cached(fellow))
