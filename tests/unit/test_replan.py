"""When a plan is off, and which split of the nodes is made then."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_controller_state import Fleet, checkpoint, job

from dynarl.config.schema import Cluster, Config, Plan, Policy, Run, Split
from dynarl.controller.nodes import with_inference
from dynarl.errors import ConfigError
from dynarl.scheduler.costs import StepTime
from dynarl.scheduler.replan import LEAST_GAIN, Proposal, Seen, Watch, propose

PLANNED = {"rollout": 10.0, "training": 5.0}


def step_time() -> StepTime:
    """10 ms and 2 ms for each request."""
    step = StepTime()
    for running in (1, 4, 8, 2, 16, 8) * 8:
        step.observe(running, 0.010 + 0.002 * running)
    return step


def seen(nodes: dict[str, int], work_s: dict[str, float], **other) -> Seen:
    """work_s: of all of a stage's work on one node."""
    seconds = {name: work_s[name] / count for name, count in nodes.items()}
    return Seen(**{"seconds": seconds, "nodes": nodes, "items": 32, "requests": 256, "tokens": 25600, "longest": 200, "most": 16} | other)


@given(st.lists(st.floats(4.3, 5.7), min_size=1, max_size=9), st.integers(1, 4))
def test_a_plan_that_is_kept_within_the_tolerance_is_not_off(trained, window):
    watch = Watch(PLANNED, 0.15, window)
    for seconds in trained:
        watch.note({"rollout": 10.0, "training": seconds})
        assert watch.deviations() == {}


@given(st.lists(st.sampled_from([3.0, 5.0, 8.0]), min_size=1, max_size=12), st.integers(1, 4))
def test_a_stage_is_off_after_a_whole_window_in_one_direction(trained, window):
    watch = Watch(PLANNED, 0.15, window)
    for number, seconds in enumerate(trained, 1):
        watch.note({"rollout": 10.0, "training": seconds})
        last = trained[max(0, number - window):number]
        assert bool(watch.deviations()) == (number >= window and (set(last) == {3.0} or set(last) == {8.0}))


def test_a_stage_that_has_no_nodes_of_its_own_is_not_held_against_the_plan():
    watch = Watch(PLANNED | {"inference": 2.0}, 0.15, 1)
    watch.note(PLANNED)
    assert watch.deviations() == {}
    watch.note(PLANNED | {"inference": 0.0})
    assert watch.deviations() == {"inference": -1.0}


def test_after_another_plan_a_window_has_to_pass_again():
    watch = Watch(PLANNED, 0.15, 1)
    watch.note({"rollout": 20.0, "training": 5.0})
    assert watch.deviations() == {"rollout": 1.0} and watch.measured() == {"rollout": 20.0, "training": 5.0}
    watch.plan(watch.measured())
    assert not watch.is_full and watch.deviations() == {}
    watch.note({"rollout": 20.0, "training": 5.0})
    assert watch.deviations() == {}


def test_nodes_go_to_the_stage_that_holds_the_others_up():
    found = propose(seen({"rollout": 1, "training": 7}, {"rollout": 60.0, "training": 4.0}), step_time(), {})
    assert found.nodes["rollout"] >= 6 and found.nodes["training"] >= 1 and sum(found.nodes.values()) == 8
    assert found.gain_s > 0.5 * found.now_s and found.pays(iterations_left=10, cost_s=5.0)
    back = propose(seen({"rollout": 7, "training": 1}, {"rollout": 6.0, "training": 60.0}), step_time(), {})
    assert back.nodes["training"] > 3


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 6), st.floats(0.1, 100), st.floats(0.01, 50), st.floats(0.01, 100),
       st.sampled_from([{}, {"inference": 4, "training": 32}, {"training": 3}]))
def test_what_is_proposed_is_never_forecast_to_be_slower_and_uses_every_node(rollout, inference, training, r_s, i_s, t_s, chunks):
    nodes = {"rollout": rollout, "inference": inference, "training": training}
    found = propose(seen(nodes, {"rollout": r_s, "inference": i_s, "training": t_s}), step_time(), chunks)
    assert sum(found.nodes.values()) == sum(nodes.values()) and min(found.nodes.values()) >= 1
    assert found.gain_s >= 0 and (found.nodes == nodes) == (found.gain_s == 0)


def test_the_longest_answer_takes_its_time_on_however_many_nodes():
    found = propose(seen({"rollout": 4, "training": 4}, {"rollout": 4.0, "training": 8.0}, longest=5000), step_time(), {})
    assert found.nodes["rollout"] < 4, "more nodes would not help rollout"


def test_optimizer_steps_take_as_long_on_more_nodes():
    slow = seen({"rollout": 4, "training": 1}, {"rollout": 8.0, "training": 4.0}, step_s=3.9)
    assert not propose(slow, step_time(), {}).pays(iterations_left=1000, cost_s=5.0)
    assert propose(slow._replace(step_s=0.0), step_time(), {}).pays(iterations_left=1000, cost_s=5.0)


