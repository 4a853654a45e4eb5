"""A rollout engine that goes from token to token, with lists, loops and the live engine's own desk: what
`sim.decode.DecodeEngine`, which jumps, is compared with."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

from dynarl.dataflow.priority import Desk, Ticket
from dynarl.perf.rollout import StepModel
from dynarl.sim.decode import FS_PER_NS, PREFILL_TOKENS, DecodeEngine, Event
from dynarl.sim.waiting import FS_PER_S
from dynarl.sim.workload import SimRequest


@dataclass
class Held:
    request: SimRequest
    ticket: Ticket
    done: int
    turn: int = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.turn, self.end = self.request.position(self.done)

    @property
    def context(self) -> int:
        return self.request.prompt_tokens + self.done


class TokenEngine:
    def __init__(
        self, model: StepModel, capacity: int, max_running: int, order: str, block: int, passes: int, wait_s: float
    ):
        self.model, self.max_running, self.order = model, max_running, order
        self.block, self.blocks = block, capacity // block
        self.desk = Desk(passes, wait_s * FS_PER_S)
        self.running: list[Held] = []
        self.queue: list[Held] = []
        self.kept: list[tuple[str, str, int]] = []
        self.now = self.at = self.begun = 0
        self.in_step = self.stuck = False
        self.out: list[Event] = []
        self.tokens_generated = self.prefilled_tokens = self.reused_tokens = self.preemptions = 0

    def add(self, now_ns: int, request: SimRequest, tokens_done: int = 0) -> None:
        self.to(now_ns * FS_PER_NS)
        tool_calls = request.position(tokens_done)[0]
        self.queue.append(Held(request, self.desk.ticket(tool_calls, self.now, self.order), tokens_done))
        self.stuck = False
        self.decide_anew()

    def remove(self, now_ns: int, sample: str) -> int:
        self.to(now_ns * FS_PER_NS)
        one = next(one for one in self.running + self.queue if one.request.sample == sample)
        if one in self.running:
            self.leave(one)
        else:
            self.queue.remove(one)
        self.stuck = False
        self.decide_anew()
        return one.done

    def next_ns(self) -> int | None:
        if self.out:
            return self.out[0].at_ns
        if not self.running and not self.queue:
            return None
        while not self.in_step and self.at <= self.now:
            self.decide()
        return -(-self.at // FS_PER_NS)

    def advance(self, now_ns: int) -> list[Event]:
        self.to(now_ns * FS_PER_NS)
        events, self.out = self.out, []
        return events

    def tokens_done(self) -> dict[str, int]:
        return {one.request.sample: one.done for one in self.running + self.queue}

    def decide_anew(self) -> None:
        if self.in_step and self.begun == self.now:
            self.in_step, self.at = False, self.now

    def to(self, now: int) -> None:
        self.now = now
        while self.in_step or self.running or self.queue:
            if self.in_step:
                if self.at > now:
                    return
                self.step_ends()
            elif self.at < now:
                self.decide()
            else:
                return
        self.at = max(self.at, now)

    def step_ends(self) -> None:
        self.in_step = False
        self.tokens_generated += len(self.running)
        for one in self.running:
            one.done += 1
        self.evict()
        for one in sorted(self.running, key=lambda one: one.ticket.number):
            if one.done == one.end:
                self.leave(one)
                kind = "finished" if one.turn == len(one.request.turns) - 1 else "turn"
                self.out.append(Event(-(-self.at // FS_PER_NS), one.request.sample, kind, one.done, one.turn))

    def decide(self) -> None:
        if self.queue and not self.stuck and len(self.running) < self.max_running and self.prefill():
            return
        while self.used(1) > self.blocks:
            last = self.running[-1]
            self.leave(last)
            self.queue.append(last)
            self.stuck = True
            self.preemptions += 1
        held = sum(one.context for one in self.running)
        batch, token = self.model.batch_seconds(len(self.running)), self.model.per_kv_token_s
        step = round(batch * FS_PER_S) + round(token * FS_PER_S) * held
        self.begun, self.at, self.in_step = self.at, self.at + step, True

    def prefill(self) -> bool:
        tokens = pairs = 0
        while self.queue and len(self.running) < self.max_running:
            cached = [self.cached(one) for one in self.queue]
            index = self.desk.draw([one.ticket for one in self.queue], cached, self.at)
            one, held = self.queue[index], cached[index]
            if tokens and tokens + one.context - held > PREFILL_TOKENS:
                break
            if self.running and self.used(0) + -(-one.context // self.block) + len(self.running) + 1 > self.blocks:
                self.stuck = True
                break
            del self.queue[index]
            for position in range(held, one.context):
                tokens, pairs = tokens + 1, pairs + position
            self.reused_tokens += held
            self.kept = [entry for entry in self.kept if entry[0] != one.request.sample]
            self.running.append(one)
            self.evict()
        self.prefilled_tokens += tokens
        self.at += round(self.model.prefill_batch_seconds(tokens, pairs) * FS_PER_S)
        return tokens > 0

    def used(self, steps: int) -> int:
        return sum(-(-(one.context + steps) // self.block) for one in self.running)

    def cached(self, one: Held) -> int:
        own = [tokens for sample, _, tokens in self.kept if sample == one.request.sample]
        prompts = {other.request.group for other in self.running} | {group for _, group, _ in self.kept}
        held = own[0] if own else one.request.prompt_tokens if one.request.group in prompts else 0
        return min(held, one.context - 1)

    def leave(self, one: Held) -> None:
        self.running = [other for other in self.running if other is not one]
        self.stuck = False
        self.kept.append((one.request.sample, one.request.group, one.context))
        self.evict()

    def evict(self) -> None:
        assert self.used(0) <= self.blocks
        while self.used(0) + sum(-(-tokens // self.block) for _, _, tokens in self.kept) > self.blocks:
            del self.kept[0]


def follow(engine: DecodeEngine | TokenEngine, script: list[tuple[int, str, Any]]) -> list[tuple]:
    """What comes of a script of (time, "add", request) and (time, "move", sample), with tools that take their time.

    "move": the request leaves, and is back after 3 ms.
    """
    agenda = [(at_ns, index, kind, what, 0) for index, (at_ns, kind, what) in enumerate(script)]
    heapq.heapify(agenda)
    requests = {what.sample: what for _, kind, what in script if kind == "add"}
    here: set[str] = set()
    log: list[tuple] = []
    while True:
        times = [at_ns for at_ns in (engine.next_ns(), agenda[0][0] if agenda else None) if at_ns is not None]
        if not times:
            return log
        now = min(times)
        for event in engine.advance(now):
            log.append(event)
            here.discard(event.sample)
            if event.kind == "turn":
                request = requests[event.sample]
                turn = request.turns[event.turn]
                back = event.tokens_done + turn.tool_tokens
                place = len(script) + int(event.sample.rpartition(":")[2])  # among what happens at one instant
                heapq.heappush(agenda, (event.at_ns + turn.tool_ns, place, "add", request, back))
        while agenda and agenda[0][0] <= now:
            _, order, kind, what, done = heapq.heappop(agenda)
            if kind == "add":
                engine.add(now, what, done)
                here.add(what.sample)
            elif what in here:
                done = engine.remove(now, what)
                here.discard(what)
                log.append((now, what, "moved", done))
                heapq.heappush(agenda, (now + 3_000_000, order, "add", requests[what], done))
            log.append((now, tuple(sorted(engine.tokens_done().items()))))
