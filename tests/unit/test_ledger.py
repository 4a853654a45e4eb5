import pytest

from dynarl import wire
from dynarl.dataflow.ledger import Ledger

G = ["1:7:0", "1:7:1"]
H = ["1:8:0", "1:8:1"]


def finish(ledger, *samples, node):
    return [ledger.finished(s, node, reward=1.0, tokens=10, finish="stop") for s in samples][-1]


def generated(samples=G, node="n1", **options):
    """A ledger whose first group is complete on `node`, and that group."""
    ledger = Ledger(samples, **options)
    ledger.dispatch(node, samples)
    return ledger, finish(ledger, *G, node=node)


def scored(node="n1"):
    ledger, group = generated(node=node)
    ledger.scored(ledger.lease(group, node))
    return ledger, group


# --- generation


def test_a_sample_that_occurs_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        Ledger([*G, G[0]])


def test_requests_are_handed_out_in_order_and_once():
    ledger = Ledger(G + H)
    assert ledger.dispatch("n1", ledger.waiting(3)) == [(s, None) for s in G + H[:1]]
    assert ledger.dispatch("n2", ledger.waiting(3)) == [(H[1], None)]
    assert ledger.dispatch("n2", ledger.waiting(3)) == []
    assert ledger.running == {G[0]: "n1", G[1]: "n1", H[0]: "n1", H[1]: "n2"}
    assert (ledger.num_waiting, ledger.num_live) == (0, 4)


def test_a_group_is_generated_when_its_last_sample_finishes():
    ledger = Ledger(G)
    ledger.dispatch("n1", ledger.waiting(1))
    ledger.dispatch("n2", ledger.waiting(1))
    assert ledger.finished(G[1], "n2", reward=0.5, tokens=4, finish="length") is None
    group = ledger.finished(G[0], "n1", reward=1.0, tokens=3, finish="stop")
    assert group.state == "generated"
    assert group.holders == {G[0]: "n1", G[1]: "n2"}
    assert group.rewards == {G[0]: 1.0, G[1]: 0.5}
    assert group.finish == {G[0]: "stop", G[1]: "length"}
    assert group.num_tokens == 7
    assert ledger.num_live == 0


def test_without_an_inference_role_a_complete_group_is_ready_to_train():
    _, group = generated(scored_by_inference=False)
    assert group.state == "scored"


def test_a_partial_answer_goes_on_first_and_its_holder_is_named():
    ledger = Ledger(G + H)
    ledger.dispatch("n1", ledger.waiting(2))
    assert ledger.returned(G[1], "n1", holder="n1")
    assert ledger.dispatch("n2", ledger.waiting(1)) == [(G[1], "n1")]
    assert ledger.running[G[1]] == "n2"


def test_an_answer_without_a_token_starts_again():
    ledger = Ledger(G)
    ledger.dispatch("n1", ledger.waiting(1))
    ledger.returned(G[0], "n1", holder="n1")
    ledger.dispatch("n2", ledger.waiting(1))
    ledger.returned(G[0], "n2", holder=None)
    assert ledger.dispatch("n3", ledger.waiting(1)) == [(G[0], None)]


def test_a_return_from_a_node_that_does_not_run_the_request_changes_nothing():
    ledger = Ledger(G)
    ledger.dispatch("n1", ledger.waiting(1))
    assert not ledger.returned(G[0], "n2", holder="n2")
    assert not ledger.returned(G[1], "n1", holder="n1")
    finish(ledger, G[0], node="n1")
    assert not ledger.returned(G[0], "n1", holder="n1")
    assert (ledger.num_waiting, ledger.running, ledger.partial) == (1, {}, {})


def test_a_finish_from_a_node_that_lost_the_request_is_ignored():
    ledger = Ledger(G)
    ledger.dispatch("n1", ledger.waiting(2))
    ledger.returned(G[0], "n1", holder="n1")
    assert finish(ledger, G[0], node="n1") is None  # waiting
    ledger.dispatch("n2", ledger.waiting(1))
    assert finish(ledger, G[0], node="n1") is None  # running elsewhere
    assert ledger.running == {G[0]: "n2", G[1]: "n1"}
    finish(ledger, G[0], node="n2")
    group = finish(ledger, G[1], node="n1")
    assert group.holders == {G[0]: "n2", G[1]: "n1"}
    assert finish(ledger, G[0], node="n2") is None  # a second time
    assert ledger.groups["1:7"].state == "generated"


