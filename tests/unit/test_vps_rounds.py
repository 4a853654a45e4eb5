import heapq
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vps_pairs import KINDS, pairs

from dynarl.vps.plan import plan_transition
from dynarl.vps.rounds import LATENCY_S, num_rounds, partner, round_of, simulate

WORLDS = [*range(1, 18), 24, 33, 48]


@pytest.mark.parametrize("n", WORLDS)
def test_every_round_is_a_matching_and_every_pair_meets_once(n):
    met = set()
    for r in range(num_rounds(n)):
        for i in range(n):
            j = partner(r, i, n)
            assert 0 <= j < n and partner(r, j, n) == i and round_of(i, j, n) == r
            met.add((i, j))
    assert len(met) == n * n


def rendezvous(todo, rng):
    """Run operations [(round, peer), ...] of every rank in order; an exchange needs both sides at the same time.

    Returns how many exchanges took place before everybody was done or nobody could go on. Ranks reach their next
    operation after random delays.
    """
    ready = [(rng.random(), rank) for rank in todo]
    heapq.heapify(ready)
    at, waiting, done = dict.fromkeys(todo, 0), {}, 0
    while ready:
        now, rank = heapq.heappop(ready)
        if at[rank] == len(todo[rank]):
            continue
        round_, peer = todo[rank][at[rank]]
        if waiting.get(peer) == (round_, rank):
            del waiting[peer]
            done += 1
            for side in (rank, peer):
                at[side] += 1
                heapq.heappush(ready, (now + rng.random() ** 8 * 100, side))
        else:
            waiting[rank] = (round_, peer)
    return done


@settings(max_examples=20, deadline=None)
@given(pairs((1, 2, 3, 5, 8, 12)), st.sampled_from(KINDS), st.randoms(use_true_random=False))
def test_no_rank_waits_for_what_its_peer_does_not_post(pair, kinds, rng):
    spec, src, dst = pair
    plan = plan_transition(spec, src, dst, kinds=kinds, budget_bytes=400_000, ranks_per_node=rng.choice([None, 4]))
    todo = {rank: [(e.round, e.peer) for e in plan.transfers(rank)] for rank in plan.ranks}
    for rounds in ([r for r, _ in operations] for operations in todo.values()):
        assert rounds == sorted(set(rounds))
    assert rendezvous(todo, rng) == sum(map(len, todo.values())) / 2


@pytest.mark.parametrize("n", [5, 8, 12])
def test_threads_that_meet_only_when_both_are_there_all_get_through(n):
    """All pairs exchange, each rank in a thread; a rank is not in two exchanges at once."""
    met, gates = [], {(i, j): threading.Barrier(2) for i in range(n) for j in range(i)}

    def rank(i):
        delays = random.Random(i)
        for r in range(num_rounds(n)):
            if (j := partner(r, i, n)) != i:
                threading.Event().wait(delays.random() * 0.002)
                gates[max(i, j), min(i, j)].wait(timeout=120)
                met.append((r, i))

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(met) == n * (n - 1)


def test_two_ranks_that_disagree_on_the_order_would_wait_for_ever():
    """What the test above is worth: it sees a deadlock."""
    assert rendezvous({0: [(0, 1), (1, 2)], 1: [(0, 2), (1, 0)], 2: [(0, 0), (1, 1)]}, random.Random(0)) == 0


@settings(max_examples=20, deadline=None)
@given(pairs((2, 3, 6, 8, 12)), st.sampled_from(KINDS))
def test_every_round_of_a_plan_is_a_matching_and_has_what_the_ranks_do(pair, kinds):
    spec, src, dst = pair
    plan = plan_transition(spec, src, dst, kinds=kinds, budget_bytes=400_000)
    numbers = [round_.number for round_ in plan.rounds]
    assert numbers == sorted(set(numbers)) and len(numbers) == plan.num_rounds
    sent = dict.fromkeys(plan.ranks, 0)
    for _, messages in plan.rounds:
        partners = {}
        for sender, receiver, nbytes in messages:
            assert nbytes > 0 and sender != receiver
            assert partners.setdefault(sender, receiver) == receiver and partners.setdefault(receiver, sender) == sender
            sent[sender] += nbytes
    assert sent == plan.bytes_sent
    todo = {rank: {e.round: e for e in plan.transfers(rank)} for rank in plan.ranks}
    for rank, exchanges in todo.items():
        for round_, peer, out, into in exchanges.values():
            back = todo[peer][round_]
            assert (back.peer, back.into, back.out) == (rank, out, into)


# ---- estimates


def test_the_estimate_of_one_message_is_its_bytes_over_the_slower_link():
    def seconds(links):
        return simulate(*map(np_array, ([0], [0], [1], [1000])), links)

    assert seconds(100.0) == pytest.approx(10 + LATENCY_S)
    assert seconds({0: 100.0, 1: 50.0}) == pytest.approx(20 + LATENCY_S)


def test_both_directions_and_separate_pairs_run_at_the_same_time_but_messages_of_a_rank_one_after_the_other():
    both = simulate(*map(np_array, ([0, 0, 0], [0, 1, 2], [1, 0, 3], [1000, 1000, 1000])), 100.0)
    assert both == pytest.approx(10, rel=1e-3)
    queue = simulate(*map(np_array, ([0, 1], [0, 0], [1, 2], [1000, 1000])), 100.0)
    assert queue == pytest.approx(20, rel=1e-3)


def test_no_estimate_beats_the_busiest_link():
    from dynarl.vps.layout import EngineLayout
    from dynarl.vps.presets import preset
    from dynarl.vps.train_layout import TrainLayout

    spec = preset("qwen2.5-1.5b")
    for links in (25e9, dict.fromkeys(range(8), 25e9)):
        plan = plan_transition(spec, TrainLayout(tp=2, dp=2), EngineLayout(tp=2, dp=4), kinds=["param"], links=links)
        assert 0 < plan.seconds_at_best <= plan.seconds < 10 * plan.seconds_at_best


def np_array(values):
    import numpy as np

    return np.array(values)
