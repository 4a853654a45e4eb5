import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from iteration_model import Fault, Model, Work

from dynarl.config.schema import Policy
from dynarl.scheduler.policy import ROLES, View, capabilities, decide, start_roles, take_turns

# One way to inference, one to training, and one back to score what came late.
MOST_FLIPS = 3


def homes(rollout: int, inference: int, training: int) -> dict[str, str]:
    roles = ["rollout"] * rollout + ["inference"] * inference + ["training"] * training
    return {f"n{index}": role for index, role in enumerate(roles, 1)}


def view(roles: dict[str, str], policy: Policy = Policy(), **counts) -> View:
    return View(roles=roles, may=capabilities(policy, roles), **counts)


# --- nodes that switch by themselves

BY_NODE = Policy(name="colocated", switching="node")


def test_a_free_node_takes_work_that_waits_and_stays_where_it_has_some():
    roles = homes(2, 1, 1)
    seen = view(roles, BY_NODE, running={"n1": 2, "n2": 0}, generating=4, to_score=3, to_train=3)
    turns = take_turns(seen, ["n2", "n3", "n4"])
    assert set(turns) == {"n2"} and turns["n2"] in ("inference", "training")
    assert take_turns(seen, []) == {}


def test_no_more_nodes_switch_than_groups_wait():
    seen = view(homes(4, 0, 0), BY_NODE, generating=1, to_score=1)
    assert list(take_turns(seen, ["n1", "n2", "n3", "n4"]).values()) == ["inference"]
    assert take_turns(view(homes(4, 0, 0), BY_NODE, generating=4), ["n1", "n2"]) == {}, "nothing is offered yet"


def test_nobody_leaves_rollout_while_requests_wait_and_one_returns_if_nobody_is_left():
    assert take_turns(view(homes(2, 1, 1), BY_NODE, waiting=3, to_score=4, to_train=4), ["n2", "n3", "n4"]) == {}
    back = take_turns(view(homes(0, 1, 1), BY_NODE, waiting=3, to_score=4), [])
    assert back == {"n1": "rollout"}, "whether it is free or not"


@given(st.lists(st.sampled_from(ROLES), min_size=1, max_size=8), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.data())
def test_only_free_nodes_switch_each_to_a_role_that_has_work(held, to_score, to_train, generating, data):
    roles = {f"n{index}": role for index, role in enumerate(held)}
    free = [node for node in roles if data.draw(st.booleans())]
    turns = take_turns(view(roles, BY_NODE, generating=generating, to_score=to_score, to_train=to_train), free)
    waiting = {"inference": to_score, "training": to_train}
    assert turns.keys() <= set(free) and all(role != roles[node] for node, role in turns.items())
    for role in ROLES:
        assert sum(r == role for r in turns.values()) <= waiting.get(role, 0)
    idle = [node for node in free if turns.get(node, roles[node]) == "rollout"]
    assert not idle or to_score + to_train <= len(free), "no node is idle while groups wait for one"


# --- who may be what


def test_static_nodes_stay_what_they_are():
    assert capabilities(Policy(name="static"), homes(1, 1, 1)) == {"n1": {"rollout"}, "n2": {"inference"}, "n3": {"training"}}


def test_by_threshold_nodes_lend_themselves_to_the_trainer():
    home = homes(1, 1, 1)
    assert capabilities(Policy(), home) == {"n1": {"rollout", "training"}, "n2": {"inference", "training"}, "n3": {"training"}}
    assert start_roles(Policy(), home) == home


def test_lent_owners_generate_too_but_a_trainer_never_scores():
    policy, home = Policy(lend_owners=True), homes(1, 1, 1)
    assert capabilities(policy, home) == {"n1": set(ROLES), "n2": set(ROLES), "n3": {"rollout", "training"}}
    assert set(start_roles(policy, home).values()) == {"rollout"}


def test_colocated_nodes_take_every_role_and_all_begin_with_rollout():
    policy, home = Policy(name="colocated"), homes(1, 0, 1)
    assert capabilities(policy, home) == {"n1": set(ROLES), "n2": set(ROLES)}
    assert set(start_roles(policy, home).values()) == {"rollout"}


