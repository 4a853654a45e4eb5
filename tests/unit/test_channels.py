"""Groups in chunks between components."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynarl.dataflow.channels import Channel, into
from dynarl.hypergraph import workflow

CHUNKS = st.one_of(st.integers(1, 12), st.just("all"))


@given(chunk=CHUNKS, names=st.lists(st.integers(), unique=True, min_size=1, max_size=10), again=st.data())
def test_every_group_is_offered_once_in_order_and_in_whole_chunks_but_the_last(chunk, names, again):
    channel, offers = Channel(chunk, len(names)), []
    for index, name in enumerate(names):
        if index and again.draw(st.booleans()):  # lost with a worker, and done once more
            assert channel.put(names[again.draw(st.integers(0, index - 1))]) == []
        offers.append(channel.put(name))
    assert [name for offer in offers for name in offer] == names and set(channel.offered) == set(names)
    size = len(names) if chunk == "all" else chunk
    sizes = [len(offer) for offer in offers if offer]
    assert all(each == size for each in sizes[:-1]) and sizes[-1] <= size


def test_a_chunk_of_one_holds_nothing_back():
    channel = Channel(1, 5)
    assert [channel.put(name) for name in "abc"] == [["a"], ["b"], ["c"]]


def test_all_holds_everything_back_until_upstream_has_ended():
    channel = Channel("all", 3)
    assert [channel.put(name) for name in "abc"] == [[], [], ["a", "b", "c"]]


@pytest.mark.parametrize("name", ["grpo", "agentic"])
def test_channels_of_groups_between_roles_can_be_chunked(name):
    declared = workflow.declared(name)
    assert declared.chunked == ("trajectories", "scored")
    assert into(declared, "training", {"scored": "all"}, 2).put("g") == []
    assert into(declared, "inference", {"scored": "all"}, 2).put("g") == ["g"]