@pytest.mark.parametrize("finish_first", [True, False])
def test_an_answer_that_finishes_while_its_node_is_told_to_give_it_up_counts_once(finish_first):
    """Edge case: an abort races with completion."""
    ledger = Ledger(G)
    ledger.dispatch("n1", G)
    finish(ledger, G[0], node="n1")
    if finish_first:
        group = finish(ledger, G[1], node="n1")
        assert not ledger.returned(G[1], "n1", holder="n1")
    else:
        assert ledger.returned(G[1], "n1", holder="n1")
        assert finish(ledger, G[1], node="n1") is None  # too late: it is offered again
        ledger.dispatch("n2", ledger.waiting())
        group = finish(ledger, G[1], node="n2")
    assert (group.state, ledger.num_live) == ("generated", 0)
    assert finish(ledger, G[1], node="n1") is finish(ledger, G[1], node="n2") is None


def test_a_request_that_moves_leaves_its_finished_fellows_where_they_are():
    """The group is whole all the same: it is scored once, from the holders of all its samples."""
    ledger = Ledger(G + H)
    ledger.dispatch("n1", G + H)
    finish(ledger, G[0], node="n1")
    ledger.returned(G[1], "n1", holder="n1")
    assert ledger.groups["1:7"].holders == {G[0]: "n1"}
    ledger.dispatch("n2", [G[1]])
    group = finish(ledger, G[1], node="n2")
    assert group.holders == {G[0]: "n1", G[1]: "n2"}
    assert ledger.in_state("generated") == [group]
    ledger.lease(group, "n3")
    assert ledger.in_state("generated") == []


def test_only_a_waiting_request_can_be_handed_out():
    ledger = Ledger(G)
    ledger.dispatch("n1", [G[1]])
    with pytest.raises(KeyError, match=G[1]):
        ledger.dispatch("n2", [G[1]])
    assert ledger.running == {G[1]: "n1"} and ledger.waiting() == [G[0]]


# --- scoring and training


def test_a_group_passes_from_generated_to_trained():
    ledger, group = generated()
    lease = ledger.lease(group, "n2")
    assert (group.state, group.node) == ("scoring", "n2")
    assert ledger.scored(lease) is group
    assert (group.state, group.node, group.lease) == ("scored", None, None)
    assert group.holders == dict.fromkeys(G, "n2")
    lease = ledger.lease(group, "n3")
    assert (group.state, group.node) == ("training", "n3")
    assert ledger.accumulated(lease) is group
    assert (group.state, group.node) == ("accumulated", "n3")
    assert ledger.done
    assert ledger.trained([group]) == G
    assert group.state == "trained"
    assert ledger.done


@pytest.mark.parametrize("state", ["generating", "scoring", "training", "accumulated", "trained"])
def test_only_generated_and_scored_groups_are_handed_out(state):
    ledger, group = generated()
    group.state = state
    with pytest.raises(ValueError, match=f"1:7 is {state}"):
        ledger.lease(group, "n2")


def test_a_lease_completes_only_what_it_was_given_for():
    ledger, group = generated()
    lease = ledger.lease(group, "n2")
    assert ledger.accumulated(lease) is None
    assert ledger.scored(lease) is group
    assert ledger.scored(lease) is None
    second = ledger.lease(group, "n2")
    assert ledger.scored(second) is None
    assert ledger.accumulated(lease) is None
    assert ledger.accumulated(second) is group
    assert ledger.accumulated(second) is None


def test_a_lease_that_was_handed_back_is_stale():
    for ledger, group in (generated(), scored()):
        before = group.state
        lease = ledger.lease(group, "n2")
        assert ledger.handed_back(lease) is group
        assert (group.state, group.node, group.lease) == (before, None, None)
        again = ledger.lease(group, "n3")
        assert ledger.scored(lease) is ledger.accumulated(lease) is ledger.handed_back(lease) is None
        assert group.node == "n3"
        assert (ledger.scored if before == "generated" else ledger.accumulated)(again) is group


def test_an_accumulated_group_cannot_be_handed_back():
    ledger, group = scored()
    lease = ledger.lease(group, "n2")
    ledger.accumulated(lease)
    assert ledger.handed_back(lease) is None
    assert group.state == "accumulated"


def test_leases_of_an_earlier_iteration_mean_nothing_in_the_next():
    earlier, group = scored()
    old = earlier.lease(group, "n2")
    ledger, group = scored()
    ledger.lease(group, "n2")
    assert ledger.accumulated(old) is None
    assert group.state == "training"


