"""What a change of roles must not do, rule by rule."""

import pytest
from graph_records import change, job, records, workers

from dynarl.hypergraph import workflow
from dynarl.hypergraph.check import check_proposal
from dynarl.hypergraph.fold import fold
from dynarl.hypergraph.graph import Graph, Move

NODES = ("r1", "r2", "i1", "t1")
HOMES = ("rollout", "rollout", "inference", "training")
MAY = {node: tuple(dict.fromkeys((home, "training"))) for node, home in zip(NODES, HOMES)}
LENDS = {n: ("rollout", *may) for n, may in MAY.items()}


def graph(*events, may=MAY, **config) -> Graph:
    announced = {"epoch": 0, "roles": dict(zip(NODES, HOMES)), "moves": []}
    return fold(records(*job(NODES, HOMES, **config), *workers(**may), ("epoch_committed", announced), *events))


def test_a_move_that_keeps_all_rules_may_be_made():
    assert check_proposal(graph(), [Move("r1", "rollout", "training"), Move("i1", "inference", "training")], 12) == []


BROKEN = {
    "a node that nobody knows": (
        graph(), [Move("x9", "rollout", "training")], "x9 is not a node of this step"),
    "a node whose agent is not up": (
        graph(("step_launched", {"nodes": [*NODES, "r3"]})), [Move("r3", "rollout", "training")],
        "r3 has no agent in this step"),
    "another role than the node has": (
        graph(), [Move("r1", "inference", "training")],
        "r1 is in rollout, not in inference: the move was made for another state of the job"),
    "two roles at once": (
        graph(may=MAY | {"r1": ("rollout", "inference", "training")}),
        [Move("r1", "rollout", "training"), Move("r1", "rollout", "inference")],
        "r1 cannot have two roles at once, training and inference"),
    "what is no role": (
        graph(), [Move("r1", "rollout", "environment")],
        "r1 cannot become environment: a node is given to one of rollout, inference, training"),
    "a role without workers": (
        graph(), [Move("r1", "rollout", "inference")],
        "r1 may not take the role inference: it has no inference workers on all of its devices"),
    "a role whose worker died": (
        graph(("worker_died", {"node": "r1", "role": "training", "device": 0})), [Move("r1", "rollout", "training")],
        "r1 cannot take the role training now: its worker on device 0 is down"),
    "part of a replica": (
        graph(training={"pp": 2}), [Move("r1", "rollout", "training")],
        "r1 has 1 devices, a replica of the trainer needs 2 (tp=1,pp=2): it cannot lend gradients"),
    "the owner of the optimizer": (
        graph(may=LENDS), [Move("t1", "training", "rollout")],
        "t1 owns optimizer and stays in training: policy.lend_owners is off"),
    "the last rollout node": (
        graph(), [Move("r1", "rollout", "training"), Move("r2", "rollout", "training")],
        "5 requests are live, but no node has the role rollout"),
    "weights on their way": (
        graph(("weights_staging", {"version": 7})), [Move("r1", "rollout", "training")],
        "version 7 of the weights is on its way: roles stay until it is there"),
}


@pytest.mark.parametrize("graph, moves, sentence", BROKEN.values(), ids=BROKEN)
def test_a_move_is_refused_for(graph, moves, sentence):
    assert check_proposal(graph, moves, 5) == [sentence]


def test_a_channel_that_must_not_wait_keeps_a_consumer(monkeypatch):
    """Items between two roles, of a workflow in which they cannot wait."""
    declared = workflow.declared("grpo")
    strict = workflow.parse(
        {"about": "", "components": declared.components, "state": declared.state,
         "channels": declared.channels | {"hot": workflow.Channel(("inference",), "sample", ("rollout",))}}, "strict")
    monkeypatch.setattr(Graph, "workflow", strict)
    assert check_proposal(graph(), [Move("i1", "inference", "training")]) == [
        "hot would fill up: rollout put into it, but no node has the role inference"]
    both_leave = [Move(n, r, "training") for n, r in zip(NODES[:3], HOMES)]
    assert check_proposal(graph(), both_leave) == []
    monkeypatch.undo()
    assert check_proposal(graph(), [Move("i1", "inference", "training")]) == []


def test_the_last_rollout_node_may_leave_without_requests():
    assert check_proposal(graph(), [Move("r1", "rollout", "training"), Move("r2", "rollout", "training")], 0) == []


def test_weights_that_have_arrived_or_were_given_up_hold_nobody_back():
    move, staging = [Move("r1", "rollout", "training")], ("weights_staging", {"version": 7})
    assert check_proposal(graph(staging, ("weights_staged", {"version": 7, "nodes": list(NODES)})), move) == []
    assert check_proposal(graph(staging, ("resumed", {"iteration": 0})), move) == []


@pytest.mark.parametrize("config", [{"policy": {"lend_owners": True}}, {"policy": {"name": "colocated"}}])
def test_owners_are_lent_where_the_policy_says_so(config):
    assert check_proposal(graph(may=LENDS, **config), [Move("t1", "training", "rollout")]) == []


def test_a_borrowed_node_may_always_go_back():
    moved = change(1, dict(zip(NODES, ("training", *HOMES[1:]))), r1=("rollout", "training"))
    assert check_proposal(graph(*moved), [Move("r1", "training", "rollout")]) == []


def test_a_worker_that_is_back_may_be_used():
    died = ("worker_died", {"node": "r1", "role": "training", "device": 0})
    assert check_proposal(graph(died, *workers(r1=("training",))), [Move("r1", "rollout", "training")]) == []


def test_nodes_that_join_the_trainer_itself_need_not_hold_a_replica():
    proposed = ("layout_proposed", {"iteration": 2, "layout": "tp=1,pp=2,nodes=2"})
    move = [Move("r1", "rollout", "training")]
    assert check_proposal(graph(proposed, training={"pp": 2}), move) == []
    for ended in ("layout_cancelled", "layout_committed"):
        after = graph(proposed, (ended, {"iteration": 2, "layout": "tp=1,pp=2"}), training={"pp": 2})
        assert "cannot lend gradients" in check_proposal(after, move)[0]


def test_nodes_whose_replica_fits_lend_also_where_others_span_nodes():
    two = workers(r1=("training",)) + [("worker_up", {"node": "r1", "role": "training", "device": 1})]
    config = {"cluster": {"devices_per_node": 2}, "training": {"pp": 2}}
    assert check_proposal(graph(*two, **config), [Move("r1", "rollout", "training")]) == []
    recut = ("layout_committed", {"iteration": 2, "layout": "tp=2,pp=2"})
    assert "needs 4" in check_proposal(graph(*two, recut, **config), [Move("r1", "rollout", "training")])[0]
