"""A simulated node: the agent's side of the controller's calls, and workers whose work takes its modelled time.

It answers what `dynarl.agent` answers, and reports what that reports, with the same rules: while its role changes the
gate is closed and hand-outs are refused; what it gives up keeps its tokens here; a lease that has begun is finished; a
tool call that is open goes on while its answer moves to another node.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, defaultdict, deque
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from dynarl import wire
from dynarl.agent.sharing import Sharing
from dynarl.sim.decode import DecodeEngine, Event
from dynarl.sim.loop import SECOND_NS, Happening, nanoseconds

if TYPE_CHECKING:
    from dynarl.sim.fleet import SimFleet

# Lengths of running answers that a report has, at most.
MOST_LENGTHS = 32
# A rollout worker tells so often what it has sampled of unfinished answers; should it die, the rest is lost.
PARTS_INTERVAL_NS = SECOND_NS


class ToolCall(NamedTuple):
    """A tool call that was made: done at `ready_ns`, after which the response has `tokens` tokens."""

    ready_ns: int
    tokens: int


@dataclass
class Lease:
    """A group at one device: to be scored or trained from `ready_ns` on, when its samples are there."""

    number: int
    samples: list[str]
    ready_ns: int
    started: bool = False


@dataclass
class Seat:
    """One rollout engine and the timer for its next event. `samples`: those that are in it or at a tool."""

    engine: DecodeEngine
    number: int
    samples: dict[str, None] = field(default_factory=dict)
    timer: Happening | None = None
    due_ns: int = 0


class SimNode:
    """Orders of the controller are methods `on_*`; they return when the order is carried out."""

    def __init__(self, fleet: SimFleet, name: str, home: str):
        self._fleet, self.name = fleet, name
        self._loop, self._log, self._world = fleet.loop, fleet.log, fleet.world
        self._most_tokens = fleet.world.config.algorithm.max_response_tokens
        self._devices = range(fleet.world.config.cluster.devices_per_node)
        self.active = home
        self.dead: set[str] = set()  # roles whose workers are not there
        self.attempts: Counter[str] = Counter()
        self.open = True
        self.sharing = Sharing(self._switch, self._has_work)
        self._shared: dict[str, dict[str, Any]] = {}  # role -> weights that it needs when it is given the devices
        self.versions: dict[str, int] = {}  # role -> version of the weights in its workers
        self.plan: dict[str, Any] | None = None
        self.held: dict[str, int] = {}  # sample -> tokens of its response in the store here
        self.seats = [self._seat(n) for n in range(len(self._devices) * fleet.world.engines_per_device)]
        self._where: dict[str, Seat] = {}
        self._homes: dict[str, Seat] = {}  # sample -> where it was last
        self.at_tool: dict[str, Happening] = {}
        self._tools_free_ns = [0] * (fleet.world.tools_at_once or 0)
        self._leases: dict[tuple[str, int], deque[Lease]] = defaultdict(deque)
        self._idle = asyncio.Event()  # no lease is being worked on
        self._idle.set()
        self.gradient: Counter[str] = Counter()  # samples whose gradients are in the buffers here
        self._reporting = False
        self._busy_since_ns: int | None = None
        self.busy_ns = 0

    def _seat(self, number: int) -> Seat:
        return Seat(self._world.engine(), number)

    # --- whether it works

    @property
    def works(self) -> bool:
        return bool(self._where) or not self._idle.is_set()

    def busy_until(self, now_ns: int) -> int:
        """Nanoseconds in which it has worked, ever."""
        return self.busy_ns + (now_ns - self._busy_since_ns if self._busy_since_ns is not None else 0)

    def _account(self) -> None:
        """To be called after everything that may have begun its first work, or ended its last."""
        self.busy_ns = self.busy_until(self._loop.now_ns)
        self._busy_since_ns = self._loop.now_ns if self.works else None

    def _check_alive(self, role: str, what: str) -> None:
        if not self.open:
            raise wire.CallError(f"{what} came while this node changes its role")
        if role in self.dead:
            raise wire.CallError(f"{self.name} has no {role} worker")

    def _turn(self, role: str) -> AbstractAsyncContextManager[None]:
        """Around a hand-out, which is refused where a worker dies while it waits for the devices."""
        lives = self.attempts[role]

        def check() -> None:
            if role in self.dead or self.attempts[role] != lives:
                raise wire.CallError(f"{role} on {self.name} died while its work was on the way")

        if role in self.dead:
            raise wire.CallError(f"{self.name} has no {role} worker")
        return self.sharing.turn(role, check)

    # --- generation

    async def on_generate(
        self, requests: list[dict], split: str, temperature: float, seed: int, max_response_tokens: int,
        holders: dict[str, str], order: str,
    ) -> None:
        async with self._turn("rollout"):
            self._generate(requests)

    def _generate(self, requests: list[dict]) -> None:
        self._check_alive("rollout", "a request")
        for item in requests:
            sample, holder = item["sample"], item["holder"]
            tokens = self._fleet.nodes[holder].held[sample] if holder else 0
            seat = self._where[sample] = self._homes[sample] = self._place(sample)
            seat.samples[sample] = None
            self._log.note(f"request {self.name} {sample} {tokens}")
            self._fleet.books.begun(sample, tokens)
            self.held[sample] = tokens
            if (call := self._fleet.calls.get((sample, tokens))) is not None:
                self.at_tool[sample] = self._loop.at(call.ready_ns, self._tool_done, sample, call)
            else:
                seat.engine.add(self._loop.now_ns, self._fleet.requests[sample], tokens)
        for seat in self.seats:
            self._tend(seat)
        self._account()
        self._report_soon()

    def _place(self, sample: str) -> Seat:
        """Where it was before, if that has no more to do than the others; else the engine with the fewest requests."""
        least = min(len(seat.samples) for seat in self.seats)
        home = self._homes.get(sample)
        if home is not None and len(home.samples) <= least:
            return home
        return next(seat for seat in self.seats if len(seat.samples) == least)

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
        sample, tokens = event.sample, event.tokens_done
        self._log.note(f"{event.kind} {self.name} {sample} {tokens}")
        self._fleet.books.left(sample, tokens)
        self.held[sample] = tokens
        if event.kind == "turn":
            call = self._fleet.calls[sample, tokens] = self._call_tool(sample, event)
            self.at_tool[sample] = self._loop.at(call.ready_ns, self._tool_done, sample, call)
            return
        del self._where[sample], seat.samples[sample]
        if not self._where:
            self._account()
            self.sharing.look()
        self._loop.at(self._loop.now_ns + self._fleet.verified_ns, self._verified, sample, tokens)

    def _call_tool(self, sample: str, event: Event) -> ToolCall:
        turn, begin_ns = self._fleet.requests[sample].turns[event.turn], self._loop.now_ns
        if self._tools_free_ns:
            begin_ns = max(begin_ns, heapq.heappop(self._tools_free_ns))
            heapq.heappush(self._tools_free_ns, begin_ns + turn.tool_ns)
        return ToolCall(begin_ns + turn.tool_ns, event.tokens_done + turn.tool_tokens)

    def _tool_done(self, sample: str, call: ToolCall) -> None:
        seat = self._where[sample]
        del self.at_tool[sample]
        self.held[sample] = call.tokens
        self._log.note(f"tool {self.name} {sample} {call.tokens}")
        self._fleet.books.left(sample, call.tokens)
        seat.engine.add(self._loop.now_ns, self._fleet.requests[sample], call.tokens)
        self._tend(seat)

    def _verified(self, sample: str, tokens: int) -> None:
        request = self._fleet.requests[sample]
        self._fleet.finished(sample, tokens)
        self._fleet.listener.event_finished(
            self.name, sample=sample, reward=self._fleet.reward(sample), correct=True, timed_out=False, tokens=tokens,
            prompt_tokens=request.prompt_tokens, version=self.versions["rollout"],
            finish="length" if tokens >= self._most_tokens else "stop",
            masked_tokens=sum([turn.tool_tokens for turn in request.turns]), tool_calls=len(request.turns) - 1,
            tool_seconds=sum([turn.tool_ns for turn in request.turns]) / SECOND_NS,
        )  # fmt: skip

    async def on_abort(self, samples: list[str] | None = None, limit_s: float | None = None) -> list[dict]:
        return self._give_up(list(self._where) if samples is None else samples)

    def _give_up(self, samples: list[str]) -> list[dict]:
        """Requests with what they have so far; those that have finished by now are not among them."""
        given_up, seats = [], {}
        for sample in samples:
            if (seat := self._where.get(sample)) is None:
                continue
            if (timer := self.at_tool.pop(sample, None)) is not None:
                timer.cancel()  # the call goes on; whoever goes on with the answer gets what comes of it
            elif (tokens := seat.engine.remove(self._loop.now_ns, sample)) is None:
                continue
            else:
                self.held[sample] = tokens
                self._fleet.books.left(sample, tokens)
            del self._where[sample], seat.samples[sample]
            seats[seat.number] = seat
            self._log.note(f"given_up {self.name} {sample} {self.held[sample]}")
            given_up.append({"sample": sample, "tokens": self.held[sample]})
        for seat in seats.values():
            self._tend(seat)
        self._account()
        self.sharing.look()
        return given_up

    # --- reports of load

    def _report_soon(self) -> None:
        if not self._reporting:
            self._reporting = True
            self._loop.after(self._fleet.figures_ns, self._report)

    def _report(self) -> None:
        self._reporting = False
        if self.active != "rollout" or "rollout" in self.dead:
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
                self.name, worker=f"{self.name}-rollout-{device}",
                running=sum(s.engine.running for s in seats), waiting=sum(s.engine.waiting for s in seats),
                tokens=sum(s.engine.tokens_generated for s in seats),
                kv_used_tokens=sum(s.engine.kv_tokens for s in seats),
                kv_total_tokens=len(seats) * self._world.kv_capacity_tokens,
                prefill_tokens=sum(s.engine.prefilled_tokens for s in seats),
                lengths=[lengths[(2 * i + 1) * len(lengths) // (2 * count)] for i in range(count)],
            )  # fmt: skip
        if self._where:
            self._report_soon()

    # --- scoring and training

    async def on_score(self, lease: int, devices: list[int], samples: list[dict], holders: dict[str, str]) -> None:
        async with self._turn("inference"):
            self._take("inference", lease, devices, samples)

    async def on_train(self, lease: int, devices: list[int], samples: list[dict], holders: dict[str, str]) -> None:
        async with self._turn("training"):
            self._take("training", lease, devices, samples)

    def _take(self, role: str, lease: int, devices: list[int], samples: list[dict]) -> None:
        self._check_alive(role, "a lease")
        [device] = devices
        fetched_ns = self._fetch_ns(samples)
        queue = self._leases[role, device]
        queue.append(Lease(lease, [s["sample"] for s in samples], self._loop.now_ns + fetched_ns))
        self._log.note(f"lease {self.name} {role} {lease} {fetched_ns}")
        if len(queue) == 1:
            self._start(role, device)

    def _fetch_ns(self, samples: list[dict]) -> int:
        """How long these take from the nodes that hold them. Raises KeyError where one does not."""
        tokens: Counter[str] = Counter()
        for item in samples:
            sample, holder = item["sample"], item["holder"]
            tokens[holder] += self._fleet.requests[sample].prompt_tokens + self._fleet.nodes[holder].held[sample]
        tokens.pop(self.name, None)
        # Between any two nodes as between the first and the last one: it is little, whatever the way.
        num_bytes = self._world.sample_bytes * max(tokens.values(), default=0)
        return self._fleet.network_ns("p2p", self._fleet.far_apart, num_bytes)

    def _start(self, role: str, device: int) -> None:
        lease = self._leases[role, device][0]
        lease.started = True
        self._idle.clear()
        self._account()
        requests, response_tokens = self._fleet.requests, self._fleet.response_tokens
        sizes = [(requests[sample].prompt_tokens, response_tokens[sample]) for sample in lease.samples]
        takes_ns = nanoseconds(getattr(self._world.times, role)(sizes))
        self._loop.at(max(lease.ready_ns, self._loop.now_ns) + takes_ns, self._done, role, device, lease)

    def _done(self, role: str, device: int, lease: Lease) -> None:
        queue = self._leases[role, device]
        if not queue or queue[0] is not lease:
            return  # its worker has died
        queue.popleft()
        self._log.note(f"done {self.name} {role} {lease.number}")
        if role == "training":
            self.gradient.update(lease.samples)
            self._fleet.tell("trained", self.name, lease=lease.number, stats={"tokens": 1.0})
        else:
            for sample in lease.samples:
                self.held[sample] = self._fleet.response_tokens[sample]
            self._fleet.books.scored.update(lease.samples)
            self._fleet.tell("scored", self.name, lease=lease.number, stats={})
        if queue:
            self._start(role, device)
        elif not any(queue and queue[0].started for queue in self._leases.values()):
            self._idle.set()
        self._account()
        self.sharing.look()

    # --- calls to single workers

    async def on_worker(
        self, role: str, device: int, method: str, args: dict[str, Any], limit_s: float | None = None
    ) -> Any:
        if role in self.dead and method not in ("build", "serve_store", "enter", "load"):
            raise wire.CallError(f"{self.name} has no {role} worker")
        if handler := getattr(self, f"_worker_{method}", None):
            return await handler(device, **args)
        return None  # communicators, stores and sleep take no time here

    async def _worker_load(self, device: int, **_: Any) -> None:
        await self._fleet.pause(self._world.times.load("rollout"))

    async def _worker_begin(self, device: int, step: int, loss: str) -> None:
        self._fleet.check_empty(self.name, self.gradient)

    async def _worker_reduce(self, device: int, members: list[list[int]]) -> None:
        await self._fleet.reduced((self.name, device), members)

    async def _worker_step(self, device: int, global_tokens: int, lr: float) -> dict[str, float]:
        await self._fleet.stepped(self.name)
        return {"grad_norm": 1.0, "lr": lr}

    # --- weights

    async def on_refresh(self, version: int) -> None:
        await self._load(self.active, version)

    async def _load(self, role: str, version: int) -> None:
        if self.versions.get(role) != version:
            await self._fleet.pause(self._world.times.load(role))
            self._take_weights(role, version)

    def _take_weights(self, role: str, version: int) -> None:
        if role == "rollout" and self.versions.get(role) != version:
            for seat in self.seats:
                seat.engine.flush()
        self.versions[role] = version

    async def on_loaded(self, role: str, version: int) -> None:
        self._take_weights(role, version)

    async def on_forget(self, iteration: int) -> None:
        self.held.clear()
        self._homes.clear()

    # --- a change of roles

    async def on_prepare(self, plan: dict[str, Any]) -> dict[str, Any]:
        await self._fleet.pause(self._world.times.prepare_s)
        self.plan, role = plan, plan["moves"].get(self.name)
        ready = role not in self.dead
        return {"ready": ready, "reason": "" if ready else f"{self.name} has no {role} worker"}

    async def on_vote(self, epoch: int, limit_s: float) -> dict[str, Any]:
        await self._fleet.pause(self._world.times.vote_s)
        return {"ready": True, "same_digest": True}

    async def on_quiesce(self, epoch: int, limit_s: float) -> dict[str, Any]:
        self._fleet.timeline.cut(self._loop.now_ns)
        self.open = False
        result: dict[str, Any] = {"given_up": [], "unstarted": []}
        await self._fleet.pause(self._world.times.drain_s)
        if self.active == "rollout":
            result["given_up"] = self._give_up(list(self._where))
            return result
        for (role, _), queue in self._leases.items():
            if role == self.active:
                result["unstarted"] += [lease.number for lease in queue if not lease.started]
                while queue and not queue[-1].started:
                    queue.pop()
        await self._idle.wait()
        return result

    async def on_transfer(self, epoch: int) -> None:
        target = self.plan["moves"][self.name]
        await self._fleet.pause(self._world.times.transfer(self.active, target))
        self._take_weights(target, self.plan["version"])

    async def on_commit(self, epoch: int) -> None:
        await self._fleet.pause(self._world.times.commit_s)
        self._fleet.timeline.cut(self._loop.now_ns)
        self.active, self.plan, self.open = self.plan["moves"].get(self.name, self.active), None, True
        self._log.note(f"role {self.name} {self.active}")

    async def on_rollback(self, epoch: int) -> None:
        self._fleet.timeline.cut(self._loop.now_ns)
        self.plan, self.open = None, True

    # --- roles that take turns by themselves

    async def on_share(self, order: list[str], weights: dict[str, dict[str, Any]]) -> None:
        self._shared = weights
        self.sharing.begin(order)

    async def on_unshare(self) -> str:
        await self.sharing.end()
        return self.active

    async def on_take(self, role: str) -> None:
        async with self.sharing.turn(role):
            pass

    def _has_work(self, role: str) -> bool:
        if role == "rollout":
            return bool(self._where)
        return any(queue for (of, _), queue in self._leases.items() if of == role)

    async def _switch(self, role: str) -> None:
        if role == self.active:
            return
        if role in self.dead:
            raise wire.CallError(f"{self.name} has no {role} worker")
        source, seconds = self.active, self._world.times.transfer(self.active, role)
        self._fleet.timeline.cut(self._loop.now_ns)
        self.open = False
        await self._fleet.pause(seconds)
        self._fleet.timeline.cut(self._loop.now_ns)
        self.open, self.active = True, role
        self._take_weights(role, self._shared[role]["version"])
        self._log.note(f"role {self.name} {role}")
        await self._loop.pause(self._fleet.message_ns)
        self._fleet.listener.event_switched(self.name, source=source, target=role, phases={"load_ms": 1e3 * seconds})

    # --- workers that die

    def record_parts(self) -> None:
        """As workers do once a second: only what is recorded survives them."""
        for seat in self.seats:
            for event in seat.engine.advance(self._loop.now_ns):
                self._left(seat, event)
            self.held |= {sample: n for sample, n in seat.engine.tokens_done().items() if n}
            self._tend(seat)

    def die(self, role: str) -> None:
        """Its workers of a role are gone, with all that they had."""
        if role in self.dead:
            return
        self.dead.add(role)
        self.attempts[role] += 1
        self._fleet.deaths += 1
        self._log.note(f"died {self.name} {role}")
        held: list[str] = []
        if role == "rollout":
            held = [sample for sample in self._where if self.held.get(sample)]
            self._fleet.lose_rollout(self)
        for (of, _), queue in self._leases.items():
            if of == role:
                queue.clear()
        if not any(queue and queue[0].started for queue in self._leases.values()):
            self._idle.set()
        if role == "training":
            self.gradient.clear()
        self._account()
        self.sharing.look()
        self._fleet.tell(
            "worker_died", self.name, role=role, device=0, attempt=self.attempts[role], status="killed", tail=[],
            held=held,
        )  # fmt: skip

    def lose_requests(self) -> int:
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
        self._where.clear()
        self.seats = [self._seat(seat.number) for seat in self.seats]
        return made

    async def on_kill_workers(self, role: str) -> int:
        return 0

    async def on_start_worker(self, role: str, device: int, **_: Any) -> dict[str, Any]:
        await self._fleet.pause(self._world.times.restart_s)
        self.dead.discard(role)
        return {"attempt": self.attempts[role] + 1}
