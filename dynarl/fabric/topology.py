"""Devices, the links between them, and the way a message takes.

A node's devices hang on an NVSwitch by one NVLink port each, and on the network by one NIC each. Links are directed.
Numbering, for n devices: link d is device d's port into the NVSwitch, n + d out of it, 2n + d its NIC into the network,
3n + d out of it. These 4n are the devices' *ports*; links from 4n on belong to the network.

Two tiers. Each leaf has `leaf_radix` ports for NICs and `leaf_radix / oversubscription` uplinks at the rate of a NIC,
one to every spine.

- `fat_tree`: all NICs of `leaf_radix / devices_per_node` neighbouring nodes on one leaf.
- `rail_optimised`: rail r of `leaf_radix` neighbouring nodes on one leaf: devices of one rail meet without a spine.
- `single_switch`: all NICs on one switch that blocks nothing.

Routes are fixed: the spine follows from a hash of (source, destination), equal-cost multipath as switches do it, the
same on every machine. With `spray` a leaf's uplinks are one trunk over which packets spread evenly, the ideal that
adaptive routing comes near to.

>>> net = fat_tree(4, 2, nic_bytes_per_s=50e9, nvlink_bytes_per_s=450e9, leaf_radix=4)
>>> [net.link_name(link) for link in net.route(0, 1)]
['device 0 to NVSwitch', 'NVSwitch to device 1']
>>> [net.link_name(link) for link in net.route(0, 7)]
['NIC of device 0 out', 'leaf 0 to spine 3', 'spine 3 to leaf 1', 'NIC of device 7 in']
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# Through an NVSwitch, hence over two links, a message takes about 1 us; a network link with its switch is given 1 us in
# published simulations (MixNet). Software comes on top: give the builders what was measured.
NVLINK_LATENCY_S, NETWORK_LATENCY_S = 0.5e-6, 1e-6
# Padding in tables of routes. As an index it names the entry after the last link.
NO_LINK = -1
PORT_NAMES = ("device {} to NVSwitch", "NVSwitch to device {}", "NIC of device {} out", "NIC of device {} in")


@dataclass(frozen=True, eq=False)
class Topology:
    """Links by number, and routes over them.

    `between(src, dst)` gives the network's links from NIC to NIC, for arrays of devices: integers [pairs, hops], padded
    with NO_LINK. `sender(src, dst)` gives the device of the source's node whose NIC sends; without it, the source.
    """

    num_devices: int
    devices_per_node: int
    capacity_bytes_per_s: np.ndarray
    latency_s: np.ndarray
    between: Callable[[np.ndarray, np.ndarray], np.ndarray]
    network_names: tuple[str, ...]
    sender: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None

    @property
    def num_links(self) -> int:
        return len(self.capacity_bytes_per_s)

    @property
    def num_ports(self) -> int:
        """Links 0 .. num_ports - 1 are the devices' own."""
        return 4 * self.num_devices

    def link_name(self, link: int) -> str:
        if link >= self.num_ports:
            return self.network_names[link - self.num_ports]
        kind, device = divmod(link, self.num_devices)
        return PORT_NAMES[kind].format(device)

    def routes(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Links of each pair, in order: integers [pairs, hops] padded with NO_LINK; none from a device to itself."""
        src, dst = np.broadcast_arrays(np.atleast_1d(src), np.atleast_1d(dst))
        for devices in (src, dst):
            wrong = devices[(devices < 0) | (devices >= self.num_devices)]
            if len(wrong):
                raise ValueError(f"device {wrong[0]}: the topology has devices 0 to {self.num_devices - 1}")
        n, local = self.num_devices, src // self.devices_per_node == dst // self.devices_per_node
        columns = []
        sender = src
        if self.sender is not None:
            sender = np.where(local, src, self.sender(src, dst))
            relayed = sender != src
            columns += [np.where(relayed, src, NO_LINK), np.where(relayed, n + sender, NO_LINK)]
        columns.append(np.where(local, src, 2 * n + sender))
        columns += list(np.where(local, NO_LINK, self.between(sender, dst).T))
        columns.append(np.where(local, n, 3 * n) + dst)
        table = np.stack(columns, axis=1)
        table[src == dst] = NO_LINK
        return table

    def route(self, src: int, dst: int) -> tuple[int, ...]:
        """The links from one device to another."""
        return tuple(int(link) for link in self.routes(np.array([src]), np.array([dst]))[0] if link != NO_LINK)

    def latencies_s(self, routes: np.ndarray) -> np.ndarray:
        """Seconds that a byte is under way, by route."""
        return np.append(self.latency_s, 0.0)[routes].sum(axis=1)

    def narrowest_bytes_per_s(self, routes: np.ndarray) -> np.ndarray:
        """Rate of a message that is alone, by route; infinite where there is no link."""
        return np.append(self.capacity_bytes_per_s, np.inf)[routes].min(axis=1)


def fat_tree(
    num_nodes: int,
    devices_per_node: int,
    nic_bytes_per_s: float,
    nvlink_bytes_per_s: float,
    leaf_radix: int,
    oversubscription: float = 1.0,
    *,
    spray: bool = False,
    nvlink_latency_s: float = NVLINK_LATENCY_S,
    network_latency_s: float = NETWORK_LATENCY_S,
) -> Topology:
    """Neighbouring nodes share a leaf. `leaf_radix` counts NICs. Raises ValueError on what cannot be built."""
    positive(num_nodes=num_nodes, devices_per_node=devices_per_node, leaf_radix=leaf_radix)
    whole(leaf_radix, devices_per_node, "leaf_radix", "devices_per_node", "nodes on a leaf")
    leaf = np.arange(num_nodes * devices_per_node) // leaf_radix
    rates = (nic_bytes_per_s, nvlink_bytes_per_s, nvlink_latency_s, network_latency_s)
    return _two_tiers(leaf, devices_per_node, *rates, leaf_radix, oversubscription, spray)


def rail_optimised(
    num_nodes: int,
    devices_per_node: int,
    nic_bytes_per_s: float,
    nvlink_bytes_per_s: float,
    leaf_radix: int,
    oversubscription: float = 1.0,
    *,
    relay: bool = False,
    spray: bool = False,
    nvlink_latency_s: float = NVLINK_LATENCY_S,
    network_latency_s: float = NETWORK_LATENCY_S,
) -> Topology:
    """Devices of one rail (place in their node) share a leaf, `leaf_radix` nodes at a time.

    With `relay` a message to another rail goes over NVLink to the neighbour on that rail, whose NIC sends it (NCCL's
    PXN); without, it crosses a spine. Raises ValueError on what cannot be built.
    """
    positive(num_nodes=num_nodes, devices_per_node=devices_per_node, leaf_radix=leaf_radix)
    node, rail = np.divmod(np.arange(num_nodes * devices_per_node), devices_per_node)
    leaf = node // leaf_radix * devices_per_node + rail
    rates = (nic_bytes_per_s, nvlink_bytes_per_s, nvlink_latency_s, network_latency_s)
    sender = None
    if relay:

        def sender(src: np.ndarray, dst: np.ndarray) -> np.ndarray:
            return src // devices_per_node * devices_per_node + dst % devices_per_node

    return _two_tiers(leaf, devices_per_node, *rates, leaf_radix, oversubscription, spray, sender)


def single_switch(
    num_nodes: int,
    devices_per_node: int,
    nic_bytes_per_s: float,
    nvlink_bytes_per_s: float,
    *,
    nvlink_latency_s: float = NVLINK_LATENCY_S,
    network_latency_s: float = NETWORK_LATENCY_S,
) -> Topology:
    """All NICs on one switch: messages share nothing but the devices' ports."""
    positive(num_nodes=num_nodes, devices_per_node=devices_per_node)
    n = num_nodes * devices_per_node
    rates = (nic_bytes_per_s, nvlink_bytes_per_s, nvlink_latency_s, network_latency_s)
    return _two_tiers(np.zeros(n, dtype=np.int64), devices_per_node, *rates, n, 1.0, spray=True)


def positive(**numbers: float) -> None:
    """Raises ValueError at the first number that is not finite and above zero, by its name."""
    for name, value in numbers.items():
        if not 0 < value < np.inf:
            raise ValueError(f"{name} is {value}: it must be above 0 and finite")


def not_negative(**numbers: float) -> None:
    """Raises ValueError at the first number that is not finite and 0 or more, by its name."""
    for name, value in numbers.items():
        if not 0 <= value < np.inf:
            raise ValueError(f"{name} is {value}: it must be 0 or more, and finite")


def whole(dividend: float, divisor: float, dividend_name: str, divisor_name: str, what: str) -> int:
    """The quotient. Raises ValueError with the arithmetic where it is not a whole number above zero."""
    quotient = dividend / divisor
    if quotient < 1 or quotient != int(quotient):
        raise ValueError(
            f"{dividend_name} {dividend:g} / {divisor_name} {divisor:g} = {quotient:g} {what}: give a whole number"
        )
    return int(quotient)


def ports(
    num_devices: int, nic_bytes_per_s: float, nvlink_bytes_per_s: float, nvlink_latency_s: float, nic_latency_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """Capacity and latency of the devices' own links, 4 for each device. Raises ValueError where one is impossible."""
    positive(nic_bytes_per_s=nic_bytes_per_s, nvlink_bytes_per_s=nvlink_bytes_per_s)
    not_negative(nvlink_latency_s=nvlink_latency_s, network_latency_s=nic_latency_s)
    each = 2 * num_devices
    return (
        np.repeat([nvlink_bytes_per_s, nic_bytes_per_s], each).astype(float),
        np.repeat([nvlink_latency_s, nic_latency_s], each).astype(float),
    )


def mix(src: np.ndarray, dst: np.ndarray) -> np.ndarray:
    """A hash of each pair, unsigned 64 bits: the finalizer of splitmix64, which spreads neighbouring pairs well."""
    x = (src.astype(np.uint64) << np.uint64(32)) + dst.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _two_tiers(
    leaf: np.ndarray,
    devices_per_node: int,
    nic_bytes_per_s: float,
    nvlink_bytes_per_s: float,
    nvlink_latency_s: float,
    network_latency_s: float,
    leaf_radix: int,
    oversubscription: float,
    spray: bool,
    sender: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> Topology:
    """`leaf` by device. Links after the ports: from each leaf to each spine, then back, leaf-major."""
    positive(oversubscription=oversubscription)
    n, num_leaves = len(leaf), int(leaf.max()) + 1
    capacity, latency = ports(n, nic_bytes_per_s, nvlink_bytes_per_s, nvlink_latency_s, network_latency_s)
    if spray:
        spines, uplink = 1, nic_bytes_per_s * leaf_radix / oversubscription
    else:
        spines = whole(leaf_radix, oversubscription, "leaf_radix", "oversubscription", "uplinks of a leaf")
        uplink = nic_bytes_per_s
    up, down = 4 * n, 4 * n + num_leaves * spines

    def between(src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        spine = (mix(src, dst) % np.uint64(spines)).astype(np.int64)
        pair = np.stack([up + leaf[src] * spines + spine, down + leaf[dst] * spines + spine], axis=1)
        pair[leaf[src] == leaf[dst]] = NO_LINK
        return pair

    pairs = [(i, s) for i in range(num_leaves) for s in range(spines)]
    names = tuple(f"leaf {i} to spine {s}" for i, s in pairs) + tuple(f"spine {s} to leaf {i}" for i, s in pairs)
    return Topology(
        n,
        devices_per_node,
        np.append(capacity, np.full(len(names), uplink)),
        np.append(latency, np.full(len(names), network_latency_s)),
        between,
        names,
        sender,
    )