def test_a_change_has_to_save_more_than_it_costs_and_than_forecasts_are_wrong_by():
    proposal = Proposal({}, {}, now_s=10.0, then_s=9.0)
    assert proposal.pays(iterations_left=6, cost_s=5.0) and not proposal.pays(iterations_left=5, cost_s=5.0)
    assert not Proposal({}, {}, now_s=10.0, then_s=10.0 * (1 - 0.9 * LEAST_GAIN)).pays(iterations_left=10**6, cost_s=5.0)


@given(st.lists(st.sampled_from(["rollout", "inference", "training"]), min_size=1, max_size=8), st.integers(0, 8))
def test_inference_gets_the_nodes_that_it_is_to_have_from_those_that_generate(roles, wanted):
    home = {f"n{index}": role for index, role in enumerate(roles)}
    if wanted > len(roles) - roles.count("training"):
        with pytest.raises(ConfigError, match=f"{wanted} nodes for inference"):
            with_inference(home, wanted)
        return
    found = with_inference(home, wanted)
    assert list(found) == list(home) and list(found.values()).count("inference") == wanted
    assert [n for n, role in found.items() if role == "training"] == [n for n, role in home.items() if role == "training"]
    changed = sum(found[node] != role for node, role in home.items())
    assert changed == abs(wanted - roles.count("inference")), "no more nodes change than have to"


# --- the controller's part


def replanning(tmp_path, **plan):
    """A job of n1 (training), n2 (inference), n3 and n4 (rollout) that plans again, and one iteration as it ended."""
    config = Config(run=Run(iterations=100), policy=Policy(name="static"), plan=Plan(replan=True, window=1, **plan))
    made = job(tmp_path, config, Fleet())
    made._rewind(None)
    made.epochs = SimpleNamespace(home=made.home)
    group = SimpleNamespace(samples=["1:0:0"], tokens={"1:0:0": 100})
    run = SimpleNamespace(tally=SimpleNamespace(generated_at=20.0, started=0.0), ledger=SimpleNamespace(groups={"1:0": group}))
    made.monitor.worked.update({"inference": 8.0, "training": 1.0})
    return made, run


def test_inference_nodes_get_another_home_role_and_a_restart_knows_of_it(tmp_path):
    made, run = replanning(tmp_path, stage_s={"rollout": 20.0, "inference": 1.0})
    assert made.replanner.note(run, [{"seconds": 0.5}]) == {
        "timing_s/stage/rollout": 20.0, "timing_s/stage/inference": 8.0, "timing_s/stage/training": 1.5}
    made.monitor.worked["inference"] = 80.0
    made.replanner.note(run, [{"seconds": 0.5}])
    asyncio.run(made.replanner.before(2))
    [told] = made.journal.of("replanned")
    assert told["state"] == "committed" and told["off"] == {"inference": 79.0} and told["proposed"]["inference"] > 1
    assert made.home == told["home"] and list(made.home.values()).count("inference") == told["proposed"]["inference"]
    assert made.offers == {node: frozenset({role}) for node, role in made.home.items()}
    restarted = job_again(tmp_path, made)
    assert restarted.home == made.home and restarted.recut._wanted(5) == made.recut._wanted(5)


def job_again(tmp_path, made):
    (tmp_path / "again").mkdir()
    restarted = job(tmp_path / "again", made.config)
    restarted._rewind(checkpoint(tmp_path, iteration=2, plan=made.progress.plan, layout=made.progress.layout))
    return restarted


def test_a_plan_that_holds_is_not_made_again_and_one_that_cannot_be_better_is_kept(tmp_path):
    made, run = replanning(tmp_path, stage_s={"rollout": 20.0, "inference": 8.0, "training": 1.5})
    made.replanner.note(run, [{"seconds": 0.5}])
    asyncio.run(made.replanner.before(2))
    assert not made.journal.of("replanned")
    made.monitor.worked.update({"inference": -7.9})
    made.replanner.note(run, [{"seconds": 0.5}])
    asyncio.run(made.replanner.before(3))
    [told] = made.journal.of("replanned")
    assert told["state"] == "kept" and "inference" in told["off"] and made.home["n2"] == "inference"
    made.replanner.note(run, [{"seconds": 0.5}])
    asyncio.run(made.replanner.before(4))
    assert len(made.journal.of("replanned")) == 1, "what was measured is expected from then on"


def test_a_trainer_that_cannot_change_keeps_its_nodes(tmp_path):
    made, run = replanning(tmp_path, stage_s={"training": 1.0})
    made.monitor.worked["training"] = 500.0

    async def refuse(number):
        pass

    made.recut.before = refuse
    before = dict(made.home)
    made.replanner.note(run, [{"seconds": 0.5}])
    asyncio.run(made.replanner.before(2))
    [told] = made.journal.of("replanned")
    assert told["state"] == "cancelled" and "could not change to layout tp=1,pp=1,nodes=" in told["reason"]
    assert made.home == before == made.trainer.home and made.progress.plan == {} and made.trainer.base_home == before


def test_without_replan_nothing_is_planned(tmp_path):
    config = Config(cluster=Cluster(nodes=4), split=Split(), plan=Plan(stage_s={"rollout": 1.0}, window=1))
    made = job(tmp_path, config)
    made._rewind(None)
    asyncio.run(made.replanner.before(2))
    assert not made.journal.of("replanned")
