import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from graph_records import change, job, records
from synthetic_run import SyntheticRun

from dynarl import rundir
from dynarl.hypergraph.check import check
from dynarl.hypergraph.edges import edges as edges_of
from dynarl.hypergraph.edges import vertices
from dynarl.hypergraph.fold import fold
from dynarl.hypergraph.graph import Graph
from dynarl.hypergraph.journal import Journal, read
from dynarl.hypergraph.samples import SampleCount, Tally


@pytest.fixture
def synthetic(tmp_path):
    return SyntheticRun(tmp_path)


def graph_of(synthetic) -> Graph:
    return fold(read(rundir.journal(synthetic.run)))


def test_a_whole_run_breaks_no_rule(synthetic):
    synthetic.whole()
    graph = graph_of(synthetic)
    assert check(graph) == []
    assert graph.num_finished == 10
    assert graph.into_training_iterations == 10
    assert graph.samples.tally() == Tally(trained=320, lost=0, doubled=0)
    assert [e["accuracy"] for e in graph.evaluations] == [0.31, 0.74]
    assert len(graph.committed) == 20 and len(graph.cancelled) == 2
    assert 50 < graph.median_pause_ms < 200
    assert graph.ended["state"] == "completed"


def test_folding_in_two_parts_is_folding_as_a_whole(synthetic):
    synthetic.whole()
    everything = list(read(rundir.journal(synthetic.run)))
    for cut in range(0, len(everything), 17):
        halves = fold(everything[cut:], fold(everything[:cut]))
        whole = fold(everything)
        assert (halves.roles, halves.spans, halves.iterations) == (whole.roles, whole.spans, whole.iterations)
        assert halves.samples.tally() == whole.samples.tally()
        assert halves.version == len(everything)


def test_roles_follow_committed_epochs_only():
    moved = change(1, {"a": "training", "b": "training"}, a=("rollout", "training"))
    assert fold(records(*job(), moved[0])).roles == {"a": "rollout", "b": "training"}
    graph = fold(records(*job(), *moved))
    assert graph.roles == {"a": "training", "b": "training"}
    assert (graph.epoch, graph.with_role("rollout"), graph.owners) == (1, [], ["b"])


def test_the_edges_say_what_runs_where_with_which_layout():
    moved = change(1, {"a": "training", "b": "training"}, a=("rollout", "training"))
    config = {"cluster": {"devices_per_node": 2}, "training": {"tp": 2}}
    started = ("iteration_started", {"iteration": 1, "version": 4, "samples": []})
    graph = fold(records(*job(**config), started, *moved))
    edges = {(e.kind, e.vertices[0]): e for e in edges_of(graph)}
    training = edges["placement", "component/training"]
    assert training.vertices[1:] == ("device/a:0", "device/a:1", "device/b:0", "device/b:1")
    assert training.attributes == {
        "kind": "static", "interruptible": "regular",
        "layout": "tp=2,pp=1", "replicas": 2, "owners": ["b"], "borrowed": ["a"],
    }
    assert edges["placement", "component/rollout"].attributes["instances"] == 0
    assert edges["placement", "component/environment"].attributes["nodes"] == 2
    assert edges["residency", "state/optimizer"] == (
        "residency",
        ("state/optimizer", "device/b:0", "device/b:1"),
        {"version": 4, "behind": 0},
    )
    assert len(edges["residency", "state/weights"].vertices) == 5
    assert edges["dataflow", "channel/scored"].vertices == (
        "channel/scored",
        "component/inference",
        "component/training",
    )
    assert {v for e in edges.values() for v in e.vertices} == set(vertices(graph))


@pytest.mark.parametrize(
    "fault, events",
    [
        ("left training, but its role was rollout", change(1, {"a": "training"}, a=("training", "training"))),
        ("the new map says rollout", change(1, {"a": "rollout"}, a=("rollout", "training"))),
        (
            "node b changed from training to rollout without a move",
            change(1, {"a": "training", "b": "rollout"}, a=("rollout", "training")),
        ),
        ("which is not one of", change(1, {"a": "cook"}, a=("rollout", "cook"))),
        ("committed without having been proposed", change(1, {"a": "training"}, a=("rollout", "training"))[1:]),
        (
            "epoch 3 committed after epoch 5",
            change(5, {"a": "inference"}, a=("rollout", "inference"))
            + change(3, {"a": "rollout"}, a=("inference", "rollout")),
        ),
        ("a step of iteration 4, which was not started", [("step_committed", {"iteration": 4, "samples": []})]),
        ("has no field 'epoch'", [("epoch_cancelled", {"reason": "x"})]),
        ("weights_staged was left out", [("weights_staged", {"version": 1, "nodes": 3})]),
        (
            "while no node had the role training",
            [
                ("iteration_started", {"iteration": 1, "version": 1, "samples": ["1:0:0"]}),
                *change(1, {"b": "inference"}, b=("training", "inference")),
                ("step_committed", {"iteration": 1, "samples": ["1:0:0"]}),
            ],
        ),
    ],
)
def test_a_broken_rule_is_named(fault, events):
    assert check(fold(records(*job()))) == []
    broken = check(fold(records(*job(), *events)))
    assert len(broken) == 1 and fault in broken[0]


