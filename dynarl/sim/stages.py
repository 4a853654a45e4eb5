"""What a simulated node scores and trains: groups that it has as leases, at each device one after the other."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynarl.sim.loop import nanoseconds

if TYPE_CHECKING:
    from dynarl.sim.node import SimNode


@dataclass
class Lease:
    """A group at one device: to be scored or trained from `ready_ns` on, when its samples are there."""

    number: int
    samples: list[str]
    ready_ns: int
    started: bool = False


class Stages:
    """The inference and training workers of a node. gradient: samples whose gradients are in the buffers here; idle:
    set while no lease is being worked on."""

    def __init__(self, node: SimNode):
        self._node, self._fleet = node, node.fleet
        self._leases: dict[tuple[str, int], deque[Lease]] = defaultdict(deque)
        self.idle = asyncio.Event()
        self.idle.set()
        self.gradient: Counter[str] = Counter()

    def has_work(self, role: str) -> bool:
        return any(queue for (of, _), queue in self._leases.items() if of == role)

    def take(self, role: str, lease: int, device: int, samples: list[dict]) -> None:
        fetched_ns = self._fetch_ns(samples)
        queue = self._leases[role, device]
        queue.append(Lease(lease, [s["sample"] for s in samples], self._fleet.loop.now_ns + fetched_ns))
        self._fleet.log.note(f"lease {self._node.name} {role} {lease} {fetched_ns}")
        if len(queue) == 1:
            self._start(role, device)

    def _fetch_ns(self, samples: list[dict]) -> int:
        """How long these take from the nodes that hold them. Raises KeyError where one does not."""
        tokens: Counter[str] = Counter()
        requests, nodes = self._fleet.requests, self._fleet.nodes
        for item in samples:
            sample, holder = item["sample"], item["holder"]
            tokens[holder] += requests[sample].prompt_tokens + nodes[holder].held[sample]
        tokens.pop(self._node.name, None)
        # Between any two nodes as between the first and the last one: it is little, whatever the way.
        num_bytes = self._fleet.world.sample_bytes * max(tokens.values(), default=0)
        return self._fleet.network_ns("p2p", self._fleet.far_apart, num_bytes)

    def _start(self, role: str, device: int) -> None:
        lease = self._leases[role, device][0]
        lease.started = True
        self.idle.clear()
        self._node.account()
        requests, response_tokens, loop = self._fleet.requests, self._fleet.response_tokens, self._fleet.loop
        sizes = [(requests[sample].prompt_tokens, response_tokens[sample]) for sample in lease.samples]
        takes_ns = nanoseconds(getattr(self._fleet.world.times, role)(sizes))
        loop.at(max(lease.ready_ns, loop.now_ns) + takes_ns, self._done, role, device, lease)

    def _done(self, role: str, device: int, lease: Lease) -> None:
        queue, name = self._leases[role, device], self._node.name
        if not queue or queue[0] is not lease:
            return  # its worker has died
        queue.popleft()
        self._fleet.log.note(f"done {name} {role} {lease.number}")
        if role == "training":
            self.gradient.update(lease.samples)
            self._fleet.tell("trained", name, lease=lease.number, stats={"tokens": 1.0})
        else:
            for sample in lease.samples:
                self._node.held[sample] = self._fleet.response_tokens[sample]
            self._fleet.books.scored.update(lease.samples)
            self._fleet.tell("scored", name, lease=lease.number, stats={})
        if queue:
            self._start(role, device)
        else:
            self._rest()
        self._node.work_ended()

    def _rest(self) -> None:
        if not any(queue and queue[0].started for queue in self._leases.values()):
            self.idle.set()

    def give_back(self, role: str) -> list[int]:
        """Leases that have not begun."""
        unstarted = []
        for (of, _), queue in self._leases.items():
            if of == role:
                unstarted += [lease.number for lease in queue if not lease.started]
                while queue and not queue[-1].started:
                    queue.pop()
        return unstarted

    def lose(self, role: str) -> None:
        """Its workers are gone, with all that they had."""
        for (of, _), queue in self._leases.items():
            if of == role:
                queue.clear()
        self._rest()
        if role == "training":
            self.gradient.clear()
