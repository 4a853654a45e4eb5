"""Collectives at both levels: closed forms, the bound that sharing cannot beat, what topology does to it."""

from __future__ import annotations

from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.fabric import collectives
from dynarl.fabric.collectives import OPERATIONS, algorithms, tree_parents
from dynarl.fabric.network import AnalyticNetwork, FlowLevelNetwork, Operation
from dynarl.fabric.topology import fat_tree, rail_optimised, single_switch

NIC, NVLINK, ALPHA = 50e9, 450e9, 2e-6  # a path over one switch: two links of 1 us
LEVELS = [AnalyticNetwork, FlowLevelNetwork]
FLAT = single_switch(64, 1, NIC, NVLINK)
TOPOLOGIES = [
    single_switch(4, 4, NIC, NVLINK),
    fat_tree(4, 4, NIC, NVLINK, leaf_radix=4),
    fat_tree(4, 4, NIC, NVLINK, leaf_radix=8, oversubscription=4),
    fat_tree(4, 4, NIC, NVLINK, leaf_radix=4, oversubscription=3, spray=True),
    rail_optimised(4, 4, NIC, NVLINK, leaf_radix=2),
    rail_optimised(4, 4, NIC, NVLINK, leaf_radix=2, relay=True, oversubscription=2),
]


def by_algorithm(network, op, group, nbytes):
    return {cost.algorithm: cost.seconds for cost in network.costs(op, group, nbytes)}


def pipeline(depth, nbytes, most_chunks):
    return min((depth - 1 + c) * (ALPHA + nbytes / c / NIC) for c in range(1, max(1, most_chunks) + 1))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("n", [2, 3, 5, 8, 13, 64])
@pytest.mark.parametrize("nbytes", [1000, 10**6, 10**8])
def test_closed_forms_hold_exactly_where_only_ports_are_shared(level, n, nbytes):
    network, group = level(FLAT), range(n)
    once = (n - 1) * ALPHA + (n - 1) / n * nbytes / NIC
    expected = {
        "all_reduce": {"ring": 2 * once},
        "all_gather": {"ring": once},
        "reduce_scatter": {"ring": once},
        "all_to_all": {"direct": once},
        "broadcast": {"chain": pipeline(n - 1, nbytes, nbytes // 65536)},
    }
    for op, forms in expected.items():
        found = by_algorithm(network, op, group, nbytes)
        for name, seconds in forms.items():
            assert found[name] == pytest.approx(seconds, rel=1e-12), (op, name)
    assert network.seconds("p2p", (0, n - 1), nbytes) == pytest.approx(ALPHA + nbytes / NIC, rel=1e-12)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("n", [3, 4, 7, 8, 33, 64])
@pytest.mark.parametrize("nbytes", [1000, 10**6, 3 * 10**7])
def test_trees_are_pipelines_as_deep_as_the_logarithm(level, n, nbytes):
    # Each of the two trees carries half the message.
    once = pipeline(ceil(log2(n)), nbytes, nbytes // 2 // 65536)
    network = level(FLAT)
    assert by_algorithm(network, "broadcast", range(n), nbytes)["tree"] == pytest.approx(once, rel=1e-12)
    assert by_algorithm(network, "all_reduce", range(n), nbytes)["tree"] == pytest.approx(2 * once, rel=1e-12)


@pytest.mark.parametrize("level", LEVELS)
def test_a_hierarchy_is_the_sum_of_its_levels(level):
    m, g, nbytes = 4, 8, 10**8
    network = level(single_switch(m, g, NIC, NVLINK))
    within = (g - 1) * 1e-6 + (g - 1) / g * nbytes / NVLINK
    along = (m - 1) * ALPHA + (m - 1) / m * nbytes / g / NIC
    assert network.cost("all_reduce", range(32), nbytes).algorithm == "hierarchical"
    assert network.seconds("all_reduce", range(32), nbytes) == pytest.approx(2 * within + 2 * along, rel=1e-12)
    assert network.seconds("all_gather", range(32), nbytes) == pytest.approx(within + along, rel=1e-12)
    # A NIC carries what goes to other nodes, an NVLink port the rest: one after the other, or at once.
    away = (m - 1) / m * nbytes / NIC
    found = by_algorithm(network, "all_to_all", range(32), nbytes)
    assert found["hierarchical"] == pytest.approx(within + (m - 1) * ALPHA + away, rel=1e-12)
    assert found["direct"] == pytest.approx(31 * ALPHA + away, rel=1e-12)


@pytest.mark.parametrize("level", LEVELS)
def test_a_group_too_large_to_send_all_at_once_goes_in_shifts(level, monkeypatch):
    direct = by_algorithm(level(FLAT), "all_to_all", range(12), 10**8)["direct"]
    monkeypatch.setattr(collectives, "MOST_MESSAGES", 12 * 11 - 1)
    assert by_algorithm(level(FLAT), "all_to_all", range(12), 10**8) == {"pairwise": pytest.approx(direct, rel=1e-12)}


def test_small_messages_take_the_tree_and_large_ones_the_ring():
    network = AnalyticNetwork(FLAT)
    assert network.cost("all_reduce", range(64), 10**3).algorithm == "tree"
    assert network.cost("all_reduce", range(64), 10**10).algorithm == "ring"


@pytest.mark.parametrize("n", range(2, 70))
def test_both_trees_reach_everybody_and_no_port_carries_more_than_the_message(n):
    depth = np.zeros(n, dtype=int)
    for child in sorted(range(1, n), key=lambda c: -(c & -c)):
        depth[child] = depth[tree_parents(n)[child - 1]] + 1
    assert depth.max() == ceil(log2(n))
    (down,) = algorithms(single_switch(n, 1, NIC, NVLINK), "broadcast", range(n))["tree"]
    sent, received = np.bincount(down.src, minlength=n) * down.share, np.bincount(down.dst, minlength=n) * down.share
    assert (received == [0.0] + [1.0] * (n - 1)).all() and sent.max() <= 1.0


groups = st.lists(st.integers(0, 15), min_size=1, max_size=16, unique=True)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(TOPOLOGIES), st.sampled_from(sorted(OPERATIONS)), groups, st.integers(0, 10**9))
def test_flow_level_is_never_faster_than_analytic(topology, op, group, nbytes):
    if op == "p2p":
        group = [group[0], (group[0] + 1 + len(group)) % 16]
        if group[0] == group[1]:
            return
    analytic, flows = (by_algorithm(level(topology), op, group, max(nbytes, 1)) for level in LEVELS)
    assert analytic.keys() == flows.keys()
    assert all(flows[name] >= analytic[name] * (1 - 1e-9) for name in flows)
    low, high = (level(topology).seconds(op, group, nbytes) for level in LEVELS)
    assert high >= low * (1 - 1e-9)


operations = st.builds(
    Operation, st.sampled_from(["all_reduce", "all_gather", "all_to_all", "broadcast"]), groups, st.integers(0, 10**8)
)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(TOPOLOGIES), st.lists(operations, min_size=1, max_size=4))
def test_operations_together_are_never_faster_than_analytic(topology, workload):
    low, high = (level(topology).together(workload) for level in LEVELS)
    assert (np.array(high) >= np.array(low) * (1 - 1e-9)).all()


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(TOPOLOGIES), operations)
def test_an_operation_alone_takes_as_long_by_events_as_by_formula(topology, operation):
    network = FlowLevelNetwork(topology)
    seconds = network.seconds(operation.op, operation.group, operation.nbytes)
    assert network.together([operation])[0] == pytest.approx(seconds, rel=1e-6, abs=100e-9)


