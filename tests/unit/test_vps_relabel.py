import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vps_pairs import KINDS, OPTIMIZER, pairs

from dynarl.vps.layout import EngineLayout
from dynarl.vps.plan import plan_transition
from dynarl.vps.relabel import assign, best
from dynarl.vps.spec import ModelSpec
from dynarl.vps.train_layout import TrainLayout

SMALL = ModelSpec(name="small", layers=8, hidden=16, heads=8, groups=8, head_dim=4, ffn=32, vocab=64, tied=False)


@st.composite
def weights(draw, sizes=(1, 2, 3, 4, 5, 6)):
    n = draw(st.sampled_from(sizes))
    entries = st.integers(0, draw(st.sampled_from([1, 3, 10**12])))
    return np.array(draw(st.lists(st.lists(entries, min_size=n, max_size=n), min_size=n, max_size=n)), np.int64)


@settings(deadline=None)
@given(weights())
def test_no_assignment_weighs_more(weight):
    n = len(weight)
    order = assign(weight)
    assert sorted(order.tolist()) == list(range(n))
    most = max(sum(weight[p[j], j] for j in range(n)) for p in itertools.permutations(range(n)))
    assert weight[order, np.arange(n)].sum() == most


def test_no_assignment_of_seven_weighs_more():
    """Many, since it takes several rows that push each other aside for a wrong price to matter."""
    everything, columns = np.array(list(itertools.permutations(range(7)))), np.arange(7)
    rng = np.random.default_rng(0)
    for largest in [3, 10, 1000] * 200:
        weight = rng.integers(0, largest, (7, 7))
        assert weight[assign(weight), columns].sum() == weight[everything, columns].sum(axis=1).max()


def test_a_large_assignment_weighs_at_least_as_much_as_any_swap_of_two():
    weight = np.random.default_rng(3).integers(0, 1000, (120, 120)) ** 3
    order = assign(weight)
    own = weight[order, np.arange(120)]
    swapped = weight[order][:, :]  # [i, j]: the row of column i at column j
    assert (swapped + swapped.T <= own[:, None] + own[None, :]).all()


@settings(deadline=None)
@given(weights(), st.permutations(range(6)))
def test_where_orders_are_equal_the_given_one_stays(weight, ranks):
    n = len(weight)
    ranks = tuple(ranks[:n])
    assert best(np.full((n, n), 7), ranks) == (ranks, 0)
    order, saved = best(weight, ranks)
    assert saved >= 0 and (saved > 0 or order == ranks)


@settings(deadline=None)
@given(weights((6,)), st.sampled_from([2, 3, 4]))
def test_ranks_that_share_a_node_still_do(weight, per_node):
    ranks = (4, 5, 6, 7, 8, 9)
    order, saved = best(weight, ranks, per_node)
    assert sorted(order) == list(ranks) and saved >= 0

    def together(some):
        return {(i, j) for i in range(6) for j in range(i) if some[i] // per_node == some[j] // per_node}

    assert together(order) == together(ranks)
    assert saved <= best(weight, ranks)[1]


@settings(deadline=None)
@given(weights((4,)))
def test_node_by_node_is_the_best_of_all_orders_that_keep_nodes_together(weight):
    kept = [p for p in itertools.permutations(range(4)) if p[0] // 2 == p[1] // 2]
    most = max(sum(weight[p[j], j] for j in range(4)) for p in kept)
    order, _ = best(weight, (0, 1, 2, 3), 2)
    assert sum(weight[order[j], j] for j in range(4)) == most


@settings(max_examples=20, deadline=None)
@given(pairs((1, 2, 3, 4, 6, 8)), st.sampled_from(KINDS), st.sampled_from([None, 2, 4]))
def test_relabelling_never_moves_more_and_saves_what_it_says(pair, kinds, ranks_per_node):
    spec, src, dst = pair
    given_, relabelled = (
        plan_transition(spec, src, dst, kinds=kinds, relabel=relabel, ranks_per_node=ranks_per_node)
        for relabel in (False, True)
    )
    saved = sum(given_.bytes_received.values()) - sum(relabelled.bytes_received.values())
    assert saved == relabelled.bytes_saved_by_relabelling >= 0
    assert given_.dst == dst and sorted(relabelled.dst.ranks) == sorted(dst.ranks)


@pytest.mark.parametrize(
    "before, after, ratio",
    [
        (dict(tp=2, dp=4), dict(tp=4, dp=2), 0.7),
        (dict(tp=2, dp=2, pp=2), dict(tp=4, dp=2), 0.7),
        (dict(dp=8), dict(tp=2, dp=4), 0.95),
    ],
)
def test_moves_between_tensor_and_data_parallelism_are_much_cheaper(before, after, ratio):
    def moved(relabel):
        plan = plan_transition(SMALL, TrainLayout(**before), TrainLayout(**after), kinds=OPTIMIZER, relabel=relabel)
        return sum(plan.bytes_received.values())

    assert moved(True) <= ratio * moved(False)


def test_an_engine_on_shuffled_ranks_finds_its_own_copy_again():
    src = EngineLayout(tp=4, dp=2)
    dst = EngineLayout(tp=4, dp=2, ranks=(3, 1, 0, 2, 7, 4, 6, 5))
    plan = plan_transition(SMALL, src, dst, kinds=["param"])
    assert not sum(plan.bytes_received.values())
    assert sum(plan_transition(SMALL, src, dst, kinds=["param"], relabel=False).bytes_received.values())
