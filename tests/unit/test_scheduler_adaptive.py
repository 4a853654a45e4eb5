"""The rules of the adaptive policy, one by one, on situations and on whole iterations on paper (a simulated clock)."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.bench.scheduler import ask_adaptive, every_allocation, observe
from dynarl.config.schema import Policy
from dynarl.scheduler import adaptive
from dynarl.scheduler.adaptive import BACK_SHARE, PAYBACK, decide, start_roles
from dynarl.scheduler.allocations import Pool, ladder
from dynarl.scheduler.bound import least_s
from dynarl.scheduler.costs import Costs
from dynarl.scheduler.policy import capabilities
from dynarl.scheduler.policy import start_roles as first_roles
from dynarl.scheduler.replay import Replay, Work
from dynarl.scheduler.situation import Queue, Situation
from dynarl.scheduler.survival import Lengths, fit

POLICY = Policy(name="adaptive", lend_owners=True, dwell_s=0.1)
ROLES = ("rollout", "inference", "training")
ANYTHING = frozenset(ROLES)
STEP, SECONDS = (0.01, 0.001), {"inference": 2e-4, "training": 6e-4}


def known(move_s: float = 0.2) -> Costs:
    costs = Costs()
    observe(costs, STEP, SECONDS, move_s)
    return costs


def lengths(count: int, seed: int = 0, mean: float = 150.0, cap: int = 768) -> list[int]:
    source = random.Random(seed)
    return [min(cap, 1 + int(source.expovariate(1 / mean))) for _ in range(count)]


SURVIVAL = fit(lengths(4000), [], 768)


def seen(
    rollout=4, inference=0, training=0, *, free=0, live=0, to_score=0, to_train=0, size=8, so_far=100, **options
) -> Situation:
    """So many nodes in each role; `live` requests of `so_far` tokens; groups of 1000 tokens that wait."""
    names = [*["rollout"] * rollout, *["inference"] * inference, *["training"] * training, *[None] * free]
    roles = {f"n{i:02}": role for i, role in enumerate(names)}
    generators = [node for node, role in roles.items() if role == "rollout"]
    running = {node: live // rollout + (i < live % rollout) for i, node in enumerate(generators)}
    members = Counter({size: live // size}) + Counter({live % size: 1} if live % size else {})
    queues = {"inference": Queue(to_score, 0, 1000.0 * to_score), "training": Queue(to_train, 0, 1000.0 * to_train)}
    options = {
        "max_running": 128,
        "running": running,
        "lengths": [so_far] * live,
        "live_members": dict(members),
    } | options
    return Situation(roles, dict.fromkeys(roles, ANYTHING), queues, **options)


def ask(situation: Situation, policy: Policy = POLICY, costs: Costs | None = None, **options):
    return decide(policy, situation, SURVIVAL, costs or known(), **options)


def after(situation: Situation, moves: dict[str, str]) -> Counter:
    return Counter({**situation.roles, **moves}.values())


# --- what makes nodes move


def test_when_all_answers_are_there_all_nodes_go_where_the_work_is():
    moves = ask(seen(6, to_score=24)).moves
    assert len(moves) == 6 and set(moves.values()) == {"inference", "training"}


def test_nodes_leave_when_few_requests_are_left_and_groups_wait():
    situation = seen(8, live=6, to_score=20, to_train=20, so_far=60)
    decision = ask(situation)
    assert len(decision.moves) >= 3 and "rollout" not in decision.moves.values()
    assert decision.candidates[decision.chosen].moves == decision.moves
    assert "from rollout to" in decision.reason and "6 live" in decision.reason


def test_nobody_leaves_while_rollout_is_what_takes_the_time():
    assert ask(seen(8, live=8 * 64, to_score=2, so_far=5, max_running=64)).moves == {}


def test_staying_is_always_the_first_candidate():
    for situation in (seen(6, to_score=24), seen(4, live=30, to_score=2), seen(2, 1, 1, live=128)):
        stay = ask(situation).candidates[0]
        assert stay.moves == {} and stay.gain_s == 0.0 and stay.cost_s == 0.0


def test_a_scorer_with_nothing_left_to_score_trains():
    assert ask(seen(0, 2, 2, to_train=40)).moves == dict.fromkeys(["n00", "n01"], "training")


def test_a_trainer_scores_when_nobody_else_does():
    moves = ask(seen(0, 0, 4, to_score=12)).moves
    assert moves and set(moves.values()) == {"inference"} and len(moves) < 4


def test_a_move_must_pay_its_measured_cost():
    situation = seen(8, live=6, to_score=20, to_train=20, so_far=60)
    cheap, dear = ask(situation, costs=known(0.2)), ask(situation, costs=known(60.0))
    assert cheap.moves and not dear.moves
    assert "no move gains more than it costs" in dear.reason
    taken = cheap.candidates[cheap.chosen]
    assert taken.gain_s > PAYBACK * taken.cost_s


def test_what_was_wrong_before_is_trusted_less():
    situation = seen(0, 2, 6, to_train=40, to_score=1)
    sure, unsure = known(), known()
    for costs, actual in ((sure, 10.0), (unsure, 100.0)):
        costs.finish.add(10.0, actual)
    unsure.finish.add(1000.0, 10.0)
    assert unsure.error > 10 > sure.error
    assert ask(seen(8, live=6, to_score=20, to_train=20, so_far=60), costs=sure).moves
    assert not ask(situation, costs=unsure).moves


def test_a_move_that_is_better_later_waits():
    """Groups wait and nodes could train them, but rollout is still full: leaving pays, only not yet."""
    early = ask(seen(4, live=200, to_score=3, so_far=30))
    assert early.moves == {} and "later is better" in early.reason
    assert max(candidate.gain_s for candidate in early.candidates) > 0.3, "so it is not for want of gain"
    assert early.finish_s < early.candidates[0].finish_s
    assert ask(seen(4, live=6, to_score=12, so_far=60)).moves


def test_against_the_pipeline_only_for_a_clear_gain(monkeypatch):
    assert "inference" in ask(seen(0, 1, 9, to_score=60, to_train=9)).moves.values()
    little = seen(0, 1, 9, to_score=8, to_train=40)
    assert ask(little).moves == {}
    monkeypatch.setattr(adaptive, "BACK_SHARE", 0.0)
    assert "inference" in ask(little).moves.values(), "it is that rule which keeps them"


def test_a_stage_of_unknown_speed_is_tried_by_one_instance():
    """From one lease it is known what is guessed wrongly by a factor; until then nobody else leaves for it."""
    ignorant = known()
    ignorant.stages.clear()
    situation = seen(8, live=32, to_score=20, so_far=100)
    early = ask(replace(situation, finished_share=0.4), costs=ignorant)
    assert early.moves == {} and "not seen at work" in early.reason
    late = replace(situation, finished_share=0.6)
    assert list(ask(late, costs=ignorant).moves.values()) == ["inference"]
    there = replace(seen(7, 1, live=32, to_score=20, so_far=100), finished_share=0.6)
    assert ask(there, costs=ignorant).moves == {}, "what it takes is about to be known"
    assert len(ask(replace(late, units={"inference": 2}), costs=ignorant).moves) == 2
    assert ask(seen(8, to_score=24), costs=ignorant).moves, "once all answers are there, nobody has to be asked"


def test_moves_to_different_components_cost_more_where_they_follow_one_another():
    situation = seen(6, to_score=24, to_train=24)
    together, apart = ask(situation), ask(replace(situation, one_by_one=True))
    both = [c.cost_s for c in (*together.candidates, *apart.candidates) if len(set(c.moves.values())) == 2]
    assert min(both) == pytest.approx(0.2) and max(both) == pytest.approx(0.4)


# --- hard rules


@pytest.mark.parametrize("live", [1, 3, 40])
def test_one_generating_node_stays_while_requests_live(live):
    situation = seen(5, live=live, to_score=30, to_train=30, so_far=700)
    assert after(situation, ask(situation).moves)["rollout"] >= 1


def test_min_rollout_nodes_stay_while_requests_live():
    situation = seen(8, live=6, to_score=20, to_train=20, so_far=60)
    policy = Policy(name="adaptive", min_rollout_nodes=7)
    assert (
        after(situation, ask(situation).moves)["rollout"]
        < 7
        == after(situation, ask(situation, policy).moves)["rollout"]
    )


def test_the_last_generating_node_leaves_with_the_last_answer():
    moves = ask(seen(1, 0, 1, to_score=3)).moves
    assert moves.get("n00") == "inference"


def test_the_others_must_hold_all_live_requests():
    """Otherwise requests queue, and the tail, which decides the end, grows."""
    situation = seen(4, live=100, to_score=40, to_train=40, so_far=700, max_running=32)
    assert after(situation, ask(situation).moves)["rollout"] == 4
    roomy = replace(situation, max_running=64)
    assert after(roomy, ask(roomy).moves)["rollout"] in (2, 3)
    assert ask(replace(situation, max_queued=68)).moves, "where requests may queue the forecast alone decides"


def test_the_others_must_hold_the_kv_memory_of_what_lives_and_grows():
    situation = seen(4, live=40, to_score=40, to_train=40, so_far=60)
    assert ask(situation).moves
    tight = replace(situation, kv_tokens=40 * 60 / 3)  # three nodes would hold what is there now, but it grows
    assert ask(tight).moves == {}
    assert "KV memory" in ask(tight).reason


def test_requests_that_wait_for_a_node_count_as_live():
    """Early in an iteration few requests run yet: that is no sign that few are left."""
    few_running = seen(4, live=4, to_score=8, so_far=0)
    assert after(few_running, ask(few_running).moves)["rollout"] < 4
    most_wait = replace(few_running, waiting=250, lengths=[0] * 254, live_members={8: 31, 6: 1})
    assert ask(most_wait).moves == {}


def test_nobody_leaves_before_a_complete_group_waits():
    assert ask(seen(8, live=2, so_far=60)).moves == {}
    one = seen(8, live=2, to_score=1, so_far=60)
    assert len(ask(one).moves) <= 1


def test_nothing_moves_within_the_dwell_time_while_requests_live():
    situation = seen(8, live=6, to_score=20, to_train=20, so_far=60)
    assert ask(situation, since_move_s=0.05).moves == {}
    assert ask(situation, since_move_s=0.15).moves
    assert ask(seen(6, to_score=24), since_move_s=0.05).moves


def test_requests_that_a_fault_left_with_nobody_call_one_node_back_at_once():
    situation = seen(0, 2, 3, live=0, waiting=4, lengths=[50] * 4, live_members={4: 1}, to_train=9)
    decision = ask(situation, since_move_s=0.0)
    moves = decision.moves
    assert list(moves.values()) == ["rollout"] and situation.roles[next(iter(moves))] == "inference"
    # What goes on record: what was taken, and that nothing was forecast that an outcome could be compared with.
    assert decision.candidates[decision.chosen].moves == moves and math.isinf(decision.finish_s)


def test_nodes_go_only_where_they_may():
    situation = seen(6, to_score=24, to_train=24)
    restricted = replace(situation, may={node: frozenset({"rollout", "training"}) for node in situation.roles})
    assert set(ask(restricted).moves.values()) == {"training"}


# --- allocations


def test_a_remainder_stays_in_the_free_pool_and_counts_next_time():
    """Instances of two nodes: three free nodes make one, and with one more node two."""
    queues_full = {"to_train": 40, "units": {"training": 2}}
    one_over = seen(0, 0, 4, free=3, **queues_full)
    assert len(ask(one_over).moves) == 2
    with_one_more = seen(1, 0, 4, free=3, **queues_full)
    assert len(ask(with_one_more).moves) == 4
    # What is in the pool already is not taken from rollout once more.
    left_over = seen(4, 1, 4, free=1, live=4, so_far=60, **queues_full)
    trainers = [node for node, role in ask(left_over).moves.items() if role == "training"]
    assert "n09" in trainers and len(trainers) % 2 == 0


def test_where_everybody_already_trains_nobody_is_given_more():
    assert ask(seen(0, 0, 4, to_train=40)).moves == {}
    assert ask(seen(3, 0, 4, to_train=2)).moves == {}, "two groups keep two nodes busy; there are four"


@pytest.mark.parametrize("nodes", [3, 5, 7, 13])
def test_any_number_of_training_nodes_is_possible(nodes):
    """No list of allowed sizes: groups are leased one by one, so a size need not divide the batch."""
    moves = ask(seen(nodes, 0, 1, to_train=200)).moves
    assert list(moves.values()) == ["training"] * nodes


def test_a_node_more_is_not_taken_when_as_many_rounds_stay():
    """Groups are not split: 6 groups take 3 nodes two rounds, and 4 nodes as well."""
    assert ask(seen(1, 0, 3, to_train=6)).moves == {}
    assert ask(seen(3, 0, 3, to_train=6)).moves


def test_the_least_loaded_leave_first_but_a_straggler_before_them():
    situation = seen(4, live=6, to_score=20, to_train=20, so_far=60, running={"n00": 1, "n01": 0, "n02": 3, "n03": 2})
    pool = Pool(situation)
    assert list(pool.pick({("rollout", "training"): 2})) == ["n00", "n01"]
    assert "n02" in Pool(replace(situation, slow=frozenset({"n02"}))).pick({("rollout", "training"): 1})


def test_moves_are_listed_in_the_order_in_which_their_places_become_free():
    situation = seen(2, 2, 1, free=1)
    moves = Pool(situation).pick({("inference", "training"): 1, ("rollout", "inference"): 1, (None, "training"): 1})
    assert [situation.roles[node] for node in moves] == [None, "rollout", "inference"]


def test_steps_of_change_are_fine_when_small_and_few_when_large():
    assert list(ladder(5)) == [1, 2, 3, 4, 5]
    assert len(list(ladder(4096))) < 25


def test_components_and_their_number_come_from_the_situation():
    stages = {"reward": 1e-4, "critic": 3e-4, "inference": 1e-4, "training": 6e-4}
    work = Work([lengths(8, seed) for seed in range(24)], STEP, stages, 64, 0.2)
    nodes = {f"n{i}": "rollout" for i in range(12)}
    replay = Replay(
        work, nodes, dict.fromkeys(nodes, frozenset({"rollout", *stages})), ask_adaptive(POLICY, work, memory())
    )
    assert replay.run() < 2 * least_s(work, 12)
    assert {role for _, moves in replay.history for role in moves.values()} == set(stages)


# --- the same for the same; nothing for noise


def test_the_order_in_which_nodes_are_named_does_not_matter():
    situation = seen(6, 1, 2, live=9, to_score=12, to_train=15, so_far=300)
    turned = replace(
        situation, roles=dict(reversed(situation.roles.items())), lengths=list(reversed(situation.lengths))
    )
    assert ask(situation) == ask(situation)
    assert ask(turned).moves == ask(situation).moves


def test_noise_in_what_is_measured_moves_nobody_back_and_forth():
    for seed in range(3):
        source = random.Random(seed)
        work = Work([lengths(8, 50 * seed + g) for g in range(32)], STEP, SECONDS, 64, 0.2)
        past = memory()

        costs = known()

        def noisy(replay):
            for running in (4, 32):
                costs.step.observe(running, (STEP[0] + STEP[1] * running) * source.uniform(0.7, 1.4))
            for stage, rate in costs.stages.items():
                rate.observe(1000, 1000 * SECONDS[stage] * source.uniform(0.7, 1.4))
            costs.moves.observe("rollout", "training", 0.2 * source.uniform(0.5, 3.0))
            situation = replay.situation()
            return decide(POLICY, situation, past.survival(situation.lengths), costs, replay.t - replay.moved_at).moves

        replay = Replay(work, dict.fromkeys(home(), "rollout"), dict.fromkeys(home(), ANYTHING), noisy)
        replay.run()
        flips = Counter(node for _, moves in replay.history for node in moves)
        assert max(flips.values()) <= 3, "to inference, to training, and once more at most"
        assert all("rollout" not in moves.values() for _, moves in replay.history)


# --- the beginning of an iteration


def fresh(home_roles: dict[str, str], may, groups: int = 48) -> Situation:
    return Situation(
        home_roles,
        may,
        {"inference": Queue(), "training": Queue()},
        waiting=groups * 8,
        lengths=[0] * (groups * 8),
        live_members={8: groups},
        max_running=96,
    )


def home(rollout: int = 6, inference: int = 1, training: int = 1) -> dict[str, str]:
    roles = ["rollout"] * rollout + ["inference"] * inference + ["training"] * training
    return {f"n{i}": role for i, role in enumerate(roles)}


def memory(cap: int = 768) -> Lengths:
    past = Lengths(cap)
    for length in lengths(400, seed=99, cap=cap):
        past.finished(length)
    return past


def test_all_begin_by_generating_where_owners_may_and_it_ends_earlier():
    may = capabilities(POLICY, home())
    assert set(start_roles(POLICY, home(), fresh(home(), may), SURVIVAL, known()).values()) == {"rollout"}


def test_nodes_that_may_not_generate_begin_at_home():
    policy = Policy(name="adaptive")
    may = capabilities(policy, home())
    assert start_roles(policy, home(), fresh(home(), may), SURVIVAL, known()) == home()


@pytest.mark.parametrize("lend", [False, True])
def test_every_part_agrees_on_what_a_node_may_be(lend):
    policy = Policy(name="adaptive", lend_owners=lend)
    may = capabilities(policy, home())
    assert all(role in may[node] for node, role in first_roles(policy, home()).items())
    begun = start_roles(policy, home(), fresh(home(), may), SURVIVAL, known())
    assert all(role in may[node] for node, role in begun.items())


# --- properties

situations = st.builds(
    seen,
    st.integers(1, 9),
    st.integers(0, 4),
    st.integers(0, 4),
    free=st.integers(0, 2),
    live=st.integers(0, 120),
    to_score=st.integers(0, 30),
    to_train=st.integers(0, 30),
    so_far=st.integers(0, 760),
    max_running=st.sampled_from([8, 32, 128]),
)


@settings(max_examples=150, deadline=None)
@given(situations, st.sampled_from([0.05, 1.0]))
def test_of_any_decision(situation, move_s):
    """Nodes are neither made nor lost, rollout is not left empty, staying is among the candidates, moves pay, work goes on."""
    decision = ask(situation, costs=known(move_s))
    assert set(decision.moves) <= set(situation.roles)
    assert all(role in situation.may[node] and role != situation.roles[node] for node, role in decision.moves.items())
    left = after(situation, decision.moves)
    assert sum(left.values()) == len(situation.roles)
    assert not situation.live or left["rollout"] >= 1
    assert decision.candidates[0].moves == {}
    taken = decision.candidates[decision.chosen]
    assert taken.moves == decision.moves
    assert not decision.moves or taken.gain_s > PAYBACK * taken.cost_s
    if situation.live:
        leavers = sum(situation.roles[node] == "rollout" for node in decision.moves)
        assert leavers <= situation.queues["inference"].waiting + situation.queues["training"].waiting
    stuck = not situation.live and (
        situation.queues["inference"].groups
        and not left["inference"]
        or situation.queues["training"].groups
        and not situation.queues["inference"].groups
        and not left["training"]
    )
    assert not stuck, decision.reason


@settings(max_examples=15, deadline=None)
@given(situations)
def test_nothing_is_missed_that_all_allocations_would_show(situation):
    """But what a return to rollout gains and BACK_SHARE does not let it have."""
    found, best = ask(situation), ask(situation, allocations=every_allocation)
    assert found.finish_s <= best.finish_s * (1.02 + BACK_SHARE) + 0.2


works = st.builds(
    lambda groups, size, seed, training, move: Work(
        [lengths(size, 100 * seed + g, cap=768) for g in range(groups)],
        STEP,
        {"inference": 2e-4, "training": training},
        64,
        move,
    ),
    st.integers(1, 12),
    st.integers(2, 8),
    st.integers(0, 99),
    st.sampled_from([1e-4, 2e-3]),
    st.sampled_from([0.05, 0.5]),
)


@settings(max_examples=25, deadline=None)
@given(works, st.integers(1, 4), st.integers(0, 1), st.integers(1, 2), st.booleans())
def test_any_iteration_ends_with_all_groups_trained_and_few_moves(work, rollout, inference, training, lend):
    """Tiny batches too: there is no threshold that could be 0 or more than there is."""
    policy = Policy(name="adaptive", lend_owners=lend, dwell_s=0.1)
    homes = home(rollout, inference, training)
    may = capabilities(policy, homes)
    if not any("inference" in choices for choices in may.values()):
        work = replace(work, stages={"training": work.stages["training"]})
    roles = first_roles(policy, homes)
    replay = Replay(work, roles, may, ask_adaptive(policy, work, memory()))
    elsewhere = sum(role != "rollout" for role in roles.values())
    assert replay.run() >= least_s(work, len(homes), elsewhere) - 1e-6
    assert max(Counter(node for _, moves in replay.history for node in moves).values(), default=0) <= 4


def test_it_is_faster_than_the_other_policies_on_paper():
    from dynarl.bench.scheduler import iteration_quality

    found = iteration_quality(3)
    assert found["adaptive_s"] < 1.02 * min(found["threshold_s"], found["colocated_s"])
    assert found["bound_s"] <= found["clairvoyant_s"] and found["adaptive_s"] < 1.1 * found["clairvoyant_s"]


# --- nodes that the next optimizer step needs


def test_nodes_that_the_next_step_needs_leave_generation_first_and_for_its_component():
    bound = frozenset({"n03", "n05"})
    moves = Pool(seen(6, live=60, to_train=9, bound=bound)).pick({("rollout", "training"): 2})
    assert moves.keys() == bound
    moves = Pool(seen(6, live=60, to_score=9, bound=bound)).pick({("rollout", "inference"): 4})
    assert not moves.keys() & bound


def test_nodes_that_the_next_step_needs_do_not_return_to_generation():
    situation = seen(1, 0, 5, live=600, bound=frozenset(f"n{i:02}" for i in range(1, 6)))
    assert "rollout" not in ask(situation).moves.values()
    free_to_return = ask(seen(1, 0, 5, live=600))
    assert "rollout" in free_to_return.moves.values()


def test_nodes_that_the_next_step_needs_return_where_nobody_else_generates():
    situation = seen(0, 0, 3, bound=frozenset(("n00", "n01", "n02")), waiting=4, lengths=[0] * 4, live_members={4: 1})
    assert list(ask(situation).moves.values()) == ["rollout"]


def test_nodes_without_requests_leave_while_another_generates_on():
    """Their share of its requests would have to be moved to them; groups that wait need nothing to be moved."""
    alone = {"n00": 40, "n01": 0, "n02": 0, "n03": 0}
    situation = seen(live=40, to_score=6, to_train=6, running=alone)
    decision = decide(POLICY, situation, SURVIVAL, known())
    assert decision.moves and "n00" not in decision.moves
    shared = decide(POLICY, replace(situation, running=dict.fromkeys(alone, 10)), SURVIVAL, known())
    assert not shared.moves
    assert shared.candidates[0].finish_s < decision.candidates[0].finish_s, "four nodes generate faster than one"


def test_no_node_returns_to_generation_while_one_there_has_no_requests():
    situation = seen(2, 0, 4, live=100, so_far=10, to_train=4, running={"n00": 100, "n01": 0})
    assert "rollout" not in ask(situation).moves.values()
    shared = replace(situation, running={"n00": 50, "n01": 50})
    assert "rollout" in ask(shared).moves.values()
