from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynarl.config.schema import Policy
from dynarl.controller.leases import Leases
from dynarl.controller.replicas import inside_nodes
from dynarl.dataflow.ledger import Ledger
from dynarl.scheduler.policy import View, capabilities, start_roles
from dynarl.scheduler.published import Boundaries, in_turn, trainer_sizes

# The published allocation of 64 devices, in nodes of 4: 40 for rollout, 8 for inference, 16 for training.
POLICY = Policy(name="published", threshold=200)


def homes(rollout: int, inference: int, training: int) -> dict[str, str]:
    roles = ["training"] * training + ["rollout"] * rollout + ["inference"] * inference
    return {f"n{index:02}": role for index, role in enumerate(roles)}


HOME = homes(10, 2, 4)


def numbers(roles: dict[str, str]) -> tuple[int, int, int]:
    have = Counter(roles.values())
    return have["rollout"], have["inference"], have["training"]


def view(roles: dict[str, str], live: int, **counts) -> View:
    """`live` requests, spread over the nodes that generate."""
    generators = [node for node, role in roles.items() if role == "rollout"]
    running = {node: live // len(generators) + (i < live % len(generators)) for i, node in enumerate(generators)}
    counts = {"num_samples": 8192, "num_groups": 512, "num_complete": 200, "generating": live > 0} | counts
    return View(roles, capabilities(POLICY, HOME), running, **counts)


def after(roles: dict[str, str], moves: dict[str, str]) -> dict[str, str]:
    return {**roles, **moves}


def test_all_generate_until_a_fifth_of_the_requests_is_left_and_then_take_their_homes():
    roles = start_roles(POLICY, HOME)
    assert numbers(roles) == (16, 0, 0)
    rule = Boundaries(POLICY, HOME)
    assert rule.decide(view(roles, 1640)) == {}
    assert after(roles, rule.decide(view(roles, 1639))) == HOME


def test_nodes_do_not_return_before_a_tenth_of_the_groups_is_complete():
    roles, rule = start_roles(POLICY, HOME), Boundaries(POLICY, HOME)
    assert rule.decide(view(roles, 1000, num_complete=51)) == {}
    assert rule.decide(view(roles, 1000, num_complete=52))


def boundary(live: int, roles: dict[str, str] = HOME, decided: int = 0, **counts) -> dict[str, str]:
    rule = Boundaries(POLICY, HOME, decided)
    return after(roles, rule.decide(view(roles, live, minibatch=decided + 1, **counts)))


def test_at_a_boundary_training_takes_the_largest_size_that_idle_rollout_nodes_allow():
    # 8 nodes of 4 devices could leave; 8 ranks is the largest size on the list that they reach.
    assert numbers(boundary(800)) == (6, 2, 8)
    assert numbers(boundary(200)) == (1, 2, 13)  # nine could leave, and do
    assert numbers(boundary(1400)) == (10, 2, 4)  # three could: no size is reached, so they stay


def test_inference_leaves_as_a_whole_once_everything_is_scored():
    roles = boundary(200)
    assert numbers(boundary(0, roles, 1, to_score=1)) == (1, 2, 13)
    assert numbers(boundary(0, roles, 1)) == (0, 0, 16)


def test_between_boundaries_nothing_changes():
    rule = Boundaries(POLICY, HOME)
    assert rule.decide(view(HOME, 200)) == {}
    assert rule.decide(view(HOME, 200, minibatch=1))
    assert rule.decide(view(HOME, 10, minibatch=1)) == {}  # decided already


def test_the_nodes_with_the_fewest_requests_leave():
    busy = {node: 100 + i for i, node in enumerate(n for n, r in HOME.items() if r == "rollout")}
    seen = replace(view(HOME, 1000, minibatch=1), running=busy)
    assert sorted(Boundaries(POLICY, HOME).decide(seen)) == sorted(busy)[:4]


@given(st.integers(2, 80), st.data())
def test_training_grows_to_a_listed_size_and_never_shrinks_and_rollout_never_grows(nodes, data):
    training = data.draw(st.integers(1, nodes - 1))
    inference = data.draw(st.integers(0, nodes - training - 1))
    home = homes(nodes - training - inference, inference, training)
    generators = sorted(node for node, role in home.items() if role == "rollout")
    live = data.draw(st.integers(0, 400 * len(generators)))
    running = {node: live // len(generators) for node in generators}
    seen = View(home, capabilities(POLICY, home), running, minibatch=1, num_samples=8192, num_groups=512)
    found = numbers(after(home, Boundaries(POLICY, home).decide(seen)))
    assert found[0] <= len(generators) and found[2] >= training
    assert found[2] == training or found[2] in trainer_sizes(nodes)
    assert found[0] > 0 or not seen.live


def test_after_a_fault_one_node_goes_back_to_what_is_left():
    roles = dict.fromkeys(HOME, "training")
    seen = View(roles, capabilities(POLICY, HOME), waiting=3, generating=1, minibatch=3)
    assert list(Boundaries(POLICY, HOME, 3).decide(seen).values()) == ["rollout"]
    assert list(Boundaries(POLICY, HOME, 3).decide(replace(seen, waiting=0, to_score=1)).values()) == ["inference"]
    assert list(in_turn(seen).values()) == ["rollout"]


def test_a_rollout_node_with_nothing_to_do_scores_where_no_other_can():
    """The node that was to go home to inference was down then."""
    home = homes(2, 1, 1)
    may = capabilities(POLICY, home)
    roles = home | {"n03": "rollout"}
    assert "inference" not in may["n00"]
    seen = View(roles, may, {"n01": 1, "n02": 0, "n03": 0}, generating=1, to_score=3)
    assert Boundaries(POLICY, home).decide(seen) == {"n02": "inference"}
    assert Boundaries(POLICY, home).decide(replace(seen, running=dict.fromkeys(seen.running, 1))) == {}
    assert Boundaries(POLICY, home).decide(replace(seen, waiting=1)) == {}


def test_in_turn_all_generate_then_all_score_then_all_train():
    policy = Policy(name="in_turn")
    roles, may = start_roles(policy, HOME), capabilities(policy, HOME)
    assert in_turn(View(roles, may, {"n00": 1}, generating=1, to_score=500)) == {}
    roles = after(roles, in_turn(View(roles, may, to_score=512)))
    assert numbers(roles) == (0, 16, 0)
    assert in_turn(View(roles, may, scoring=1, to_train=511)) == {}
    assert numbers(after(roles, in_turn(View(roles, may, to_train=512)))) == (0, 0, 16)
    no_scoring = View(start_roles(policy, HOME), may, needs_scoring=False, to_score=512)
    assert set(in_turn(no_scoring).values()) == {"training"}


@pytest.mark.parametrize("replicas, most", [(16, 8), (13, 10), (4, 32)])
def test_even_shares_give_every_replica_the_same_number_of_groups_however_fast_it_is(replicas, most):
    """One replica ends at once whatever it gets; it gets its share and no more."""
    nodes = [f"n{i:02}" for i in range(replicas)]
    ledger = Ledger([f"1:{g}:0" for g in range(128)], scored_by_inference=False)
    for sample in ledger.waiting():
        ledger.dispatch("n00", [sample])
        ledger.finished(sample, "n00", reward=0.0, tokens=5, finish="stop")
    sent, fleet = Counter(), SimpleNamespace(agents={})
    monitor = SimpleNamespace(leased=lambda *_: None, done=lambda *_: None)
    leases = Leases(fleet, ledger, monitor, {"training": inside_nodes(nodes, 1, 1)}, lambda work, undo: work.close())
    everything = list(ledger.groups.values())
    for _ in range(200):
        leases.hand_out("training", ledger.in_state("scored"), nodes, lambda sample: {}, everything)
        for lease, (_, replica) in list(leases.at.items()):
            if replica.nodes[0] == "n00" or not ledger.in_state("scored"):
                sent[replica.nodes[0]] += 1
                ledger.accumulated(lease)
                leases.done(lease)
        if sent["n00"] >= most:
            break
    assert sent["n00"] == most
    leases.hand_out("training", ledger.in_state("scored"), nodes, lambda sample: {}, everything)
    assert all(replica.nodes[0] != "n00" for _, replica in leases.at.values())
