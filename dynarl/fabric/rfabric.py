"""A fabric whose links between pods are optical circuits, set for each phase of the work (OrchestrRL's RFabric).

    NICs of a pod -- electrical switch of the pod --+-- optical uplinks 0 .. u - 1 -- circuits to other pods
                                                    +-- electrical core, narrow and always there

Uplink p of every pod ends at optical switch p, a *plane*, which joins its ports in pairs: a circuit (p, a, b) carries
`circuit_bytes_per_s` from pod a to b and from b to a, and is the only one of either pod on its plane. Messages
between two pods spread over all circuits between them; without one they take the electrical core, so no setting cuts
pods off. Circuits begin above the pod's switch: changing them does not drop a NIC's link.

Which circuits: `demand` adds up what the operations of a phase send between pods, `circuits_for` gives one circuit
after the other to the pair of pods that would take longest. The module `circuits` says when a change is worth its time,
and carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dynarl.fabric.network import AnalyticNetwork, Operation
from dynarl.fabric.topology import NETWORK_LATENCY_S, NO_LINK, NVLINK_LATENCY_S, Topology, not_negative, ports, positive


class Circuit(NamedTuple):
    """Uplink `plane` of pods `a` < `b`, joined in both directions."""

    plane: int
    a: int
    b: int


Circuits = frozenset[Circuit]
NO_CIRCUITS: Circuits = frozenset()


@dataclass(frozen=True)
class RFabric:
    """Pods and their uplinks. `electrical_bytes_per_s` is a pod's link to the electrical core, in each direction;
    `reconfiguration_s` is all of a change but draining: control, mirrors, relock, routes.

    Raises ValueError where a number is impossible.
    """

    num_pods: int
    nodes_per_pod: int
    devices_per_node: int
    nic_bytes_per_s: float
    nvlink_bytes_per_s: float
    uplinks: int
    circuit_bytes_per_s: float
    electrical_bytes_per_s: float
    reconfiguration_s: float
    nvlink_latency_s: float = NVLINK_LATENCY_S
    network_latency_s: float = NETWORK_LATENCY_S

    def __post_init__(self) -> None:
        counts = ("num_pods", "nodes_per_pod", "devices_per_node", "uplinks")
        rates = ("nic_bytes_per_s", "nvlink_bytes_per_s", "circuit_bytes_per_s", "electrical_bytes_per_s")
        positive(**{name: getattr(self, name) for name in counts + rates})
        times = ("reconfiguration_s", "nvlink_latency_s", "network_latency_s")
        not_negative(**{name: getattr(self, name) for name in times})
        if self.circuit_bytes_per_s <= self.electrical_bytes_per_s:
            raise ValueError(
                f"circuit_bytes_per_s {self.circuit_bytes_per_s:g} is not above electrical_bytes_per_s "
                f"{self.electrical_bytes_per_s:g}: pods would be better off without circuits"
            )

    @property
    def num_devices(self) -> int:
        return self.num_pods * self.nodes_per_pod * self.devices_per_node

    def topology(self, circuits: Circuits) -> Topology:
        """The fabric with these circuits. Links have the same numbers with any.

        Raises ValueError where a pod would have two circuits on a plane, or there is no such uplink or pod.
        """
        count = self.count(circuits)
        return self._topology(routed=count, lit=count)

    def draining(self, circuits: Circuits, kept: Circuits) -> Topology:
        """Nothing new takes circuits that are not kept. Between pods that lose all of theirs they stay lit, so that
        messages on them end; between others the kept ones take over."""
        kept_count = self.count(kept)
        return self._topology(routed=kept_count, lit=np.where(kept_count, kept_count, self.count(circuits)))

    def links(self, circuits: Circuits) -> set[int]:
        """Links that run over the circuits, in both directions."""
        first, p = 4 * self.num_devices, self.num_pods
        return {first + x * p + y for _, a, b in circuits for x, y in ((a, b), (b, a))}

    def count(self, circuits: Circuits) -> np.ndarray:
        """Circuits between pods: integers [pods, pods], symmetric. Raises ValueError on a setting that cannot be."""
        count, taken = np.zeros((self.num_pods, self.num_pods), dtype=np.int64), {}
        for circuit in sorted(circuits):
            plane, a, b = circuit
            if not (0 <= plane < self.uplinks and 0 <= a < b < self.num_pods):
                raise ValueError(f"{circuit}: planes are 0 to {self.uplinks - 1}, pods 0 <= a < b < {self.num_pods}")
            for pod in (a, b):
                other = taken.setdefault((plane, pod), circuit)
                if other is not circuit:
                    raise ValueError(f"{circuit} and {other}: pod {pod} has one uplink on plane {plane}")
            count[a, b] += 1
            count[b, a] += 1
        return count

    def demand(self, operations: Iterable[Operation]) -> np.ndarray:
        """Bytes from pod to pod [pods, pods] of operations by the algorithms that are fastest without contention, were
        there a circuit between any two pods."""
        size, bytes_ = self.nodes_per_pod * self.devices_per_node, np.zeros((self.num_pods, self.num_pods))
        joined = np.ones_like(bytes_, dtype=np.int64)
        network = AnalyticNetwork(self._topology(routed=joined, lit=joined))
        for operation in operations:
            for cost in network.cost(operation.op, operation.group, operation.nbytes).phases:
                phase = cost.phase
                np.add.at(bytes_, (phase.src // size, phase.dst // size), phase.share * operation.nbytes)
        np.fill_diagonal(bytes_, 0.0)
        return bytes_

    def circuits_for(self, demand: np.ndarray, current: Circuits = NO_CIRCUITS) -> Circuits:
        """Circuits for bytes [pods, pods] between pods, one after the other to the pair that would take longest, while
        it has a plane free: MixNet's greedy choice, on the larger of both directions.

        A pair keeps the planes that it has in `current` where it can choose; all of `current` stays where the times of
        the pairs, slowest first, would not get better.
        """
        need = np.triu(np.maximum(demand, demand.T), 1).astype(float)
        setting = _Setting(self.uplinks, self.num_pods, current)
        open_, count = need.copy(), np.zeros_like(need)
        while True:
            a, b = (int(pod) for pod in np.unravel_index(np.argmax(open_ / self._rate(count)), need.shape))
            if not open_[a, b]:
                break
            if setting.join(a, b):
                count[a, b] += 1
            elif setting.make_room(a, b):
                # Also for pairs that had none, maybe; one of them joins next, so this comes to an end.
                open_ = need.copy()
            else:
                open_[a, b] = 0.0
        before, after = (np.sort(-need / self._rate(n), axis=None).tolist() for n in (self.count(current), count))
        return current if before >= after else setting.circuits()

    def _rate(self, count: np.ndarray) -> np.ndarray:
        """Bytes/s between pods with so many circuits; without one, all of a pod's link to the core."""
        return np.where(count, count * self.circuit_bytes_per_s, self.electrical_bytes_per_s)

    def _topology(self, routed: np.ndarray, lit: np.ndarray) -> Topology:
        """Circuits that new messages take, and those that carry light. Links after the ports: pod to pod, pod-major;
        pods to the electrical core; the core to pods."""
        n, p, size = self.num_devices, self.num_pods, self.nodes_per_pod * self.devices_per_node
        capacity, latency = ports(
            n, self.nic_bytes_per_s, self.nvlink_bytes_per_s, self.nvlink_latency_s, self.network_latency_s
        )
        core = 4 * n + p * p

        def between(src: np.ndarray, dst: np.ndarray) -> np.ndarray:
            a, b = src // size, dst // size
            optical, away = routed[a, b] > 0, a != b
            first = np.where(optical, 4 * n + a * p + b, core + a)
            second = np.where(optical, NO_LINK, core + p + b)
            return np.where(away, [first, second], NO_LINK).T

        pods = range(p)
        names = tuple(f"circuits of pod {a} to pod {b}" for a in pods for b in pods)
        names += tuple(f"pod {a} to core" for a in pods) + tuple(f"core to pod {a}" for a in pods)
        electrical = np.full(2 * p, self.electrical_bytes_per_s)
        return Topology(
            n,
            self.devices_per_node,
            np.concatenate([capacity, lit.ravel() * self.circuit_bytes_per_s, electrical]),
            np.append(latency, np.full(len(names), self.network_latency_s)),
            between,
            names,
        )


