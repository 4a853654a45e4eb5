"""Topologies: every route is a path, what cannot be built is refused with its arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.fabric.topology import NO_LINK, fat_tree, rail_optimised, single_switch

NIC, NVLINK = 50e9, 450e9


def ends(name: str) -> tuple[str, str]:
    """Where a link begins and ends, from its name."""
    match name.split():
        case ["device", d, "to", "NVSwitch"]:
            return f"device {d}", "NVSwitch"
        case ["NVSwitch", "to", "device", d]:
            return "NVSwitch", f"device {d}"
        case ["NIC", "of", "device", d, "out"]:
            return f"device {d}", "leaf"
        case ["NIC", "of", "device", d, "in"]:
            return "leaf", f"device {d}"
        case ["leaf", _, "to", "spine", s]:
            return "leaf", f"spine {s}"
        case ["spine", s, "to", "leaf", _]:
            return f"spine {s}", "leaf"
    raise AssertionError(name)


@st.composite
def topologies(draw):
    nodes, devices = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 4]))
    kind = draw(st.sampled_from(["fat_tree", "rail", "relay", "switch"]))
    if kind == "switch":
        return single_switch(nodes, devices, NIC, NVLINK)
    spray, leaf_nodes = draw(st.booleans()), draw(st.sampled_from([1, 2, 4]))
    if kind == "fat_tree":
        return fat_tree(nodes, devices, NIC, NVLINK, devices * leaf_nodes, spray=spray)
    return rail_optimised(nodes, devices, NIC, NVLINK, leaf_nodes, relay=kind == "relay", spray=spray)


@settings(deadline=None)
@given(topologies(), st.data())
def test_a_route_leads_from_source_to_destination(topology, data):
    src, dst = (data.draw(st.integers(0, topology.num_devices - 1)) for _ in range(2))
    links = topology.route(src, dst)
    hops = [ends(topology.link_name(link)) for link in links]
    assert [f"device {src}", *(end for _, end in hops)] == [*(begin for begin, _ in hops), f"device {dst}"]
    assert len(set(links)) == len(links) and max(links, default=0) < topology.num_links
    if src // topology.devices_per_node == dst // topology.devices_per_node:
        assert len(links) in (0, 2) and "NIC" not in str([topology.link_name(link) for link in links])


@settings(deadline=None)
@given(topologies())
def test_routes_of_many_pairs_are_those_of_each(topology):
    src, dst = np.divmod(np.arange(topology.num_devices**2), topology.num_devices)
    table = topology.routes(src, dst)
    for row in range(0, len(src), 7):
        assert tuple(table[row][table[row] != NO_LINK]) == topology.route(int(src[row]), int(dst[row]))


def test_a_rail_needs_no_spine_and_another_rail_does_unless_a_neighbour_relays():
    names = {}
    for relay in (False, True):
        net = rail_optimised(4, 8, NIC, NVLINK, leaf_radix=4, relay=relay)
        assert len(net.route(3, 3 + 16)) == 2
        names[relay] = [net.link_name(link) for link in net.route(3, 5 + 16)]
    assert len(names[False]) == 4 and "spine" in names[False][1]
    assert names[True] == ["device 3 to NVSwitch", "NVSwitch to device 5", "NIC of device 5 out", "NIC of device 21 in"]


def test_spines_are_chosen_by_pair_and_spread_evenly():
    net = fat_tree(64, 8, NIC, NVLINK, leaf_radix=64)
    src = np.repeat(np.arange(64), 448)
    dst = np.tile(np.arange(64, 512), 64)
    spine = (net.routes(src, dst)[:, 1] - net.num_ports) % 64
    assert (net.routes(src, dst) == net.routes(src, dst)).all()
    load = np.bincount(spine, minlength=64)
    # 448 on average: binomial, so five standard deviations are 105.
    assert abs(load - 448).max() < 105


def test_uplinks_follow_from_radix_and_oversubscription():
    full, half = (fat_tree(4, 4, NIC, NVLINK, 8, ratio) for ratio in (1, 2))
    assert full.num_links - full.num_ports == 2 * 2 * 8 and half.num_links - half.num_ports == 2 * 2 * 4
    trunk = fat_tree(4, 4, NIC, NVLINK, 8, 2, spray=True)
    assert trunk.capacity_bytes_per_s[trunk.num_ports :].tolist() == [4 * NIC] * 4


def test_latency_adds_up_along_the_way():
    net = fat_tree(2, 2, NIC, NVLINK, leaf_radix=2, nvlink_latency_s=1.0, network_latency_s=10.0)
    assert net.latencies_s(net.routes([0, 0, 0], [0, 1, 2])).tolist() == [0, 2, 40]
    assert net.narrowest_bytes_per_s(net.routes([0, 0, 0], [0, 1, 2])).tolist() == [np.inf, NVLINK, NIC]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 8, 0, NVLINK, 32), "nic_bytes_per_s is 0"),
        ((4, 8, NIC, -1.0, 32), "nvlink_bytes_per_s is -1"),
        ((4, 8, float("inf"), NVLINK, 32), "nic_bytes_per_s is inf"),
        ((0, 8, NIC, NVLINK, 32), "num_nodes is 0"),
        ((4, 8, NIC, NVLINK, 12), r"leaf_radix 12 / devices_per_node 8 = 1.5 nodes on a leaf"),
        ((4, 8, NIC, NVLINK, 4), r"4 / devices_per_node 8 = 0.5"),
        ((4, 8, NIC, NVLINK, 32, 3), r"leaf_radix 32 / oversubscription 3 = 10.6667 uplinks"),
        ((4, 8, NIC, NVLINK, 32, 64), r"= 0.5 uplinks"),
        ((4, 8, NIC, NVLINK, 32, 0), "oversubscription is 0"),
    ],
)
def test_what_cannot_be_built_is_told_with_the_arithmetic(arguments, message):
    with pytest.raises(ValueError, match=message):
        fat_tree(*arguments)


def test_a_device_that_is_not_there_is_named():
    net = single_switch(2, 2, NIC, NVLINK)
    with pytest.raises(ValueError, match="device 4: the topology has devices 0 to 3"):
        net.route(0, 4)
    with pytest.raises(ValueError, match="network_latency_s is -1"):
        single_switch(2, 2, NIC, NVLINK, network_latency_s=-1)