# --- first sentence: rollout keeps what its live requests fill


@pytest.mark.parametrize("live, leave", [(33, 0), (32, 0), (25, 0), (24, 1), (17, 1), (16, 2), (9, 2), (8, 3), (1, 3), (0, 4)])
def test_rollout_keeps_as_many_nodes_as_live_requests_fill(live, leave):
    running = {f"n{i}": live // 4 + (i <= live % 4) for i in range(1, 5)}
    moves = decide(Policy(threshold=8), view(homes(4, 0, 1), running=running, generating=5, to_train=9))
    assert len(moves) == leave
    assert set(moves.values()) <= {"training"}


def test_waiting_requests_are_live():
    assert decide(Policy(threshold=8), view(homes(2, 0, 1), running={"n1": 0, "n2": 0}, waiting=9, generating=3)) == {}


def test_the_least_loaded_leave_first():
    running = {"n1": 5, "n2": 1, "n3": 3}
    assert decide(Policy(threshold=8), view(homes(3, 0, 1), running=running, generating=3, to_train=1)) == {"n2": "training"}


def test_min_rollout_nodes_stay_while_requests_live():
    policy = Policy(threshold=8, min_rollout_nodes=2)
    assert len(decide(policy, view(homes(3, 0, 1), running={"n1": 1, "n2": 0, "n3": 0}, generating=1, to_train=5))) == 1
    assert len(decide(policy, view(homes(3, 0, 1), running={"n1": 0, "n2": 0, "n3": 0}, to_score=1))) == 3


@pytest.mark.parametrize("complete, leave", [(0, 0), (1, 1), (2, 2), (9, 3)])
def test_while_requests_live_no_more_leave_than_groups_wait(complete, leave):
    running = {"n1": 1, "n2": 0, "n3": 0, "n4": 0}
    assert len(decide(Policy(threshold=8), view(homes(4, 0, 1), running=running, generating=1, to_train=complete))) == leave


def test_groups_to_score_wait_for_nodes_that_can_score():
    running, policy = {"n1": 1, "n2": 0}, Policy(threshold=8)
    assert decide(policy, view(homes(2, 0, 1), running=running, generating=1, to_score=3)) == {}
    lending = Policy(threshold=8, lend_owners=True)
    assert decide(lending, view(homes(2, 0, 1), policy=lending, running=running, generating=1, to_score=3)) == {"n2": "inference"}


def test_nobody_leaves_for_nothing():
    assert decide(Policy(), view(homes(2, 0, 1), running={"n1": 0, "n2": 0})) == {}


def test_colocated_nodes_leave_together_and_only_when_all_have_finished():
    policy, home = Policy(name="colocated", threshold=8), homes(2, 0, 1)
    roles = start_roles(policy, home)
    common = {"roles": roles, "may": capabilities(policy, home)}
    assert decide(policy, View(**common, running={"n1": 0, "n2": 1, "n3": 0}, generating=1, to_score=6)) == {}
    moves = decide(policy, View(**common, running=dict.fromkeys(roles, 0), to_score=6))
    assert set(moves) == {"n1", "n2", "n3"}
    assert set(moves.values()) == {"inference", "training"}


def test_one_node_scores_first_and_then_trains():
    policy, home = Policy(name="colocated"), {"n1": "training"}
    may = capabilities(policy, home)
    assert decide(policy, View(roles={"n1": "rollout"}, may=may, running={"n1": 0}, to_score=4)) == {"n1": "inference"}
    scoring = View(roles={"n1": "inference"}, may=may, to_score=1, scoring=2, to_train=1)
    assert decide(policy, scoring) == {}
    assert decide(policy, View(roles={"n1": "inference"}, may=may, to_train=4)) == {"n1": "training"}
    assert decide(policy, View(roles={"n1": "training"}, may=may, training=1)) == {}


# --- second sentence: inference and training share the others


def test_a_scorer_with_nothing_to_score_trains_when_there_is_something_to_train():
    roles = homes(0, 1, 1)
    assert decide(Policy(), view(roles, to_train=3)) == {"n1": "training"}
    assert decide(Policy(), view(roles, to_train=3, scoring=1)) == {}
    assert decide(Policy(), view(roles, to_train=3, to_score=1)) == {}
    assert decide(Policy(), view(roles)) == {}


def test_the_last_scorer_stays_while_answers_are_generated():
    busy = {"running": {"n1": 9}, "generating": 2, "to_train": 3}
    assert decide(Policy(threshold=4), view(homes(1, 1, 1), **busy)) == {}
    assert decide(Policy(threshold=4), view(homes(1, 2, 1), **busy)) == {"n2": "training"}


def test_a_trainer_without_work_scores_when_nobody_else_does():
    policy, home = Policy(lend_owners=True), homes(1, 1, 1)
    roles = {"n1": "rollout", "n2": "training", "n3": "training"}
    common = {"roles": roles, "may": capabilities(policy, home), "running": {"n1": 6}, "generating": 2}
    assert decide(policy, View(**common, to_score=2)) == {"n2": "inference"}
    assert decide(policy, View(**common, to_score=2, training=1)) == {}
    assert decide(policy, View(**{**common, "roles": {**roles, "n2": "inference"}}, to_score=2)) == {}


def test_without_an_inference_role_leavers_train():
    policy = Policy(name="colocated")
    may = capabilities(policy, homes(1, 0, 1))
    roles = dict.fromkeys(may, "rollout")
    moves = decide(policy, View(roles=roles, may=may, running=dict.fromkeys(may, 0), needs_scoring=False, to_train=4))
    assert set(moves.values()) == {"training"}


# --- third sentence: nobody returns


@given(st.integers(1, 40), st.integers(0, 30), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_nobody_returns_to_rollout_while_somebody_generates(live, waiting, to_score, to_train, training, lend):
    policy = Policy(lend_owners=lend)
    may = capabilities(policy, homes(2, 1, 1))
    seen = View(roles={"n1": "rollout", "n2": "training", "n3": "inference", "n4": "training"}, may=may, running={"n1": live},
                waiting=waiting, generating=3, to_score=to_score, to_train=to_train, training=training)
    assert "rollout" not in decide(policy, seen).values()


def test_requests_that_a_fault_left_with_nobody_call_one_node_back():
    roles = {"n1": "training", "n2": "training", "n3": "inference", "n4": "training"}
    left = {"waiting": 2, "generating": 1, "to_train": 3}
    may = capabilities(Policy(), homes(2, 1, 1))
    assert decide(Policy(), View(roles=roles, may=may, **left)) == {"n1": "rollout"}
    lent = Policy(lend_owners=True)
    assert decide(lent, View(roles=roles, may=capabilities(lent, homes(2, 1, 1)), **left)) == {"n3": "rollout"}


# --- properties

policies = st.builds(
    Policy, name=st.sampled_from(["threshold", "colocated"]), threshold=st.sampled_from([1, 2, 8, 32]), lend_owners=st.booleans(),
    min_rollout_nodes=st.integers(1, 3))
splits = st.tuples(st.integers(1, 4), st.integers(0, 2), st.integers(1, 3))


@st.composite
def views(draw) -> tuple[Policy, View]:
    """Any situation of an iteration: roles within what the policy allows, counts that fit together."""
    policy, home = draw(policies), homes(*draw(splits))
    may = capabilities(policy, home)
    roles = {node: draw(st.sampled_from(sorted(may[node]))) for node in home}
    needs_scoring = any("inference" in choices for choices in may.values())
    running = {node: draw(st.integers(0, 12)) for node, role in roles.items() if role == "rollout"}
    waiting = draw(st.integers(0, 12))
    live = waiting + sum(running.values())
    count = st.integers(0, 3)
    scores = (draw(count), draw(count) if "inference" in roles.values() else 0) if needs_scoring else (0, 0)
    training = draw(count) if "training" in roles.values() else 0
    return policy, View(roles=roles, may=may, running=running, waiting=waiting, generating=draw(st.integers(1, live)) if live else 0,
                        needs_scoring=needs_scoring, to_score=scores[0], scoring=scores[1], to_train=draw(count), training=training)


def something_runs(seen: View) -> bool:
    there = set(seen.roles.values())
    return bool(sum(seen.running.values()) or seen.waiting and "rollout" in there or seen.scoring or seen.to_score and "inference" in there
                or seen.training or seen.to_train and "training" in there)


@settings(max_examples=250, deadline=None)
@given(views())
def test_whenever_work_is_left_something_runs_or_somebody_moves(situation):
    policy, seen = situation
    if seen.generating or seen.to_score or seen.scoring or seen.to_train or seen.training:
        assert something_runs(seen) or decide(policy, seen)


@settings(max_examples=250, deadline=None)
@given(views())
def test_moves_are_allowed_and_leave_a_generator_while_requests_live(situation):
    policy, seen = situation
    moves = decide(policy, seen)
    assert all(role in seen.may[node] and role != seen.roles[node] for node, role in moves.items())
    after = {**seen.roles, **moves}
    if seen.waiting + sum(seen.running.values()) and "rollout" in seen.roles.values():
        assert "rollout" in after.values()


# --- whole iterations

NAMED = {
    "threshold": Policy(threshold=4),
    "eager": Policy(threshold=64),
    "lend owners": Policy(threshold=4, lend_owners=True),
    "colocated": Policy(name="colocated"),
    "static": Policy(name="static"),
}


@pytest.mark.parametrize("policy", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("split", [(1, 1, 1), (2, 1, 1), (3, 0, 1), (4, 2, 2)], ids=str)
def test_an_iteration_ends_and_no_node_moves_more_than_a_few_times(policy, split):
    model = Model(policy, homes(*split), Work(groups=12, size=4))
    assert sorted(model.run()) == sorted(model.left)
    assert max(model.flips.values(), default=0) <= MOST_FLIPS
    if policy.name != "static":
        assert model.history, "nobody moved at all"
        assert all("rollout" not in moves.values() for moves in model.history)


def test_an_iteration_on_one_node_takes_the_roles_in_turn():
    model = Model(Policy(name="colocated"), {"n1": "training"})
    model.run()
    assert model.history == [{"n1": "inference"}, {"n1": "training"}]


@pytest.mark.parametrize("policy", ["threshold", "lend owners"])
def test_moving_nodes_are_faster_when_the_trainer_has_most_to_do(policy):
    moving, static = (Model(NAMED[name], homes(3, 1, 1), Work(groups=16, train_ticks=20)) for name in (policy, "static"))
    moving.run()
    static.run()
    assert moving.tick < 0.6 * static.tick


works = st.builds(
    Work, groups=st.integers(1, 8), size=st.integers(1, 4), max_length=st.sampled_from([5, 40, 120]), verify_ticks=st.sampled_from([1, 60]),
    score_ticks=st.sampled_from([1, 3, 10]), train_ticks=st.sampled_from([3, 12]), move_ticks=st.sampled_from([0, 1, 8]), seed=st.integers(0, 99))
faults = st.lists(st.builds(
    Fault, tick=st.integers(0, 150), node=st.integers(0, 8), role=st.sampled_from(ROLES), down=st.integers(1, 60)), max_size=5)


@settings(max_examples=100, deadline=None)
@given(policies, splits, works, faults)
@example(  # the engine dies after the last node has left rollout, while one of its answers is still being verified
    Policy(threshold=2), (2, 0, 1), Work(groups=2, size=2, max_length=30, verify_ticks=60, move_ticks=0, seed=2),
    [Fault(tick=70, node=0, role="rollout", down=10)])
def test_any_iteration_ends_also_when_workers_die(policy, split, work, faults):
    model = Model(policy, homes(*split), work, faults)
    assert sorted(model.run()) == sorted(model.left)
    # A fault can call one node back to its old work, and that node leaves again.
    assert max(model.flips.values(), default=0) <= MOST_FLIPS + 2 * len(faults)