def test_a_step_without_one_of_its_groups_is_refused_and_marks_none():
    ledger = Ledger(G + H, scored_by_inference=False)
    ledger.dispatch("n1", ledger.waiting(4))
    first, second = (finish(ledger, *samples, node="n1") for samples in (G, H))
    ledger.accumulated(ledger.lease(first, "n2"))
    with pytest.raises(ValueError, match="1:8 is scored"):
        ledger.trained([first, second])
    assert first.state == "accumulated"


def test_a_group_is_trained_once():
    ledger, group = scored()
    ledger.accumulated(ledger.lease(group, "n2"))
    with pytest.raises(ValueError, match="twice"):
        ledger.trained([group, group])
    ledger.trained([group])
    with pytest.raises(ValueError, match="1:7 is trained"):
        ledger.trained([group])


# --- faults


def test_requests_of_a_dead_rollout_worker_wait_again_with_the_parts_that_others_hold():
    ledger = Ledger(G + H)
    ledger.dispatch("n1", ledger.waiting(1))
    ledger.returned(G[0], "n1", holder="n1")
    assert ledger.dispatch("n2", ledger.waiting(3)) == [(G[0], "n1"), (G[1], None), (H[0], None)]
    assert sorted(ledger.worker_lost("n2", "rollout")) == [G[0], G[1], H[0]]
    assert ledger.running == {}
    assert dict(ledger.dispatch("n3", ledger.waiting(4))) == {G[0]: "n1", G[1]: None, H[0]: None, H[1]: None}


def test_what_the_node_of_a_dead_rollout_worker_has_recorded_goes_on_from_there():
    ledger = Ledger(G + H)
    ledger.dispatch("n1", ledger.waiting(1))
    ledger.returned(G[0], "n1", holder="n1")
    ledger.dispatch("n2", ledger.waiting(3))
    ledger.worker_lost("n2", "rollout", held=[G[0], H[0], H[1]])  # H[1] is not there any more
    assert dict(ledger.dispatch("n3", ledger.waiting(4))) == {G[0]: "n2", G[1]: None, H[0]: "n2", H[1]: None}


def test_a_dead_rollout_worker_loses_nothing_that_was_finished():
    ledger, group = generated()
    ledger.worker_lost("n1", "rollout")
    assert group.state == "generated"
    assert ledger.num_waiting == 0


def test_a_dead_inference_worker_gives_back_what_it_was_scoring_only():
    ledger, group = generated()
    lease = ledger.lease(group, "n2")
    ledger.worker_lost("n3", "inference")
    ledger.worker_lost("n2", "training")
    assert group.state == "scoring"
    ledger.worker_lost("n2", "inference")
    assert group.state == "generated"
    assert ledger.scored(lease) is None


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_dead_training_worker_gives_back_what_its_buffer_held(accumulated):
    ledger, group = scored()
    lease = ledger.lease(group, "n2")
    if accumulated:
        ledger.accumulated(lease)
    ledger.worker_lost("n3", "training")
    ledger.worker_lost("n2", "inference")
    assert group.state == ("accumulated" if accumulated else "training")
    ledger.worker_lost("n2", "training")
    assert group.state == "scored"
    assert ledger.accumulated(lease) is None
    assert not ledger.done


def test_what_a_step_has_trained_a_dead_worker_cannot_undo():
    ledger, group = scored()
    ledger.accumulated(ledger.lease(group, "n2"))
    ledger.trained([group])
    ledger.worker_lost("n2", "training")
    assert group.state == "trained"


def test_group_names_come_from_the_samples():
    ledger = Ledger([wire.sample_id(2, p, m) for p in (5, 6) for m in range(3)])
    assert {name: len(group.samples) for name, group in ledger.groups.items()} == {"2:5": 3, "2:6": 3}


def test_a_request_that_did_not_reach_its_node_is_stranded_once_that_has_left_until_it_waits_again():
    ledger = Ledger(["1:0:0", "1:0:1", "1:1:0"])
    ledger.dispatch("n1", ["1:0:0", "1:0:1"])
    ledger.dispatch("n2", ["1:1:0"])
    ledger.unreached("n1", ["1:0:0", "1:1:0"])  # the last has gone to another node meanwhile
    assert ledger.stranded(["n1", "n2"]) == [] and ledger.stranded(["n2"]) == ["1:0:0"]
    ledger.returned("1:0:0", "n1", holder=None)
    assert ledger.stranded([]) == [] and ledger.num_waiting == 1
