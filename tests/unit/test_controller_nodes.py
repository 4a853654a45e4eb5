from __future__ import annotations

import pytest

from dynarl.config.schema import Cluster, Config, Policy, Split
from dynarl.controller.nodes import assign_homes
from dynarl.errors import ConfigError


def config(rollout: int, inference: int, training: int, policy: str = "threshold") -> Config:
    split = Split(rollout=rollout, inference=inference, training=training)
    return Config(cluster=Cluster(nodes=rollout + inference + training), split=split, policy=Policy(name=policy))


def test_homes_follow_the_split_with_training_first():
    homes = assign_homes(config(2, 1, 1), ["n1", "n2", "n3", "n4"])
    assert homes == {"n1": "training", "n2": "inference", "n3": "rollout", "n4": "rollout"}


def test_lost_nodes_are_taken_from_rollout_and_then_from_inference():
    assert list(assign_homes(config(2, 1, 1), ["n1", "n3", "n4"]).values()) == ["training", "inference", "rollout"]
    assert list(assign_homes(config(2, 1, 1), ["n3", "n4"]).values()) == ["training", "rollout"]


def test_too_few_nodes_are_named():
    with pytest.raises(ConfigError, match=r"1 node\(s\) are left \(n4\), too few for 1 training node\(s\) and a rollout node"):
        assign_homes(config(2, 1, 1), ["n4"])


def test_one_node_is_enough_when_all_roles_take_turns():
    assert assign_homes(config(0, 0, 1, "colocated"), ["n1"]) == {"n1": "training"}
