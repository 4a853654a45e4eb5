"""Optical circuits: settings that can be, circuits for a demand, and changes that lose nothing."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.fabric.circuits import CircuitSwitch, is_worthwhile, least_bytes
from dynarl.fabric.flows import FlowNetwork
from dynarl.fabric.network import AnalyticNetwork, FlowLevelNetwork, Operation
from dynarl.fabric.rfabric import NO_CIRCUITS, Circuit, RFabric

MS = 10**6


def fabric(pods=4, uplinks=3, reconfiguration_s=0.010, **changed) -> RFabric:
    rates = {"circuit_bytes_per_s": 50e9, "electrical_bytes_per_s": 12.5e9, **changed}
    return RFabric(pods, 1, 1, 50e9, 450e9, uplinks, reconfiguration_s=reconfiguration_s, **rates)


def demand(pods, pairs) -> np.ndarray:
    found = np.zeros((pods, pods))
    for a, b in pairs:
        found[a, b] += 1e9
    return found


demands = st.integers(2, 7).flatmap(
    lambda pods: st.lists(st.lists(st.integers(0, 9), min_size=pods, max_size=pods), min_size=pods, max_size=pods)
)


def off_diagonal(rows) -> np.ndarray:
    need = np.array(rows, dtype=float)
    np.fill_diagonal(need, 0.0)
    return need


@settings(max_examples=150, deadline=None)
@given(demands, st.integers(1, 5))
def test_circuits_for_a_demand_can_be_set_and_leave_no_pair_idle_that_could_be_joined(rows, uplinks):
    need = off_diagonal(rows)
    optical = fabric(len(need), uplinks)
    chosen = optical.circuits_for(need)
    count = optical.count(chosen)  # raises where a pod had two on a plane
    assert not count[np.maximum(need, need.T) == 0].any()
    taken = {(plane, pod) for plane, a, b in chosen for pod in (a, b)}
    for a, b in zip(*np.nonzero(np.triu(need + need.T, 1)), strict=True):
        assert all((plane, a) in taken or (plane, b) in taken for plane in range(uplinks))


def slowest_first(optical, circuits, need) -> list[float]:
    """Times of all pairs of pods, were they alone."""
    count = optical.count(circuits)
    rate = np.where(count, count * optical.circuit_bytes_per_s, optical.electrical_bytes_per_s)
    return sorted(np.triu(np.maximum(need, need.T) / rate).ravel(), reverse=True)


@settings(max_examples=100, deadline=None)
@given(demands, st.integers(1, 4), st.integers(0, 99))
def test_circuits_change_only_where_that_makes_pairs_faster(rows, uplinks, seed):
    need = off_diagonal(rows)
    optical = fabric(len(need), uplinks)
    current = optical.circuits_for(np.random.default_rng(seed).random(need.shape) * need)
    chosen = optical.circuits_for(need, current)
    assert chosen == current or slowest_first(optical, chosen, need) < slowest_first(optical, current, need)


def test_pairs_that_stay_keep_their_planes():
    star = demand(4, [(0, 1), (0, 2), (0, 3)])
    stays = {Circuit(2, 0, 1), Circuit(0, 0, 2)}
    assert fabric().circuits_for(star, frozenset(stays)) == stays | {Circuit(1, 0, 3)}


@pytest.mark.parametrize("pods", [4, 6, 8])
def test_every_pair_of_pods_gets_a_circuit_where_uplinks_are_just_enough(pods):
    everybody = demand(pods, [(a, b) for a in range(pods) for b in range(a)])
    count = fabric(pods, uplinks=pods - 1).count(fabric(pods, uplinks=pods - 1).circuits_for(everybody))
    assert (count == 1 - np.eye(pods)).all()


def test_a_duplex_triangle_does_not_fit_on_two_planes():
    triangle = demand(3, [(0, 1), (1, 2), (2, 0)])
    assert len(fabric(3, uplinks=2).circuits_for(triangle)) == 2
    assert len(fabric(3, uplinks=3).circuits_for(triangle)) == 3


def test_the_pair_that_would_take_longest_gets_more_circuits():
    need = demand(4, [(0, 1), (0, 1), (0, 1), (2, 3)])
    count = fabric(4, uplinks=3).count(fabric(4, uplinks=3).circuits_for(need))
    assert count[0, 1] == 3 and count[2, 3] == 3
    need[0, 2] = 5e8
    count = fabric(4, uplinks=3).count(fabric(4, uplinks=3).circuits_for(need))
    assert (count[0, 1], count[0, 2], count[2, 3]) == (2, 1, 2)


@pytest.mark.parametrize(
    ("circuits", "message"),
    [
        ([(0, 0, 1), (0, 1, 2)], "pod 1 has one uplink on plane 0"),
        ([(3, 0, 1)], "planes are 0 to 2"),
        ([(0, 2, 2)], "pods 0 <= a < b < 4"),
        ([(0, 1, 4)], "pods 0 <= a < b < 4"),
    ],
)
def test_settings_that_cannot_be_are_refused(circuits, message):
    with pytest.raises(ValueError, match=message):
        fabric().topology(frozenset(Circuit(*circuit) for circuit in circuits))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"circuit_bytes_per_s": 0}, "circuit_bytes_per_s is 0"),
        ({"electrical_bytes_per_s": -1}, "electrical_bytes_per_s is -1"),
        ({"uplinks": 0}, "uplinks is 0"),
        ({"circuit_bytes_per_s": 10e9}, "circuit_bytes_per_s 1e[+]10 is not above electrical_bytes_per_s 1.25e[+]10"),
        ({"reconfiguration_s": inf}, "reconfiguration_s is inf"),
    ],
)
def test_fabrics_that_cannot_be_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        fabric(**changed)


def test_messages_take_the_circuit_and_without_one_the_core():
    optical = fabric()
    net = optical.topology(frozenset({Circuit(0, 0, 1)}))
    names = [[net.link_name(link) for link in net.route(0, dst)] for dst in (1, 2)]
    assert names[0] == ["NIC of device 0 out", "circuits of pod 0 to pod 1", "NIC of device 1 in"]
    assert names[1] == ["NIC of device 0 out", "pod 0 to core", "core to pod 2", "NIC of device 2 in"]
    times = [AnalyticNetwork(net).seconds("p2p", (0, dst), 10**9) for dst in (1, 2)]
    assert times == pytest.approx([1e9 / 50e9 + 3e-6, 1e9 / 12.5e9 + 4e-6])


def test_circuits_for_a_phase_make_it_as_fast_as_the_nics():
    optical = RFabric(4, 2, 4, 50e9, 450e9, 8, 50e9, 12.5e9, 0.01)
    phases = {
        "training": [Operation("all_reduce", range(16), 10**9)],
        "weights": [Operation("broadcast", [0, *range(16, 32)], 10**9)],
        "both": [Operation("all_reduce", range(16), 10**9), Operation("broadcast", [0, *range(16, 32)], 10**9)],
    }
    for name, operations in phases.items():
        need = optical.demand(operations)
        chosen = optical.topology(optical.circuits_for(need))
        static = optical.topology(NO_CIRCUITS)
        fast, slow = (max(FlowLevelNetwork(net).together(operations)) for net in (chosen, static))
        # Hierarchical algorithms bring four NICs to a boundary of pods, whose circuits carry them.
        assert fast < 0.5 * slow, name
    assert optical.demand(phases["training"])[2:].sum() == 0


def test_weights_and_training_share_uplinks_where_they_run_at_once():
    optical = fabric(4, uplinks=1)
    training, weights = Operation("p2p", (0, 1), 10**9), Operation("p2p", (0, 2), 10**9)
    chosen = optical.circuits_for(optical.demand([training, weights]))
    assert optical.count(chosen)[0].sum() == 1
    times = FlowLevelNetwork(optical.topology(chosen)).together([training, weights])
    assert max(times) == pytest.approx(1e9 / 12.5e9, rel=1e-3)


def test_bytes_from_which_a_change_pays():
    assert [round(least_bytes(t, 0, 12.5e9, 50e9) / 1e9, 2) for t in (0.010, 0.015, 0.030, 0.0468)] == [
        0.17,
        0.25,
        0.50,
        0.78,
    ]
    assert least_bytes(0.01, 0.01, 12.5e9, 50e9) == 0 and least_bytes(0.01, 1.0, 50e9, 50e9) == inf
    # A window that hides the change, one that is too uncertain to count on, no window at all, no end to the change.
    assert is_worthwhile(1, 0.010, 0.012, 0.001, 12.5e9, 50e9)
    assert not is_worthwhile(1, 0.010, 0.012, 0.002, 12.5e9, 50e9)
    assert is_worthwhile(2e8, 0.010, 0.0, 0.0, 12.5e9, 50e9) and not is_worthwhile(1e8, 0.010, 0.0, 0.0, 12.5e9, 50e9)
    assert not is_worthwhile(1e15, inf, 100.0, 0.0, 12.5e9, 50e9) and is_worthwhile(1, 0.0, 0.0, 0.0, 12.5e9, 50e9)
    assert not is_worthwhile(0, 0.0, 1.0, 0.0, 12.5e9, 50e9)


@pytest.mark.parametrize("reconfiguration_s", [0.0, 0.001, 0.010, 0.050])
def test_a_change_between_phases_pays_from_the_predicted_bytes_on(reconfiguration_s):
    """The rule against the simulation of both choices, at bytes a little above and below its bound."""
    optical = fabric(2, uplinks=1, reconfiguration_s=reconfiguration_s)
    bound = least_bytes(reconfiguration_s, 0.0, 12.5e9, 50e9)
    for nbytes in (int(0.98 * bound), int(1.02 * bound) + 10**6):
        ends_ns = []
        for change in (False, True):
            network = FlowNetwork(optical.topology(NO_CIRCUITS))
            switch, now_ns = CircuitSwitch(optical, network, NO_CIRCUITS), 0
            if change:
                switch.prepare(0, frozenset({Circuit(0, 0, 1)}))
                now_ns = switch.program(0)
                switch.activate(now_ns)
            network.start(now_ns, 0, 1, nbytes)
            ends_ns.append(network.next_completion()[0])
        worthwhile = is_worthwhile(nbytes, reconfiguration_s, 0.0, 0.0, 12.5e9, 50e9)
        assert worthwhile == (ends_ns[1] < ends_ns[0])


OLD, NEW = frozenset({Circuit(0, 0, 1), Circuit(1, 2, 3)}), frozenset({Circuit(0, 0, 2), Circuit(1, 2, 3)})


def change_under_way():
    """A message on the circuit that goes, one on the one that stays, of 1 ms each were they alone; then prepared."""
    optical = fabric()
    network = FlowNetwork(optical.topology(OLD))
    going, staying = network.start(0, 0, 1, 50 * MS, "going"), network.start(0, 2, 3, 5000 * MS, "staying")
    switch = CircuitSwitch(optical, network, OLD)
    switch.prepare(MS // 2, NEW)
    return network, switch, going, staying


def test_a_change_waits_for_messages_and_touches_only_what_changes():
    network, switch, going, staying = change_under_way()
    late = network.start(MS // 2, 0, 1, 125 * MS // 10, "late")  # the core, at 12.5 GB/s: 1 ms more
    assert switch.waits_for() == {going: "going"}
    with pytest.raises(ValueError, match="'going'.* are on circuits that go"):
        switch.program(MS // 2)
    ended_ns, transfer = network.next_completion()
    assert transfer == going and ended_ns < 1.3 * MS
    network.advance(ended_ns)
    network.finish(going)
    ready_ns = switch.program(ended_ns)
    assert ready_ns == ended_ns + 10 * MS and switch.epoch == 0
    assert "core" in network.topology.link_name(network.topology.route(0, 2)[1])
    ended_ns, transfer = network.next_completion()
    assert transfer == late and ended_ns < ready_ns
    network.advance(ended_ns)
    network.finish(late)
    with pytest.raises(ValueError, match=f"ready at {ready_ns} ns"):
        switch.activate(ready_ns - 1)
    switch.activate(ready_ns)
    assert switch.epoch == 1 and switch.circuits == NEW
    assert "pod 2" in network.topology.link_name(network.topology.route(0, 2)[1])
    assert "core" in network.topology.link_name(network.topology.route(0, 1)[1])
    # 5 GB at the rate of a NIC all the time.
    assert network.next_completion() == (100 * MS, staying)


def test_circuits_that_stay_carry_what_was_on_those_that_go():
    optical = fabric(circuit_bytes_per_s=25e9)
    both, one = frozenset({Circuit(0, 0, 1), Circuit(1, 0, 1)}), frozenset({Circuit(0, 0, 1)})
    network = FlowNetwork(optical.topology(both))
    switch = CircuitSwitch(optical, network, both)
    network.start(0, 0, 1, 100 * MS)  # at 50 GB/s for 1 ms, then at 25 for 2
    switch.prepare(MS, one)
    assert network.next_completion() == (3 * MS, 0) and not switch.waits_for()
    switch.program(MS)
    assert network.next_completion() == (3 * MS, 0)


def test_a_change_can_be_given_up_until_mirrors_move():
    network, switch, going, _ = change_under_way()
    with pytest.raises(ValueError, match="change of circuits is under way"):
        switch.prepare(MS // 2, NEW)
    switch.abort(MS // 2)
    assert switch.circuits == OLD and "circuits" in network.topology.link_name(network.topology.route(0, 1)[1])
    assert network.next_completion() == (MS, going)
    with pytest.raises(ValueError, match="prepare one first"):
        switch.program(MS // 2)
    network.advance(MS)
    network.finish(going)
    switch.prepare(MS, NEW)
    switch.program(MS)
    with pytest.raises(ValueError, match="mirrors have moved"):
        switch.abort(MS)


def test_a_circuit_that_does_not_lock_leaves_its_pods_the_core():
    optical = fabric()
    network = FlowNetwork(optical.topology(NO_CIRCUITS))
    switch = CircuitSwitch(optical, network, NO_CIRCUITS)
    switch.prepare(0, NEW)
    switch.activate(switch.program(0), failed=frozenset({Circuit(0, 0, 2)}))
    assert switch.circuits == frozenset({Circuit(1, 2, 3)})
    assert "core" in network.topology.link_name(network.topology.route(0, 2)[1])


def test_where_nothing_changes_nothing_waits():
    optical = fabric()
    switch = CircuitSwitch(optical, FlowNetwork(optical.topology(OLD)), OLD)
    switch.prepare(5, OLD)
    assert switch.program(5) == 5