class _Setting:
    """Who is joined to whom on each plane, while circuits are added: partner [planes, pods], -1 for none."""

    def __init__(self, planes: int, pods: int, current: Circuits) -> None:
        self._partner = np.full((planes, pods), -1)
        self._current = np.full((planes, pods), -1)
        for plane, a, b in current:
            self._current[plane, [a, b]] = b, a

    def circuits(self) -> Circuits:
        return frozenset(
            Circuit(int(plane), int(a), int(self._partner[plane, a]))
            for plane, a in np.argwhere(self._partner >= 0)
            if a < self._partner[plane, a]
        )

    def join(self, a: int, b: int) -> bool:
        """One more circuit between two pods, if there is a plane that both have free."""
        both = np.nonzero((self._partner[:, a] < 0) & (self._partner[:, b] < 0))[0].tolist()

        def rank(plane: int) -> tuple[int, int]:
            """The pair's plane now, then one that neither uses now, then any."""
            now_a, now_b = self._current[plane, [a, b]].tolist()
            return (0 if now_a == b else 1 if now_a < 0 and now_b < 0 else 2, plane)

        if both:
            self._partner[min(both, key=rank), [a, b]] = b, a
        return bool(both)

    def make_room(self, a: int, b: int) -> bool:
        """Other circuits trade planes so that two pods, each with a plane free, have the same one free, if any can."""
        for x in np.nonzero(self._partner[:, a] < 0)[0].tolist():
            for y in np.nonzero(self._partner[:, b] < 0)[0].tolist():
                path = self._alternating(b, x, y)
                if path[-1] != a:
                    # Circuits of x along the path go to y and those of y to x: b has x free then, and a keeps it.
                    self._partner[[[x], [y]], path] = self._partner[[[y], [x]], path]
                    return True
        return False

    def _alternating(self, pod: int, x: int, y: int) -> list[int]:
        """Pods along circuits of planes x, y, x, ... from a pod that has y free. Planes are matchings: it is a path."""
        path, plane = [pod], x
        while self._partner[plane, path[-1]] >= 0:
            path.append(int(self._partner[plane, path[-1]]))
            plane = x + y - plane
        return path
