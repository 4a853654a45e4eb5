"""What communication takes, at two levels of detail, for the same workload.

- `AnalyticNetwork` (F0): every message meets others only at the devices' own ports. A phase takes its latency, and per
  byte the larger of: what the slowest message needs alone on its narrowest link; what the busiest port needs for all
  of its bytes. These are the formulas of `collectives`. Switches block nothing, operations do not see each other.
- `FlowLevelNetwork` (F1): the messages of a phase share all links of the topology, max-min fair; so do operations that
  run together.

F0 is a bound that no sharing of links can beat, and the phases are the same ones, so F1 is never faster; the two are
equal where messages meet at ports only and fill them evenly. Each level takes the algorithm that is fastest there.

Per group and operation the messages are laid out once: times are linear in bytes but for the number of chunks, so later
calls evaluate a formula.

>>> from dynarl.fabric.topology import fat_tree
>>> net = fat_tree(16, 8, nic_bytes_per_s=50e9, nvlink_bytes_per_s=450e9, leaf_radix=32)
>>> for network in (AnalyticNetwork(net), FlowLevelNetwork(net)):
...     cost = network.cost("all_reduce", range(128), 10**9)
...     print(cost.algorithm, round(1e3 * cost.seconds, 2), "ms")
hierarchical 8.71 ms
hierarchical 13.4 ms
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np

from dynarl.fabric.collectives import Phase, algorithms
from dynarl.fabric.flows import FlowNetwork
from dynarl.fabric.maxmin import drain_seconds
from dynarl.fabric.topology import Topology

# Operations whose messages have been laid out, kept by (operation, group).
REMEMBERED = 4096


@dataclass(frozen=True)
class Operation:
    """One collective of a workload. `nbytes` as `collectives` says; `group[0]` is broadcast's root and p2p's sender."""

    op: str
    group: Sequence[int]
    nbytes: int


@dataclass(frozen=True)
class PhaseCost:
    phase: Phase
    latency_s: float
    seconds_per_byte: float

    def seconds(self, nbytes: float) -> float:
        return self.phase.seconds(nbytes, self.latency_s, self.seconds_per_byte)


@dataclass(frozen=True)
class Cost:
    """Time of an operation that is alone, the algorithm that it takes, and what that consists of."""

    seconds: float
    algorithm: str
    phases: tuple[PhaseCost, ...] = field(repr=False, compare=False)


class Network(Protocol):
    """Either level."""

    topology: Topology

    def cost(self, op: str, group: Sequence[int], nbytes: int) -> Cost: ...

    def seconds(self, op: str, group: Sequence[int], nbytes: int) -> float: ...

    def together(self, operations: Sequence[Operation]) -> list[float]: ...


class _Level:
    """What both levels share. They differ in the time of a phase's bytes."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._algorithms = lru_cache(REMEMBERED)(self._lay_out)

    def cost(self, op: str, group: Sequence[int], nbytes: int) -> Cost:
        """The operation alone on the network, by its fastest algorithm. Without bytes nothing is sent, in no time.

        Raises ValueError on an unknown operation, on devices that are no group or are not there, and on negative bytes.
        """
        return min(self.costs(op, group, nbytes), key=lambda cost: cost.seconds)

    def costs(self, op: str, group: Sequence[int], nbytes: int) -> list[Cost]:
        """The same by each algorithm that the group has."""
        if nbytes < 0:
            raise ValueError(f"{op} of {nbytes} bytes: give 0 or more")
        found = self._algorithms(op, tuple(group))
        if not nbytes:
            return [Cost(0.0, "none", ())]
        return [Cost(sum(p.seconds(nbytes) for p in phases), name, phases) for name, phases in found.items()]

    def seconds(self, op: str, group: Sequence[int], nbytes: int) -> float:
        return self.cost(op, group, nbytes).seconds

    def _lay_out(self, op: str, group: tuple[int, ...]) -> dict[str, tuple[PhaseCost, ...]]:
        return {
            name: tuple(self._phase_cost(phase) for phase in phases)
            for name, phases in algorithms(self.topology, op, group).items()
        }

    def _phase_cost(self, phase: Phase) -> PhaseCost:
        routes = self.topology.routes(phase.src, phase.dst)
        narrowest = self.topology.narrowest_bytes_per_s(routes)
        if not narrowest.all():
            dead = int(np.argmin(narrowest))
            raise ValueError(
                f"device {phase.src[dead]} cannot reach device {phase.dst[dead]}: a link between them has no capacity"
            )
        latency_s = float(self.topology.latencies_s(routes).max())
        return PhaseCost(phase, latency_s, self._seconds_per_byte(routes, narrowest, phase.share))

    def _seconds_per_byte(self, routes: np.ndarray, narrowest: np.ndarray, share: float) -> float:
        raise NotImplementedError


