"""Whose gradients are summed where."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from dynarl.config.degrees import Degrees
from dynarl.config.schema import Cluster, Config, Training
from dynarl.controller.training import Trainer


def trainer(owners: int, borrowed: int, devices: int, tp: int) -> Trainer:
    home = {f"b{i}": "rollout" for i in range(borrowed)} | {f"o{i}": "training" for i in range(owners)}
    config = Config(cluster=Cluster(devices_per_node=devices), training=Training(tp=tp))
    made = Trainer(config, None, home, Degrees(tp))
    made.joined = made.everyone
    return made


# owner nodes, borrowed nodes, devices per node, tensor-parallel size (a divisor of the devices)
shapes = st.tuples(st.integers(1, 3), st.integers(0, 5), st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (6, 3)])).map(
    lambda drawn: (drawn[0], drawn[1], *drawn[2]))


@given(shapes, st.data())
def test_every_helper_is_summed_once_into_an_owner_of_its_tensor_rank(shape, data):
    made, tp = trainer(*shape), shape[3]
    absent = data.draw(st.sets(st.sampled_from(made.borrowed_nodes))) if made.borrowed_nodes else set()
    made.joined = [place for place in made.everyone if place[0] not in absent]
    contributors = data.draw(st.sets(st.sampled_from(sorted({place[0] for place in made.joined}))))
    replicas = [replica for replica in made.borrowed_replicas if contributors.issuperset(replica.nodes)]
    helpers = [place for replica in replicas for place in replica.places]
    trees = made.trees(replicas)

    ranks = [rank for tree in trees for rank in tree]
    assert len(ranks) == len(set(ranks)), "a rank is in two trees"
    assert sorted(made.joined[rank] for tree in trees for rank in tree[1:]) == sorted(helpers)
    for root, *others in trees:
        owner = made.joined[root]
        assert owner in made.owners
        assert {made.joined[rank][1] % tp for rank in others} == {owner[1] % tp}
    sizes = {rank: 0 for rank, place in enumerate(made.joined) if place in made.owners}
    sizes.update({tree[0]: len(tree) - 1 for tree in trees})
    assert max(sizes.values()) - min(sizes.values()) <= 1, "one owner sums much more than another"


@given(shapes)
def test_a_replica_is_summed_into_one_replica_of_owners(shape):
    made, tp = trainer(*shape), shape[3]
    to = {made.joined[rank]: made.joined[tree[0]] for tree in made.trees(made.borrowed_replicas) for rank in tree[1:]}
    for node, device in made.borrowed:
        first = (node, device - device % tp)
        assert to[node, device][0] == to[first][0]
        assert to[node, device][1] - device % tp == to[first][1]


def test_an_example():
    made = trainer(owners=1, borrowed=2, devices=2, tp=1)
    assert made.joined == [("o0", 0), ("o0", 1), ("b0", 0), ("b0", 1), ("b1", 0), ("b1", 1)]
    assert made.trees(made.borrowed_replicas) == [[0, 2, 4], [1, 3, 5]]
    assert made.trees([r for r in made.borrowed_replicas if r.nodes == ("b1",)]) == [[0, 4], [1, 5]]
    assert made.trees([]) == []


def test_an_owner_without_helpers_has_no_tree():
    made = trainer(owners=2, borrowed=1, devices=1, tp=1)
    assert made.trees(made.borrowed_replicas) == [[0, 2]]


def test_a_helper_that_has_not_joined_is_an_error():
    made = trainer(owners=1, borrowed=1, devices=1, tp=1)
    made.joined = made.owners
    with pytest.raises(KeyError):
        made.trees(made.borrowed_replicas)
