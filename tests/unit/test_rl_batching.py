import itertools

from hypothesis import given
from hypothesis import strategies as st

from dynarl.rl.batching import OVERHEAD_TOKENS, pack

LENGTHS = st.lists(st.integers(1, 400), max_size=40)


def cost(lengths, batches):
    return sum(max(lengths[i] for i in batch) * len(batch) + OVERHEAD_TOKENS for batch in batches)


@given(LENGTHS, st.integers(1, 2000))
def test_every_sample_is_in_one_batch_in_order_and_no_batch_is_empty(lengths, cap):
    batches = pack(lengths, cap)
    assert [i for batch in batches for i in batch] == list(range(len(lengths)))
    assert all(batches) or not batches
    assert pack(lengths, cap) == batches


@given(LENGTHS, st.integers(1, 2000))
def test_the_padded_size_stays_under_the_cap_unless_one_sample_alone_exceeds_it(lengths, cap):
    for batch in pack(lengths, cap):
        assert len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= cap


@given(st.lists(st.integers(1, 900), min_size=1, max_size=9), st.integers(1, 3000))
def test_no_other_cut_that_keeps_the_order_costs_less(lengths, cap):
    n = len(lengths)
    costs = []
    for inner in itertools.chain.from_iterable(itertools.combinations(range(1, n), k) for k in range(n)):
        ends = [0, *inner, n]
        cut = [range(a, b) for a, b in zip(ends, ends[1:])]
        if all(len(b) == 1 or max(lengths[i] for i in b) * len(b) <= cap for b in cut):
            costs.append(cost(lengths, cut))
    assert cost(lengths, pack(lengths, cap)) == min(costs)
