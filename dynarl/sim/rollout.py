"""What a simulated node generates: its engines, the requests in them, their tool calls, and reports of its load."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dynarl.sim.decode import DecodeEngine, Event
from dynarl.sim.loop import SECOND_NS, Happening

if TYPE_CHECKING:
    from dynarl.sim.node import SimNode

# Lengths of running answers that a report has, at most.
MOST_LENGTHS = 32


class ToolCall(NamedTuple):
    """A tool call that was made: done at `ready_ns`, after which the response has `tokens` tokens."""

    ready_ns: int
    tokens: int


@dataclass
class Seat:
    """One rollout engine and the timer for its next event. `samples`: those that are in it or at a tool."""

    engine: DecodeEngine
    number: int
    samples: dict[str, None] = field(default_factory=dict)
    timer: Happening | None = None
    due_ns: int = 0


class Rollout:
    """The rollout workers of a node. where: the requests that it has, each with its seat; at_tool: those of them whose
    tool call is open."""

    def __init__(self, node: SimNode):
        self._node, self._fleet = node, node.fleet
        self._loop, self._log, self._world = node.fleet.loop, node.fleet.log, node.fleet.world
        config = self._world.config
        self._most_tokens = config.algorithm.max_response_tokens
        self._devices = range(config.cluster.devices_per_node)
        self.seats = [self._seat(n) for n in range(len(self._devices) * self._world.engines_per_device)]
        self.where: dict[str, Seat] = {}
        self._homes: dict[str, Seat] = {}  # sample -> where it was last
        self.at_tool: dict[str, Happening] = {}
        self._tools_free_ns = [0] * (self._world.tools_at_once or 0)
        self._reporting = False
        self._judged_ns = 0  # when the last verdict is there

    def _seat(self, number: int) -> Seat:
        return Seat(self._world.engine(), number)

    # --- requests come and go

    def take(self, requests: list[dict]) -> None:
        name, held = self._node.name, self._node.held
        for item in requests:
            sample, holder = item["sample"], item["holder"]
            tokens = self._fleet.nodes[holder].held[sample] if holder else 0
            seat = self.where[sample] = self._homes[sample] = self._place(sample)
            seat.samples[sample] = None
            self._log.note(f"request {name} {sample} {tokens}")
            self._fleet.books.begun(sample, tokens)
            held[sample] = tokens
            if (call := self._fleet.calls.get((sample, tokens))) is not None:
                self.at_tool[sample] = self._loop.at(call.ready_ns, self._tool_done, sample, call)
            else:
                seat.engine.add(self._loop.now_ns, self._fleet.requests[sample], tokens)
        for seat in self.seats:
            self._tend(seat)
        self._node.account()
        self._report_soon()

    def _place(self, sample: str) -> Seat:
        """Where it was before, if that has no more to do than the others; else the engine with the fewest requests."""
        least = min(len(seat.samples) for seat in self.seats)
        home = self._homes.get(sample)
        if home is not None and len(home.samples) <= least:
            return home
        return next(seat for seat in self.seats if len(seat.samples) == least)

    def give_up(self, samples: list[str] | None = None) -> list[dict]:
        """These requests, or all, with what they have so far; those that have finished by now are not among them."""
        given_up, seats, held = [], {}, self._node.held
        for sample in list(self.where) if samples is None else samples:
            if (seat := self.where.get(sample)) is None:
                continue
            if (timer := self.at_tool.pop(sample, None)) is not None:
                timer.cancel()  # the call goes on; whoever goes on with the answer gets what comes of it
            elif (tokens := seat.engine.remove(self._loop.now_ns, sample)) is None:
                continue
            else:
                held[sample] = tokens
                self._fleet.books.left(sample, tokens)
            del self.where[sample], seat.samples[sample]
            seats[seat.number] = seat
            self._log.note(f"given_up {self._node.name} {sample} {held[sample]}")
            given_up.append({"sample": sample, "tokens": held[sample]})
        for seat in seats.values():
            self._tend(seat)
        self._node.work_ended()
        return given_up

    def forget(self) -> None:
        """An iteration is over."""
        self._homes.clear()

    # --- what engines and tools do

    def _tend(self, seat: Seat) -> None:
        """Look at an engine again when something ends there."""
        due_ns = seat.engine.next_ns()
        if due_ns is None or (seat.timer is not None and seat.due_ns <= due_ns):
            return
        if seat.timer is not None:
            seat.timer.cancel()
        seat.due_ns, seat.timer = due_ns, self._loop.at(due_ns, self._look, seat)

    def _look(self, seat: Seat) -> None:
        seat.timer = None
        for event in seat.engine.advance(self._loop.now_ns):
            self._left(seat, event)
        self._tend(seat)

    def _left(self, seat: Seat, event: Event) -> None:
        sample, tokens, node = event.sample, event.tokens_done, self._node
        self._log.note(f"{event.kind} {node.name} {sample} {tokens}")
        self._fleet.books.left(sample, tokens)
        node.held[sample] = tokens
        if event.kind == "turn":
            call = self._fleet.calls[sample, tokens] = self._call_tool(sample, event)
            self.at_tool[sample] = self._loop.at(call.ready_ns, self._tool_done, sample, call)
            return
        del self.where[sample], seat.samples[sample]
        if not self.where:
            node.work_ended()
        self._judged_ns = max(self._judged_ns, self._loop.now_ns) + self._fleet.verdict_ns
        self._loop.at(self._judged_ns + self._fleet.verified_ns, self._verified, sample, tokens)

    def _call_tool(self, sample: str, event: Event) -> ToolCall:
        turn, begin_ns = self._fleet.requests[sample].turns[event.turn], self._loop.now_ns
        if self._tools_free_ns:
            begin_ns = max(begin_ns, heapq.heappop(self._tools_free_ns))
            heapq.heappush(self._tools_free_ns, begin_ns + turn.tool_ns)
        return ToolCall(begin_ns + turn.tool_ns, event.tokens_done + turn.tool_tokens)

    def _tool_done(self, sample: str, call: ToolCall) -> None:
        seat = self.where[sample]
        del self.at_tool[sample]
        self._node.held[sample] = call.tokens
        self._log.note(f"tool {self._node.name} {sample} {call.tokens}")
        self._fleet.books.left(sample, call.tokens)
        seat.engine.add(self._loop.now_ns, self._fleet.requests[sample], call.tokens)
        self._tend(seat)

    def _verified(self, sample: str, tokens: int) -> None:
        request = self._fleet.requests[sample]
        self._fleet.finished(sample, tokens)
        self._fleet.listener.event_finished(
            self._node.name, sample=sample, reward=self._fleet.reward(sample), correct=True, timed_out=False,
            tokens=tokens, prompt_tokens=request.prompt_tokens, version=self._node.versions["rollout"],
            finish="length" if tokens >= self._most_tokens else "stop",
            masked_tokens=sum([turn.tool_tokens for turn in request.turns]), tool_calls=len(request.turns) - 1,
            tool_seconds=sum([turn.tool_ns for turn in request.turns]) / SECOND_NS,
        )  # fmt: skip

    def flush(self) -> None:
        """Other weights: prefixes that were kept are of no use."""
        for seat in self.seats:
            seat.engine.flush()

    # --- reports of load

    def _report_soon(self) -> None:
        if not self._reporting:
            self._reporting = True
            self._loop.after(self._fleet.figures_ns, self._report)

    def _report(self) -> None:
        self._reporting = False
        node = self._node
        if node.active != "rollout" or "rollout" in node.dead:
            return
        each = len(self.seats) // len(self._devices)
        for device in self._devices:
            seats = self.seats[device * each : (device + 1) * each]
            lengths: list[int] = []
            for seat in seats:
                for event in seat.engine.advance(self._loop.now_ns):
                    self._left(seat, event)
                self._tend(seat)
                lengths += seat.engine.lengths()
            lengths.sort()
            count = min(MOST_LENGTHS, len(lengths))
            self._fleet.listener.event_figures(
                node.name, worker=f"{node.name}-rollout-{device}",
                running=sum(s.engine.running for s in seats), waiting=sum(s.engine.waiting for s in seats),
                tokens=sum(s.engine.tokens_generated for s in seats),
                kv_used_tokens=sum(s.engine.kv_tokens for s in seats),
                kv_total_tokens=len(seats) * self._world.kv_capacity_tokens,
                prefill_tokens=sum(s.engine.prefilled_tokens for s in seats),
                lengths=[lengths[(2 * i + 1) * len(lengths) // (2 * count)] for i in range(count)],
            )  # fmt: skip
        if self.where:
            self._report_soon()

    # --- workers that die

    def record_parts(self) -> None:
        """As workers do once a second: only what is recorded survives them."""
        for seat in self.seats:
            for event in seat.engine.advance(self._loop.now_ns):
                self._left(seat, event)
            self._node.held |= {sample: n for sample, n in seat.engine.tokens_done().items() if n}
            self._tend(seat)

    def lose(self) -> int:
        """Engines anew and empty. Returns the tokens that the old ones have made."""
        for timer in self.at_tool.values():
            timer.cancel()
        made = 0
        for seat in self.seats:
            if seat.timer is not None:
                seat.timer.cancel()
            for sample, tokens in seat.engine.tokens_done().items():
                self._fleet.books.left(sample, tokens)
            made += seat.engine.tokens_generated
        self.at_tool.clear()
        self.where.clear()
        self._homes.clear()
        self.seats = [self._seat(seat.number) for seat in self.seats]
        return made
