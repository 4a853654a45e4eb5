"""All simulated nodes, as the controller sees them: it calls them and gets their events as from a real fleet."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dynarl.controller.fleet import AgentInfo, Fleet
from dynarl.controller.replicas import Place
from dynarl.sim.books import Books, ConservationError, EventLog
from dynarl.sim.loop import SECOND_NS, VirtualLoop, nanoseconds
from dynarl.sim.node import SimNode
from dynarl.sim.rollout import ToolCall
from dynarl.sim.workload import SimRequest
from dynarl.sim.timeline import Timeline
from dynarl.sim.world import World

# A rollout worker tells so often what it has sampled of unfinished answers; should it die, the rest is lost.
PARTS_INTERVAL_NS = SECOND_NS


class SimFleet:
    """The same calls as `controller.fleet.Fleet`; `listener` gets the events. An order takes one message's time to
    arrive, and then its own; its answer takes none."""

    call_each = Fleet.call_each
    worker = Fleet.worker

    def __init__(self, world: World, loop: VirtualLoop, log: EventLog):
        self.world, self.loop, self.log = world, loop, log
        self.message_ns = nanoseconds(world.times.message_s)
        self.verified_ns = nanoseconds(world.times.verify_s) + self.message_ns  # until the controller hears of it
        self.verdict_ns = nanoseconds(world.times.verdict_s)
        self.figures_ns = nanoseconds(world.figures_s)
        self.listener: Any = None
        self.progress: Callable[[int, int], None] = lambda done, of: None
        self.agents = {
            name: AgentInfo(name, home, rank, f"tcp://{name}:1", "/staging", "simulated", len(world.homes), 0)
            for rank, (name, home) in enumerate(world.homes.items())
        }
        self.nodes = {name: SimNode(self, name, home) for name, home in world.homes.items()}
        self.far_apart = [(name, 0) for name in (list(world.homes)[0], list(world.homes)[-1])]
        self.requests: dict[str, SimRequest] = {}
        self.response_tokens: dict[str, int] = {}  # of each
        self.calls: dict[tuple[str, int], ToolCall] = {}  # (sample, tokens of its response) -> the call made there
        self.deaths = 0
        self._old_engines_tokens = self._tokens_before = 0

    # --- what nodes use

    def pause(self, seconds: float) -> asyncio.Future[None]:
        return self.loop.pause(nanoseconds(seconds))

    def tell(self, event: str, node: str, **data: Any) -> None:
        """The controller hears of this when the message is there."""
        self.loop.after(self.message_ns, functools.partial(getattr(self.listener, f"event_{event}"), node, **data))

    def reward(self, sample: str) -> float:
        """Something that differs inside a group."""
        return float(int(sample.rpartition(":")[2]) % 2)

    def network_ns(self, op: str, places: Sequence[Place], num_bytes: int) -> int:
        """The same GPU of each of these devices takes part; each has its share of the bytes."""
        each, devices = self.world.gpus_per_device, self.world.config.cluster.devices_per_node
        group = tuple((self.agents[node].rank * devices + device) * each for node, device in places)
        if num_bytes == 0 or len(group) < 2:
            return 0
        return nanoseconds(self.world.network.seconds(op, group, -(-num_bytes // each)))

    # --- iterations

    def begin(self, number: int, requests: Iterable[SimRequest], scoring: bool) -> None:
        """Another iteration's requests; their lengths are known here only."""
        self.requests = {request.sample: request for request in requests}
        self.response_tokens = {request.sample: request.response_tokens for request in self.requests.values()}
        self.books = Books(self.requests.values(), scoring)
        self.timeline = Timeline(self.nodes, self.world.gpus_per_node, self.loop.now_ns)
        self.calls.clear()
        self._tokens_before = self._decoded()
        for failure in self.world.failures:
            if failure.iteration == number:
                node, at_ns = self.nodes[failure.node], self.loop.now_ns + nanoseconds(failure.at_s)
                self.loop.at(at_ns - PARTS_INTERVAL_NS, node.rollout.record_parts)
                self.loop.at(at_ns, node.die, failure.role)

    def finished(self, sample: str, tokens: int) -> None:
        """An answer is complete and verified."""
        self.books.generated[sample] = tokens
        self.progress(len(self.books.generated), len(self.requests))

    def close(self) -> None:
        """Raises ConservationError unless everything happened as it is due, exactly once."""
        self.books.close(self._decoded() - self._tokens_before, self.deaths)

    def _decoded(self) -> int:
        return self._old_engines_tokens + sum(
            s.engine.tokens_generated for n in self.nodes.values() for s in n.rollout.seats
        )

    def lose_rollout(self, node: SimNode) -> None:
        self._old_engines_tokens += node.rollout.lose()

    # --- optimizer steps

    def check_empty(self, name: str, gradient: Counter[str]) -> None:
        """Raises ConservationError: a step began although a gradient was in no step before."""
        if gradient:
            raise ConservationError(f"{name} holds gradients of {sorted(gradient)[:5]} that were in no step")

    async def reduced(self, place: Place, trees: list[list[int]]) -> None:
        """A borrowed gradient is summed along its tree into that of an owner."""
        joined = self.listener.trainer.joined
        own = joined.index(place)
        for tree in trees:
            if own in tree:
                members = [joined[rank] for rank in tree]
                await self.loop.pause(self.network_ns("broadcast", members, self.world.gradient_bytes))
        self._take_gradient(place[0])

    async def stepped(self, name: str) -> None:
        owners = self.listener.trainer.owners
        self._take_gradient(name)
        self.log.note(f"step {name} {len(owners)}")
        await self.loop.pause(
            self.network_ns("all_reduce", owners, self.world.gradient_bytes)
            + nanoseconds(self.world.times.optimizer(len(owners)))
        )

    def _take_gradient(self, name: str) -> None:
        gradient = self.nodes[name].stages.gradient
        self.books.summed.update(gradient)
        gradient.clear()

    # --- what the controller calls

    async def call(self, node: str, method: str, /, timeout_s: float | None = None, **args: Any) -> Any:
        """Raises CallError as an agent does, and TimeoutError."""
        handler = getattr(self.nodes[node], f"on_{method}")
        if timeout_s is None:
            await self.loop.pause(self.message_ns)
            return await handler(**args)
        async with asyncio.timeout(timeout_s):
            return await self.call(node, method, **args)