class AnalyticNetwork(_Level):
    """F0: latency and bandwidth of paths and ports, nothing shared beyond the ports."""

    def together(self, operations: Sequence[Operation]) -> list[float]:
        """Seconds until each of the operations that start together has ended: what each takes alone."""
        return [self.seconds(o.op, o.group, o.nbytes) for o in operations]

    def _seconds_per_byte(self, routes: np.ndarray, narrowest: np.ndarray, share: float) -> float:
        at_ports = routes[(routes >= 0) & (routes < self.topology.num_ports)]
        messages = np.bincount(at_ports, minlength=self.topology.num_ports)
        busiest = (messages / self.topology.capacity_bytes_per_s[: self.topology.num_ports]).max()
        return share * float(max(1 / narrowest.min(), busiest))


class FlowLevelNetwork(_Level):
    """F1: messages share links, max-min fair."""

    def together(self, operations: Sequence[Operation]) -> list[float]:
        """Seconds until each of the operations that start together has ended, links shared between them.

        Each takes the algorithm that is fastest alone. A phase starts when all messages of the one before have arrived.
        """
        network = FlowNetwork(self.topology)
        phases = [iter(self.cost(o.op, o.group, o.nbytes).phases) for o in operations]
        ends_s = [0.0] * len(operations)
        # When latency has passed and the next phase starts: (ns, operation).
        starts = [(0, i) for i in range(len(operations))]
        while True:
            soonest = network.next_completion()
            if soonest is not None and (not starts or soonest[0] <= starts[0][0]):
                now_ns, transfer = soonest
                network.advance(now_ns)
                i, delay_ns = network.tag(transfer)
                if network.finish(transfer):
                    heapq.heappush(starts, (now_ns + delay_ns, i))
            elif starts:
                now_ns, i = heapq.heappop(starts)
                network.advance(now_ns)
                ends_s[i] = now_ns * 1e-9
                cost = next(phases[i], None)
                if cost is not None:
                    delay_ns, nbytes = _delay_and_bytes(cost, operations[i].nbytes)
                    network.start(now_ns, cost.phase.src, cost.phase.dst, nbytes, (i, delay_ns))
            else:
                return ends_s

    def _seconds_per_byte(self, routes: np.ndarray, narrowest: np.ndarray, share: float) -> float:
        return drain_seconds(routes, np.full(len(routes), share), self.topology.capacity_bytes_per_s)


def _delay_and_bytes(cost: PhaseCost, nbytes: int) -> tuple[int, int]:
    """A phase as one transfer: latency in ns, and bytes of each message with those that fill a pipeline."""
    phase, steps, factor = cost.phase, cost.phase.steps, 1.0
    if phase.depth:
        chunks = phase.chunks(nbytes, cost.latency_s, cost.seconds_per_byte)
        steps = phase.depth - 1 + chunks
        factor = steps / chunks
    return int(np.ceil(steps * cost.latency_s * 1e9)), int(np.ceil(nbytes * phase.share * factor))