def test_a_node_that_moves_to_two_roles_at_once_is_named():
    (propose, commit) = change(1, {"a": "training"}, a=("rollout", "training"))
    commit[1]["moves"].append({"node": "a", "source": "rollout", "target": "inference"})
    assert any(
        "moved to training and inference at once" in text for text in check(fold(records(*job(), propose, commit)))
    )


def test_the_last_rollout_node_may_leave_only_without_live_requests():
    moved = change(1, {"a": "training", "b": "training"}, a=("rollout", "training"))
    assert check(fold(records(*job(), *moved)), live_requests=3) == [
        "3 requests are live, but no node has the role rollout"
    ]
    assert check(fold(records(*job(), *moved)), live_requests=0) == []
    moved[1][1]["live_requests"] = 2
    assert "took the last rollout node while 2 requests were live" in check(fold(records(*job(), *moved)))[0]


def test_a_job_whose_optimizer_nobody_owns_is_named():
    assert check(fold(records(*job(homes=("rollout", "inference"))))) == [
        "no node has training as its home: nobody owns the optimizer state"
    ]


def test_a_node_that_the_next_step_does_not_have_is_gone():
    again = [("agent_up", {"node": "b", "rank": 0, "home": "training"}), ("step_launched", {"step": 1, "nodes": ["b"]})]
    worker = ("worker_up", {"node": "a", "role": "rollout", "device": 0, "attempt": 1})
    graph = fold(records(*job(), worker, *change(1, {"a": "training"}, a=("rollout", "training")), *again))
    assert (graph.roles, graph.owners, graph.workers, graph.epoch) == ({"b": "training"}, ["b"], {}, 0)
    assert graph.nodes == ["a", "b"]
    assert graph.spans["a"][-1] == (9.0, None)
    assert check(graph) == []


def test_an_epoch_without_moves_announces_the_map():
    announced = ("epoch_committed", {"epoch": 0, "roles": {"a": "rollout", "b": "training"}, "moves": []})
    graph = fold(records(*job(), announced))
    assert (check(graph), graph.committed) == ([], [])


def test_homes_follow_the_trainer_to_other_nodes_and_back():
    home = {"a": "training", "b": "training"}
    grown = ("layout_committed", {"iteration": 2, "layout": "tp=1,pp=1,nodes=2", "home": home})
    moved = change(1, {"a": "training", "b": "training"}, a=("rollout", "training"))
    graph = fold(records(*job(), *moved, grown))
    assert (graph.owners, graph.replica_size, check(graph)) == (["a", "b"], 1, [])
    back = ("epoch_committed", {"epoch": 1, "roles": {"a": "rollout", "b": "training"}, "moves": []})
    fold(records(back), graph)
    assert (graph.owners, graph.faults) == (["b"], [])


def test_after_a_fault_everybody_may_go_home_without_moves():
    away = change(1, {"a": "training", "b": "training"}, a=("rollout", "training"))
    home = ("epoch_committed", {"epoch": 1, "roles": {"a": "rollout", "b": "training"}, "moves": []})
    graph = fold(records(*job(), *away, home))
    assert (check(graph), graph.roles["a"]) == ([], "rollout")


def test_unknown_events_and_fields_are_ignored():
    graph = fold(
        records(
            *job(),
            ("tool_called", {"node": "a"}),
            ("agent_up", {"node": "a", "rank": 0, "home": "rollout", "mood": "good"}),
        )
    )
    assert graph.unknown_events == {"tool_called": 1}
    assert check(graph) == []


# Samples


@pytest.mark.parametrize(
    "drop, twice, expected", [(0, 0, (32, 0, 0)), (2, 0, (30, 2, 0)), (0, 3, (32, 0, 3)), (1, 1, (32, 0, 0))]
)
def test_lost_and_doubled_samples_are_counted(synthetic, drop, twice, expected):
    synthetic.start()
    synthetic.iteration(1, drop=drop, twice=twice)
    graph = graph_of(synthetic)
    assert graph.samples.tally() == Tally(*expected)
    assert bool(check(graph)) == (expected != (32, 0, 0))


def test_a_sample_of_another_iteration_is_found():
    count = SampleCount()
    count.start(1, ["1:0:0", "1:0:1"])
    count.step(1, ["1:0:0"], finished=True)
    count.start(2, ["2:0:0"])
    count.step(2, ["2:0:0", "1:0:0"], finished=True)
    assert count.tally() == Tally(trained=2, lost=1, doubled=1)
    count.start(3, ["2:0:1"])
    count.step(3, [], finished=True)
    assert count.tally().lost == 2
    count.step(2, ["2:0:1"], finished=True)
    assert count.tally().lost == 1