def test_two_operations_on_the_same_links_take_twice_as_long_and_apart_as_long_as_alone():
    network, nbytes = FlowLevelNetwork(FLAT), 10**9
    alone = network.seconds("all_reduce", range(8), nbytes)
    same = [Operation("all_reduce", range(8), nbytes)] * 2
    apart = [Operation("all_reduce", range(8), nbytes), Operation("all_reduce", range(8, 16), nbytes)]
    assert network.together(same) == pytest.approx([2 * alone] * 2, rel=1e-3)
    assert network.together(apart) == pytest.approx([alone] * 2, rel=1e-6)


def test_an_oversubscribed_core_costs_its_ratio_where_everything_crosses_it():
    pairs = [Operation("p2p", (i, i + 32), 10**9) for i in range(32)]
    times = {
        ratio: max(FlowLevelNetwork(fat_tree(8, 8, NIC, NVLINK, 32, ratio, spray=True)).together(pairs))
        for ratio in (1, 2, 4)
    }
    assert times[2] == pytest.approx(2 * times[1], rel=1e-3) and times[4] == pytest.approx(4 * times[1], rel=1e-3)


def test_a_rail_optimised_network_is_best_for_groups_along_rails():
    rail = rail_optimised(16, 8, NIC, NVLINK, leaf_radix=16)
    tree = fat_tree(16, 8, NIC, NVLINK, leaf_radix=16)
    along_rails = [Operation("all_reduce", range(r, 128, 8), 10**9) for r in range(8)]
    fast, slow = (max(FlowLevelNetwork(net).together(along_rails)) for net in (rail, tree))
    assert fast < 0.8 * slow
    assert fast == pytest.approx(max(AnalyticNetwork(rail).together(along_rails)), rel=1e-6)
    # A single rail has the tree to itself: only the ways are longer.
    assert AnalyticNetwork(rail).seconds("all_reduce", range(0, 128, 8), 1) < AnalyticNetwork(tree).seconds(
        "all_reduce", range(0, 128, 8), 1
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("op", [op for op in OPERATIONS if op != "p2p"])
def test_one_device_and_no_bytes_take_no_time(level, op):
    network = level(TOPOLOGIES[1])
    assert network.cost(op, [3], 10**9).seconds == 0.0 == network.cost(op, range(16), 0).seconds
    assert network.together([Operation(op, [3], 10**9), Operation(op, range(16), 0)]) == [0.0, 0.0]


@pytest.mark.parametrize("op", [op for op in OPERATIONS if op != "p2p"])
@pytest.mark.parametrize("group", [range(16), [1, 5, 6, 15], [0, 1, 2, 3, 4, 5, 6]])
def test_costs_do_not_depend_on_the_order_of_a_group_and_grow_with_bytes(op, group):
    for level in LEVELS:
        network = level(TOPOLOGIES[2])
        assert network.cost(op, group, 10**7) == network.cost(op, [group[0], *reversed(group[1:])], 10**7)
        times = [network.seconds(op, group, 10**k) for k in range(10)]
        assert times == sorted(times)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("gossip", [0, 1], 1), "'gossip' is no collective: one of all_reduce"),
        (("all_reduce", [], 1), "at least one device"),
        (("all_reduce", [1, 1], 1), "each of at least one device once"),
        (("all_reduce", [1, 99], 1), "device 99"),
        (("p2p", [1, 2, 3], 1), "the sender and the receiver"),
        (("broadcast", [1, 2], -1), "-1 bytes"),
    ],
)
@pytest.mark.parametrize("level", LEVELS)
def test_calls_that_make_no_sense_are_refused(level, call, message):
    with pytest.raises(ValueError, match=message):
        level(TOPOLOGIES[0]).seconds(*call)
