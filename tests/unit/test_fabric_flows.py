"""Fair sharing: textbook cases, the certificate of max-min fairness, bytes that neither vanish nor appear."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.fabric import flows
from dynarl.fabric.flows import FlowNetwork
from dynarl.fabric.maxmin import drain_seconds, max_min_rates
from dynarl.fabric.topology import NO_LINK, fat_tree, rail_optimised, single_switch

SWITCH = single_switch(6, 1, nic_bytes_per_s=1e9, nvlink_bytes_per_s=1e9)
TREES = [
    fat_tree(4, 2, 1e9, 7e9, leaf_radix=4, oversubscription=2),
    rail_optimised(4, 2, 1e9, 7e9, leaf_radix=2),
    fat_tree(4, 2, 1e9, 7e9, leaf_radix=4, oversubscription=3, spray=True),
]


@st.composite
def problems(draw):
    """Routes, capacities and weights, with links that nobody uses and messages without links."""
    links = draw(st.integers(1, 7))
    hops = st.lists(st.integers(0, links - 1), max_size=3, unique=True)
    routes = draw(st.lists(hops.map(lambda r: r + [NO_LINK] * (3 - len(r))), min_size=1, max_size=12))
    capacity = draw(st.lists(st.integers(1, 20), min_size=links, max_size=links))
    weights = draw(st.lists(st.integers(1, 4), min_size=len(routes), max_size=len(routes)))
    return np.array(routes), np.array(capacity), np.array(weights)


def filled_step_by_step(routes, capacity, weights) -> list[Fraction | None]:
    """Max-min rates in exact numbers, one link after the other."""
    free, rates = [Fraction(int(c)) for c in capacity], [None] * len(routes)
    while True:
        offers = {}
        for link in range(len(free)):
            users = [i for i, route in enumerate(routes) if link in route and rates[i] is None]
            if users:
                offers[link] = free[link] / sum(int(weights[i]) for i in users)
        if not offers:
            return rates
        least = min(offers, key=offers.get)
        for i, route in enumerate(routes):
            if least in route and rates[i] is None:
                rates[i] = offers[least]
                for link in route[route != NO_LINK]:
                    free[link] -= int(weights[i]) * offers[least]


@settings(max_examples=150, deadline=None)
@given(problems())
def test_rates_are_those_of_exact_progressive_filling(problem):
    expected = [np.inf if rate is None else float(rate) for rate in filled_step_by_step(*problem)]
    np.testing.assert_allclose(max_min_rates(*problem), expected, rtol=1e-9)


@settings(max_examples=150, deadline=None)
@given(problems())
def test_no_link_carries_too_much_and_each_message_has_a_full_link_where_none_is_faster(problem):
    routes, capacity, weights = problem
    rates = max_min_rates(*problem)
    on = np.array([(routes == link).any(axis=1) for link in range(len(capacity))])
    load = np.array([(rates * weights)[users].sum() for users in on])
    assert (load <= capacity * (1 + 1e-9)).all()
    for rate, route in zip(rates, routes, strict=True):
        links = route[route != NO_LINK]
        full = [link for link in links if load[link] >= capacity[link] * (1 - 1e-9)]
        assert not len(links) or any(rates[on[link]].max() <= rate * (1 + 1e-9) for link in full)


def test_two_messages_on_a_link_get_half_each():
    network = FlowNetwork(SWITCH)
    for src in (0, 1):
        network.start(0, src, 2, 1000)
    assert network.next_completion() == (2000, 0)


def test_the_one_that_stays_takes_what_the_other_leaves():
    network = FlowNetwork(SWITCH)
    long, short = network.start(0, 0, 2, 3000), network.start(0, 1, 2, 1000)
    assert network.next_completion() == (2000, short)
    network.advance(2000)
    assert network.finish(short)
    late = network.start(3000, 3, 2, 500)  # 1000 bytes of the first are left: half the rate for 1000 ns
    assert network.next_completion() == (4000, late)
    network.advance(4000)
    network.finish(late)
    assert network.next_completion() == (4500, long)


def test_others_are_not_touched():
    network = FlowNetwork(SWITCH)
    network.start(0, 0, 1, 1234567)
    for now_ns in range(7, 700, 7):
        network.start(now_ns, 2, 3, 1)
        while network.next_completion()[1] != 0 and network.next_completion()[0] <= now_ns + 7:
            now_ns, transfer = network.next_completion()
            network.advance(now_ns)
            network.finish(transfer)
    assert network.next_completion() == (1234567, 0)


def test_messages_that_start_together_end_as_one_transfer():
    network = FlowNetwork(SWITCH)
    group = network.start(0, [0, 1, 3], [2, 2, 4], [1000, 1000, 500], "step")
    other = network.start(0, 5, 4, 500)
    assert network.next_completion() == (1000, group)  # 3 -> 4 and 5 -> 4 share
    network.advance(1000)
    assert not network.finish(group) and network.next_completion() == (1000, other)
    assert network.finish(other) and network.next_completion() == (2000, group)
    network.advance(2000)
    assert network.finish(group) and network.next_completion() is None
    assert network.delivered_bytes == 3000


def test_nothing_to_send_and_nowhere_to_send_it_take_no_time():
    network = FlowNetwork(SWITCH)
    network.start(5, 0, 1, 0)
    network.start(5, 2, 2, 10**9)
    for transfer in (0, 1):
        assert network.next_completion() == (5, transfer) and network.finish(transfer)


def run(topology, messages):
    """All of (start_ns, src, dst, nbytes): when each ended, and the network."""
    network, ends, waiting = FlowNetwork(topology), {}, sorted(messages)
    while True:
        soonest = network.next_completion()
        if waiting and (soonest is None or waiting[0][0] < soonest[0]):
            now_ns, src, dst, nbytes = waiting.pop(0)
            network.start(now_ns, src, dst, nbytes)
        elif soonest:
            network.advance(soonest[0])
            assert network.finish(soonest[1])
            ends[soonest[1]] = soonest[0]
        else:
            return ends, network


messages = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 7), st.integers(0, 7), st.integers(0, 4000)), min_size=1, max_size=25
)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(TREES), messages)
def test_all_bytes_arrive_and_none_sooner_than_links_allow(topology, messages):
    ends, network = run(topology, messages)
    assert network.delivered_bytes == sum(nbytes for *_, nbytes in messages) and len(ends) == len(messages)
    users: dict[int, list] = {}
    for i, (start_ns, src, dst, nbytes) in enumerate(sorted(messages)):
        for link in topology.route(src, dst):
            users.setdefault(link, []).append((start_ns, ends[i], nbytes))
    for link, sent in users.items():
        span_ns = max(end_ns for _, end_ns, _ in sent) - min(start_ns for start_ns, *_ in sent)
        assert sum(n for *_, n in sent) <= topology.capacity_bytes_per_s[link] * span_ns * 1e-9 * (1 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(TREES), messages)
def test_the_same_calls_have_the_same_outcome(topology, messages):
    assert run(topology, messages)[0] == run(topology, messages)[0]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(TREES), messages)
def test_solving_the_region_of_a_change_is_solving_everything(topology, messages):
    by_region, _ = run(topology, messages)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flows, "MOST_STEPS", 0)
        everything, _ = run(topology, messages)
    assert by_region == everything


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(TREES), messages)
def test_a_set_drains_as_fast_as_its_transfers_end(topology, messages):
    together = [(0, src, dst, 1000 * nbytes) for _, src, dst, nbytes in messages]
    _, src, dst, nbytes = np.array(together).T
    seconds = drain_seconds(topology.routes(src, dst), nbytes, topology.capacity_bytes_per_s)
    # Each end is rounded up to a nanosecond, and later ones build on it.
    assert 1e9 * seconds - 1e-3 <= max(run(topology, together)[0].values()) <= 1e9 * seconds + len(messages)


def test_a_large_set_drains_at_most_a_little_late():
    topology = fat_tree(12, 2, 1e9, 7e9, leaf_radix=4)
    src, dst = np.divmod(np.arange(24 * 24), 24)
    routes, nbytes = topology.routes(src, dst), np.where(src == dst, 0, 1000 + 7 * src + 13 * dst)
    network = FlowNetwork(topology)
    network.start(0, src, dst, nbytes)
    while (soonest := network.next_completion()) is not None:
        network.advance(soonest[0])
        network.finish(soonest[1])
    assert drain_seconds(routes, nbytes, topology.capacity_bytes_per_s) == pytest.approx(
        network.now_ns * 1e-9, rel=0.01
    )


def test_ages_do_not_overflow():
    network = FlowNetwork(single_switch(2, 1, nic_bytes_per_s=1e-3, nvlink_bytes_per_s=1.0))
    network.start(0, 0, 1, 10**15)
    assert network.next_completion()[0] > 10**18


def test_calls_that_cannot_be_are_refused():
    network = FlowNetwork(SWITCH)
    transfer = network.start(10, 0, 1, 1000)
    with pytest.raises(ValueError, match="before 10 ns"):
        network.start(9, 0, 1, 1)
    with pytest.raises(ValueError, match="transfer 0 has messages that end at 1010 ns"):
        network.advance(1011)
    with pytest.raises(ValueError, match="no message that has ended"):
        network.finish(transfer)
    with pytest.raises(ValueError, match="whole numbers"):
        network.start(10, 0, 1, 0.5)
    with pytest.raises(ValueError, match="whole numbers"):
        network.start(10, 0, 1, -1)
    with pytest.raises(ValueError, match="without messages"):
        network.start(10, [], [], np.array([], dtype=int))


def test_a_cancelled_transfer_tells_what_is_left_and_frees_its_share():
    network = FlowNetwork(SWITCH)
    first, second = network.start(0, 0, 2, 1000), network.start(0, 1, 2, 1000)
    network.advance(1000)
    assert network.cancel(first) == 500
    assert network.next_completion() == (1500, second) and network.delivered_bytes == 500
    with pytest.raises(ValueError, match="transfer 0 is not under way"):
        network.cancel(first)


def test_a_dead_link_halts_its_messages_and_is_named():
    dead = SWITCH.capacity_bytes_per_s.copy()
    dead[SWITCH.route(0, 2)[0]] = 0.0
    network = FlowNetwork(type(SWITCH)(**{**vars(SWITCH), "capacity_bytes_per_s": dead}))
    halted, other = network.start(0, 0, 2, 1000, "weights"), network.start(0, 1, 2, 1000)
    assert network.next_completion() == (1000, other)
    network.advance(1000)
    network.finish(other)
    assert network.next_completion() is None
    assert network.halted() == {halted: ("weights", "NIC of device 0 out")}