def test_samples_count_as_lost_only_after_the_last_minibatch():
    two = {"algorithm": {"minibatches": 2}}
    first = ("iteration_started", {"iteration": 1, "version": 1, "samples": ["1:0:0", "1:1:0", "1:2:0"]})
    step = ("step_committed", {"iteration": 1, "samples": ["1:0:0"]})
    second = ("step_committed", {"iteration": 1, "samples": ["1:1:0"]})
    assert fold(records(*job(**two), first, step)).samples.tally() == Tally(1, 0, 0)
    assert fold(records(*job(**two), first, step, second)).samples.tally() == Tally(2, 1, 0)
    following = ("iteration_started", {"iteration": 2, "version": 2, "samples": ["2:0:0"]})
    assert fold(records(*job(**two), first, step, following)).samples.tally() == Tally(1, 2, 0)


def brute_force(events) -> Tally:
    """The definition, read literally, over (kind, iteration, samples)."""
    steps = [s for kind, _, samples in events if kind == "step" for s in samples]
    finished = {iteration for kind, iteration, _ in events if kind == "step"}
    due = {s for kind, iteration, samples in events if kind == "start" and iteration in finished for s in samples}
    return Tally(len(set(steps)), len(due - set(steps)), sum(steps.count(s) > 1 for s in set(steps)))


ids = st.builds("{}:{}:0".format, st.integers(0, 3), st.integers(0, 3))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["start", "step"]), st.integers(0, 3), st.lists(ids, max_size=5)), max_size=8)
)
def test_the_count_is_that_of_the_definition(events):
    count = SampleCount()
    for kind, iteration, samples in events:
        count.start(iteration, samples) if kind == "start" else count.step(iteration, samples, finished=True)
    assert count.tally() == brute_force(events)


# Going back


def test_a_resumed_run_forgets_what_it_did_after_the_checkpoint(synthetic):
    synthetic.start()
    for number in (1, 2, 3, 4):
        synthetic.iteration(number)
    synthetic.end("requeued", "time limit")
    synthetic.start()
    synthetic.record("resumed", iteration=2, checkpoint="step-000002")
    assert graph_of(synthetic).samples.tally() == Tally(64, 0, 0)
    for number in (3, 4, 5):
        synthetic.iteration(number)
    graph = graph_of(synthetic)
    assert graph.samples.tally() == Tally(160, 0, 0)
    assert (graph.attempt, graph.num_finished, graph.ended) == (2, 5, None)
    assert check(graph) == []


def test_the_layout_of_the_trainer_follows_its_changes_also_back(synthetic):
    synthetic.start()
    assert graph_of(synthetic).layout == "tp=1,pp=1"
    synthetic.iteration(1)
    synthetic.record("layout_proposed", iteration=2, layout="tp=1,pp=2")
    synthetic.record("layout_committed", iteration=2, layout="tp=1,pp=2", phases={"run_ms": 3.0}, pause_ms=5.0, bytes=7)
    synthetic.iteration(2)
    synthetic.record("layout_cancelled", iteration=3, layout="tp=2,pp=1", reason="no memory")
    graph = graph_of(synthetic)
    assert (graph.layout, [recut.state for recut in graph.recuts]) == ("tp=1,pp=2", ["committed", "cancelled"])
    assert set(graph.unknown_events) == {"journal_opened"}
    synthetic.start()
    synthetic.record("resumed", iteration=1, checkpoint="step-000001")
    assert graph_of(synthetic).layout == "tp=1,pp=1"


def test_a_start_without_a_checkpoint_begins_at_nothing(synthetic):
    synthetic.start()
    synthetic.evaluate("start", 0, 0.2)
    synthetic.iteration(1)
    synthetic.start()
    assert graph_of(synthetic).num_finished == 1  # nothing is known yet of where it will begin
    synthetic.evaluate("start", 0, 0.3)
    synthetic.iteration(1)
    graph = graph_of(synthetic)
    assert graph.samples.tally() == Tally(32, 0, 0)
    assert [e["accuracy"] for e in graph.evaluations] == [0.3]
    assert check(graph) == []


def test_no_number_of_an_epoch_or_a_decision_comes_twice_in_a_run(synthetic):
    """`dynarl explain` names them by it, also after the controller or the step was started again."""
    synthetic.start()
    for number in range(1, 4):
        synthetic.iteration(number)
    before = synthetic.epoch
    synthetic.record("decision", number=before + 900, iteration=3)
    synthetic.start()
    synthetic.record("resumed", iteration=2, checkpoint="/x")
    log = Journal(rundir.journal(synthetic.run))
    assert log.graph.decision is None and log.graph.last_number == before + 900
    log.append("epoch_proposed", epoch=before + 901, moves=[])
    assert log.graph.last_number == before + 901
    log.close()


def test_the_same_iteration_again_without_going_back_is_a_fault(synthetic):
    synthetic.start()
    synthetic.iteration(1)
    synthetic.iteration(1)
    graph = graph_of(synthetic)
    assert graph.samples.tally().doubled == 32
    assert any("started again without going back" in text for text in check(graph))
