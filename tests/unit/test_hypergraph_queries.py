import pytest
from graph_records import change, decision, job, records

from dynarl.hypergraph.edges import edges
from dynarl.hypergraph.fold import fold
from dynarl.hypergraph.queries import Stage, Wait, critical_path, free_pool, staleness, waits

NODES, HOMES = ("r1", "i1", "t1"), ("rollout", "inference", "training")
START = ("iteration_started", {"iteration": 1, "version": 4, "samples": ["1:0:0", "1:0:1"]})

EMPTY = {f"groups__{name}__{how}": 0 for name in ("inference", "training") for how in ("waiting", "in_work")}
EMPTY |= {"requests__waiting": 0, "requests__running": 0}


def graph(*events, **config):
    return fold(records(*job(NODES, HOMES, **config), START, *events))


def moved(*events):
    after = {"r1": "rollout", "i1": "training", "t1": "training"}
    return graph(*change(1, after, i1=("inference", "training")), *events)


def test_devices_of_nodes_without_a_role_are_free():
    assert free_pool(graph()) == ()
    assert free_pool(graph(("step_launched", {"nodes": ["r1", "t1"]}))) == ("device/i1:0",)


def test_what_lies_in_a_channel_that_no_node_takes_from_waits_for_a_node():
    seen = EMPTY | {"groups__inference__waiting": 2, "groups__training__in_work": 1}
    assert waits(moved(decision(1, **seen))) == [
        Wait("inference", "component/inference", "2 group(s) wait in trajectories, and no node runs inference")]


def test_a_component_with_nothing_to_do_waits_for_the_one_before_it():
    assert waits(graph(decision(1, **EMPTY | {"requests__running": 3}))) == [
        Wait("inference", "channel/trajectories", "trajectories is empty until rollout is further"),
        Wait("training", "channel/scored", "scored is empty until inference is further")]
    # With everything generated and scored nobody waits for anybody: training is simply not done.
    assert waits(graph(decision(1, **EMPTY | {"groups__training__in_work": 1}))) == []


def test_nobody_is_said_to_wait_where_nothing_is_known():
    assert waits(graph()) == []
    later = ("iteration_started", {"iteration": 2, "version": 5, "samples": []})
    assert waits(graph(decision(1, requests__waiting=0, groups__inference__waiting=1), later)) == []


def test_everybody_waits_for_weights_on_their_way():
    found = waits(graph(("weights_staging", {"version": 5})))
    assert [(w.component, w.on) for w in found] == [(role, "state/weights") for role in HOMES]


def test_the_critical_path_names_who_the_iteration_waited_for():
    step = ("step_committed", {"iteration": 1, "samples": [], "stages": {"inference": 1.2, "rollout": 0.5}})
    found = graph(decision(1), step)  # the iteration starts at record 6, one second before the decision
    assert critical_path(found) == critical_path(found, 1) == [
        Stage("rollout", 0.5, 0.5), Stage("inference", 1.2, pytest.approx(0.7)), Stage("training", 2.0, 0.8)]
    later = ("iteration_started", {"iteration": 2, "version": 5, "samples": []})
    assert critical_path(graph(decision(1), step, later)) == critical_path(found)  # the newest that has stepped
    assert critical_path(graph()) == critical_path(graph(("step_committed", {"iteration": 1}))) == []
    with pytest.raises(KeyError):
        critical_path(found, 9)


def test_copies_of_the_weights_are_as_stale_as_their_oldest():
    assert staleness(graph()) == {"weights": 0, "optimizer": 0}
    staged = ("weights_staged", {"version": 5, "nodes": list(NODES)})
    some = ("weights_staged", {"version": 7, "nodes": ["t1"]})
    assert staleness(graph(staged)) == {"weights": 0, "optimizer": 0}
    assert staleness(graph(staged, some)) == {"weights": 2, "optimizer": 0}
    assert staleness(graph(staged, ("weights_staging", {"version": 6}))) == {"weights": 1, "optimizer": 0}


def test_the_edges_of_channels_carry_what_the_last_decision_saw():
    joined = edges(graph(decision(1, groups__inference__waiting=3, groups__inference__in_work=1)))
    found = {e.vertices[0]: e.attributes for e in joined if e.kind == "dataflow"}
    assert (found["channel/trajectories"]["waiting"], found["channel/trajectories"]["at_work"]) == (3, 1)
    assert found["channel/scored"]["waiting"] is None and found["channel/answers"]["affinity"] == "required"


def test_communicators_are_those_of_the_moment():
    def groups(graph):
        found = [e for e in edges(graph) if e.kind == "communicator"]
        return {e.vertices[0].removeprefix("communicator/"): e.attributes["ranks"] for e in found}

    assert groups(graph()) == {}  # no models yet, so no group
    announced = ("epoch_committed", {"epoch": 0, "roles": dict(zip(NODES, HOMES)), "moves": []})
    assert groups(graph(announced)) == {"world": [0, 1, 2], "training": [2]}
    assert groups(moved()) == {"world": [0, 1, 2], "training": [1, 2]}
    proposal = change(2, {}, r1=("rollout", "training"))[0]
    assert groups(graph(announced, proposal)) == {"world": [0, 1, 2], "training": [2], "epoch-2": [0, 2]}
