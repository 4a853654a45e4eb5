"""An iteration with the real ledger, policy and epochs on a pretended cluster. What the optimizer step would add up must be
every sample of the step, once."""

import asyncio
import gc
import itertools
import time
from collections import Counter

import msgspec
import pytest
from pretend_cluster import TURN, WEIGHTS, Cluster, VirtualTime

from dynarl import wire
from dynarl.config.schema import Algorithm, Config, Dataflow, Policy, Rollout
from dynarl.controller import requests, router
from dynarl.controller.epochs import Epochs, Outcome, Weights
from dynarl.controller.fleet import StepLost
from dynarl.controller.iteration import Iteration
from dynarl.controller.telemetry import Monitor
from dynarl.dataflow import speeds
from dynarl.dataflow.minibatches import Minibatch
from dynarl.hypergraph import journal
from dynarl.hypergraph.check import check
from dynarl.scheduler.policy import View, capabilities, start_roles
from dynarl.wire import CallError

DECIDES_S = 2e-5  # what each decision takes, on every machine


def describe(log, home, may, policy):
    """On record as a controller has it, so that moves are held against the rules."""
    log.append("run_started", run="r", config={"policy": msgspec.to_builtins(policy)}, nodes=list(home))
    for rank, (node, role) in enumerate(home.items()):
        log.append("agent_up", node=node, rank=rank, home=role)
        for each in may[node]:
            log.append("worker_up", node=node, role=each, device=0)
    log.append("step_launched", nodes=list(home))
    log.append("epoch_committed", epoch=0, roles=home, moves=[])
    start = start_roles(policy, home)
    moves = [{"node": n, "source": home[n], "target": role} for n, role in start.items() if role != home[n]]
    log.append("epoch_proposed", epoch=1, moves=moves)
    log.append("epoch_committed", epoch=1, roles=start, moves=moves)


def run(home: dict[str, str], policy: Policy, seed: int, tmp_path, *, chaos_share=0.0, reaped=False, minibatches=1, membership="fixed",
        groups=8, size=3, slow=(), max_running=8, longest=30, chunk=None, limit_s=10.0, decides_s=DECIDES_S):
    """One iteration. Returns the cluster, after the checks that hold for every iteration. `reaped`: idle workers die, too;
    slow: nodes that take five times as long for a token."""
    samples = [wire.sample_id(1, g, m) for g in range(groups) for m in range(size)]
    may = capabilities(policy, home)
    cluster = Cluster(start_roles(policy, home), seed, chaos_share, longest)
    log = journal.Journal(tmp_path / f"journal-{seed}-{chaos_share}.jsonl")
    describe(log, home, may, policy)

    async def go():
        epochs = Epochs(cluster, log, home, policy.vote_timeout_s, first_epoch=1)
        epochs.roles = start_roles(policy, home)
        config = Config(policy=policy, rollout=Rollout(max_running=max_running), algorithm=Algorithm(
            prompts_per_step=groups, group_size=size, minibatches=minibatches, membership=membership,
            max_response_tokens=cluster.longest, normalize_std=False), dataflow=Dataflow(chunk=chunk or {}))
        iteration = cluster.iteration = Iteration(
            config, cluster, epochs, WEIGHTS, may, cluster.down, samples,
            scored_by_inference=any("inference" in choices for choices in may.values()),
            monitor=Monitor(config, log, clock=asyncio.get_running_loop().time, stopwatch=itertools.count(0.0, decides_s).__next__))
        for name in slow:
            cluster.agents[name].slowness = 5.0
        cluster.spawn(cluster.report())
        cluster.batches = []
        if reaped:
            cluster.spawn(cluster.reap(may))
        for index in range(minibatches):
            await iteration.accumulate(index)
            owners = {n for n, role in home.items() if role == "training"}
            batch = await iteration.awake(index, owners)
            cluster.batches.append([group.name for group in batch])
            needed = owners | {group.node for group in batch}  # else what they hold would be out of the step's reach
            assert all(cluster.agents[n].active == "training" for n in needed)
            assert iteration.results.stats(batch) == {"tokens": float(len(batch))}, "of this step alone"
            total = Counter()
            for node in {group.node for group in batch}:
                total += cluster.agents[node].buffer
            assert total == Counter(s for group in batch for s in group.samples), "the step would not be over its groups"
            assert sorted(iteration.ledger.trained(batch)) == sorted(total)
            sampled = sum(cluster.lengths(s) - cluster.lengths(s) // TURN for s in total)
            assert iteration.results.counted_tokens(batch) == sampled, "what tools wrote does not count"
            if policy.switching == "node" and index + 1 < minibatches:
                switched = cluster.switched.total()
                async with iteration.going_on():
                    await asyncio.sleep(0.05)  # the optimizer steps, new weights go to the nodes
                assert cluster.switched.total() == switched, "a node switched while the weights changed"
            for node in cluster.agents.values():
                node.buffer.clear()
        assert all(cluster.agents[n].active == r for n, r in epochs.roles.items())
        assert iteration.ledger.done and not iteration.ledger.num_live and iteration.role_changes.current is None
        assert Counter(name for batch in cluster.batches for name in batch) == Counter([*iteration.ledger.groups])
        # Nothing is left behind for the next iteration to find.
        assert iteration.ledger.num_live == 0 and not any(node.requests for node in cluster.agents.values())
        assert not any(iteration.leases.at.values()) and not any(any(node.work.values()) for node in cluster.agents.values())
        # What a dead worker had accumulated was trained, and counted, again: not twice.
        assert iteration.results.stats() == {"tokens": float(groups)}
        cluster.switches = iteration.tally.switches
        assert not [r for r in journal.read(log.path) if r["type"] == "epoch_refused"]
        assert check(log.graph, iteration.ledger.num_live) == []
        for task in [*cluster.tasks]:
            task.cancel()

    async def limited():
        async with asyncio.timeout(limit_s):
            await go()

    try:
        with asyncio.Runner(loop_factory=VirtualTime) as runner:
            runner.run(limited())
    except TimeoutError:
        ledger = cluster.iteration.ledger
        pytest.fail(f"no end after {limit_s} s: {Counter(g.state for g in ledger.groups.values())}, waiting {ledger.waiting()}, "
                    f"running {ledger.running}, in engines { {n: a.requests for n, a in cluster.agents.items()} }, "
                    f"leases {cluster.iteration.leases.at}, down {cluster.down}, faults {cluster.faults}")
    finally:
        log.close()
    return cluster


def homes(rollout: int, inference: int, training: int) -> dict[str, str]:
    roles = ["rollout"] * rollout + ["inference"] * inference + ["training"] * training
    return {f"n{index}": role for index, role in enumerate(roles, 1)}


POLICIES = {
    "threshold": (homes(2, 1, 1), Policy(threshold=6, dwell_s=0.0)),
    "eager": (homes(4, 0, 1), Policy(threshold=64, dwell_s=0.0)),
    "no inference": (homes(3, 0, 1), Policy(threshold=6, dwell_s=0.0)),
    "lend owners": (homes(2, 1, 1), Policy(threshold=6, dwell_s=0.0, lend_owners=True)),
    "colocated": (homes(1, 1, 1), Policy(name="colocated", dwell_s=0.0)),
    "adaptive": (homes(2, 1, 1), Policy(name="adaptive", dwell_s=0.0)),
    "adaptive, lend owners": (homes(4, 1, 1), Policy(name="adaptive", dwell_s=0.0, lend_owners=True)),
    "by node": (homes(2, 1, 1), Policy(name="colocated", switching="node", dwell_s=0.0)),
    "one node by itself": ({"n1": "training"}, Policy(name="colocated", switching="node", dwell_s=0.0)),
    "in turn": (homes(1, 1, 1), Policy(name="in_turn", dwell_s=0.0)),
    "published": (homes(4, 2, 2), Policy(name="published", threshold=6, trigger=0.4, dwell_s=0.0)),
    "even shares": (homes(1, 1, 1), Policy(name="in_turn", shares="even", dwell_s=0.0)),
    "published, even shares": (homes(4, 1, 1), Policy(name="published", threshold=6, shares="even", dwell_s=0.0)),
    "one node": ({"n1": "training"}, Policy(name="colocated", dwell_s=0.0)),
    "static": (homes(1, 1, 1), Policy(name="static")),
}


@pytest.mark.parametrize("home, policy", POLICIES.values(), ids=POLICIES)
def test_an_iteration_trains_every_sample_once(home, policy, tmp_path):
    cluster = run(home, policy, 1, tmp_path)
    moved = any(outcome.committed for outcome in cluster.switches)
    # Adaptive stays here if it likes: everything is over in less time than it takes a move to cost.
    assert policy.name == "adaptive" or moved == (policy.name != "static")


CHUNKS = ({"trajectories": 3}, {"scored": 3}, {"trajectories": 5, "scored": 2}, {"trajectories": "all", "scored": "all"})


@pytest.mark.parametrize("home, policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("chunk", CHUNKS, ids=str)
@pytest.mark.parametrize("minibatches, chaos_share", [(1, 0.0), (4, 0.05)])
def test_whatever_the_chunks_every_sample_is_trained_once(home, policy, chunk, minibatches, chaos_share, tmp_path):
    run(home, policy, 1, tmp_path, chunk=chunk, minibatches=minibatches, chaos_share=chaos_share)


@pytest.mark.parametrize("policy", [Policy(name="static"), Policy(name="colocated", dwell_s=0.0)], ids=lambda p: p.name)
def test_components_whose_channels_hold_everything_back_work_in_turn(policy, tmp_path):
    begun = run(homes(2, 1, 1), policy, 1, tmp_path, chunk={"trajectories": "all", "scored": "all"}).begun
    assert not begun["inference"]["generating"] and not begun["training"]["generated"] + begun["training"]["scoring"]
    assert run(homes(2, 1, 1), Policy(name="static"), 1, tmp_path).begun["training"]["generating"], "chunks of one are not held back"


def test_nodes_that_switch_by_themselves_do_not_wait_for_the_others(tmp_path):
    policy = Policy(name="colocated", switching="node", dwell_s=0.0, rebalance=False)
    cluster = run(homes(2, 1, 1), policy, 1, tmp_path, slow=("n1",))
    assert cluster.begun["inference"]["generating"], "others score while a slow node generates"
    assert cluster.switched and not cluster.faults.total()
    together = run(homes(2, 1, 1), msgspec.structs.replace(policy, switching="job"), 1, tmp_path, slow=("n1",))
    assert not together.begun["inference"]["generating"] and not together.switched


def test_nodes_that_switch_by_themselves_do_it_once_per_role_where_everything_is_held_back(tmp_path):
    policy = Policy(name="colocated", switching="node", dwell_s=0.0)
    cluster = run(homes(2, 1, 1), policy, 1, tmp_path, chunk={"trajectories": "all", "scored": "all"}, groups=16)
    assert set(cluster.switched.values()) == {1}


def test_a_node_that_is_given_another_role_gets_work_of_it_at_once(tmp_path):
    """Not only when it is time to look again, though nothing happens: that would be a second later."""
    run(*POLICIES["one node by itself"], 1, tmp_path, limit_s=0.8)


@pytest.mark.parametrize("seed", range(8))
def test_nobody_switches_while_the_weights_change(seed, tmp_path):
    """Early minibatches are trained while slow nodes still generate what the others are about to score."""
    policy = Policy(name="colocated", switching="node", dwell_s=0.0, rebalance=False)
    run(homes(2, 1, 1), policy, seed, tmp_path, minibatches=8, membership="completion", groups=32, size=2, slow=("n1", "n3"), longest=60)


@pytest.mark.parametrize("home, seed", [(homes(2, 1, 1), 2), (homes(2, 1, 1), 13), (homes(3, 0, 2), 1), (homes(3, 0, 2), 8)])
def test_gradients_that_are_lost_while_all_hold_still_for_the_step_are_made_again(home, seed, monkeypatch, tmp_path):
    """By whoever is free: those that had made them may be given work of another role by then."""
    awake = Iteration.awake

    async def die(cluster):
        await asyncio.sleep(0.03)
        for node in cluster.agents.values():
            if node.buffer and "training" not in node.dead:
                cluster.kill(node, "training")

    async def awake_with_deaths(self, index, owners):
        deaths = asyncio.ensure_future(die(self.requests._fleet))
        try:
            return await awake(self, index, owners)
        finally:
            deaths.cancel()

    monkeypatch.setattr(Iteration, "awake", awake_with_deaths)
    policy, slow = Policy(name="colocated", switching="node", dwell_s=0.0, rebalance=False), [n for n, r in home.items() if r == "training"]
    run(home, policy, seed, tmp_path, minibatches=4, membership="completion", groups=32, size=2, slow=slow, longest=60)


@pytest.fixture
def often(monkeypatch):
    """Rebalancing and measurements in the time scale of the pretended cluster."""
    monkeypatch.setattr(requests, "REBALANCE_S", 0.004)
    monkeypatch.setattr(router, "FIRST_MOVE_S", 0.001)
    monkeypatch.setattr(speeds, "LEAST_S", 0.003)


@pytest.mark.parametrize("minibatches", [1, 2, 4])
@pytest.mark.parametrize("policy", ["threshold", "adaptive", "static", "colocated", "in turn", "published, even shares"])
def test_a_minibatch_of_fixed_membership_has_its_prompts_in_order(policy, minibatches, tmp_path):
    cluster = run(*POLICIES[policy], 2, tmp_path, minibatches=minibatches)
    assert [name for batch in cluster.batches for name in batch] == list(cluster.iteration.ledger.groups)


@pytest.mark.parametrize("minibatches", [1, 2, 4])
@pytest.mark.parametrize("policy", ["threshold", "adaptive", "static", "colocated", "in turn", "published, even shares"])
def test_a_minibatch_by_completion_has_the_first_complete_groups_once_each(policy, minibatches, tmp_path):
    cluster = run(*POLICIES[policy], 2, tmp_path, minibatches=minibatches, membership="completion")
    assert [name for batch in cluster.batches for name in batch] == [*cluster.iteration.results._advantages]


def test_a_step_waits_for_an_owner_that_alone_still_generates(tmp_path):
    """The others have left rollout and hold the gradients of the third minibatch; it lasts until the fourth is made."""
    policy = Policy(threshold=8, dwell_s=0.0, lend_owners=True)
    for seed in range(8):
        run(homes(2, 0, 1), policy, seed, tmp_path, minibatches=4, membership="completion", max_running=24, longest=60)


def test_minibatches_by_completion_lean_towards_short_answers(tmp_path):
    cluster = run(*POLICIES["static"], 3, tmp_path, minibatches=4, membership="completion", groups=32, size=2, max_running=64)
    tokens = [sum(cluster.iteration.ledger.groups[name].num_tokens for name in batch) for batch in cluster.batches]
    assert sum(tokens[2:]) > 1.3 * sum(tokens[:2])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("chaos_share", [0.0, 0.06])
def test_requests_that_move_between_rollout_nodes_are_trained_once(seed, chaos_share, often, tmp_path):
    cluster = run(homes(3, 0, 1), Policy(name="static"), seed, tmp_path, chaos_share=chaos_share, slow=["n1"], groups=16,
                  max_running=64, minibatches=2, membership="completion" if seed % 2 else "fixed", longest=90)
    assert cluster.relocated or chaos_share, "nothing moved, so this shows nothing"
    assert cluster.iteration.requests.num_moved <= cluster.relocated.total()
    # Each with its finished fellows wherever those are: the ledger knows the holder of every sample.
    spread = [group for group in cluster.iteration.ledger.groups.values() if cluster.relocated.keys() & set(group.samples)]
    assert any(len(set(group.holders.values())) > 1 for group in spread) or chaos_share


def test_requests_stay_where_they_are_if_rebalancing_is_off(often, tmp_path):
    cluster = run(homes(3, 0, 1), Policy(name="static", rebalance=False), 0, tmp_path, slow=["n1"], groups=16, max_running=64)
    assert not cluster.relocated


def test_requests_move_while_others_change_roles_and_are_trained_once(often, tmp_path):
    moved = 0
    for seed in range(16):
        cluster = run(homes(4, 1, 1), Policy(threshold=6, dwell_s=0.0), seed, tmp_path, slow=["n1", "n2"], groups=16, max_running=64,
                      chaos_share=0.02, longest=90)
        moved += sum(cluster.relocated.values())
    assert moved


@pytest.mark.parametrize("minibatches", [1, 2])
def test_one_and_two_minibatches_end_with_nothing_on_its_way(minibatches, tmp_path):
    cluster = run(*POLICIES["threshold"], 3, tmp_path, minibatches=minibatches)
    assert not any(node.requests or any(node.work.values()) for node in cluster.agents.values())
    assert cluster.iteration.leases.at == {} and cluster.iteration.hand_outs.leaving == set()


def test_nodes_that_get_no_request_hold_nothing_up(tmp_path):
    run(homes(6, 1, 1), Policy(threshold=1, dwell_s=0.0), 4, tmp_path, groups=1, size=2)


@pytest.mark.parametrize("late", ["rollout", "inference"])
def test_an_iteration_waits_for_its_straggler(late, tmp_path, monkeypatch):
    """One answer is 60 times longer than the others; or scoring takes 60 times as long as everything else."""
    if late == "rollout":
        monkeypatch.setattr(Cluster, "lengths", lambda self, sample: 300 if sample == "1:0:0" else 5)
    else:
        serve = Cluster.serve

        async def slow(self, node, role):
            if role == "inference":
                await self.pause(300)
            await serve(self, node, role)

        monkeypatch.setattr(Cluster, "serve", slow)
    cluster = run(*POLICIES["threshold"], 5, tmp_path)
    assert not any(node.requests or any(node.work.values()) for node in cluster.agents.values())


def bare(home: dict[str, str], samples: list[str], tmp_path, policy=POLICIES["static"][1]) -> tuple[Iteration, Cluster]:
    """An iteration that nobody runs, on a cluster that does nothing."""
    cluster = Cluster(home, 0)
    epochs = Epochs(cluster, journal.Journal(tmp_path / "journal.jsonl"), home, 1.0)
    cluster.iteration = Iteration(Config(policy=policy), cluster, epochs, WEIGHTS, capabilities(policy, home), set(), samples)
    return cluster.iteration, cluster


def finished(iteration: Iteration, node: str, sample: str) -> None:
    iteration.event_finished(node, sample=sample, reward=1.0, correct=True, timed_out=False, tokens=3, prompt_tokens=2, finish="stop",
                             version=WEIGHTS.version)


def test_a_node_that_has_switched_takes_work_of_its_role_also_while_all_hold_still(tmp_path):
    """The switch was under way when they were told to."""
    iteration, _ = bare(homes(2, 0, 1), ["1:0:0"], tmp_path, POLICIES["by node"][1])
    iteration.hand_outs.turns.give({"n1": "training"})
    iteration.hand_outs.turns.hold_still()
    assert iteration.hand_outs.at_work("training") == ["n3"]
    iteration.event_switched("n1", source="rollout", target="training", phases={})
    assert iteration.hand_outs.at_work("training") == ["n1", "n3"] and iteration.hand_outs.at_work("rollout") == ["n2"]


def test_an_answer_that_completes_while_its_node_gives_up_counts_once(tmp_path):
    """Its verdict comes after the node has left rollout, and once more by a message that was sent again."""
    iteration, _ = bare(homes(2, 0, 1), ["1:0:0", "1:0:1"], tmp_path)
    iteration.ledger.dispatch("n1", iteration.ledger.waiting(2))
    iteration.role_changes.take_back(Outcome(1, True, given_up={"n1": [{"sample": "1:0:1", "tokens": 2}]}))
    for _ in range(2):
        finished(iteration, "n1", "1:0:0")
        finished(iteration, "n1", "1:0:1")  # this one is not the node's any more
    assert (iteration.tally.correct, iteration.ledger.num_waiting) == (1, 1)
    assert iteration.ledger.dispatch("n2", iteration.ledger.waiting(2)) == [("1:0:1", "n1")]
    finished(iteration, "n2", "1:0:1")
    assert iteration.tally.correct == 2
    assert [group.holders for group in iteration.ledger.groups.values()] == [{"1:0:0": "n1", "1:0:1": "n2"}]


def test_a_survivor_without_work_is_woken_by_what_others_gave_up(tmp_path):
    async def scenario():
        iteration, cluster = bare(homes(2, 0, 1), ["1:0:0", "1:0:1"], tmp_path)
        iteration.ledger.dispatch("n1", iteration.ledger.waiting(1))
        iteration.ledger.dispatch("n2", iteration.ledger.waiting(1))
        finished(iteration, "n2", "1:0:1")
        cluster.agents["n1"].held["1:0:0"] = 2
        iteration.hand_outs.leaving.add("n1")
        waiting = asyncio.create_task(iteration.generate())
        await asyncio.sleep(0.05)
        assert cluster.agents["n2"].requests == {}, "it is parked"
        iteration.role_changes.take_back(Outcome(1, True, given_up={"n1": [{"sample": "1:0:0", "tokens": 2}]}))
        await waiting
        assert iteration.ledger.groups["1:0"].holders == {"1:0:0": "n2", "1:0:1": "n2"}

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(scenario())


def test_a_group_stays_with_its_finished_members_when_the_others_move(tmp_path):
    iteration, _ = bare(homes(2, 0, 1), ["1:0:0", "1:0:1", "1:0:2"], tmp_path)
    iteration.ledger.dispatch("n1", iteration.ledger.waiting(3))
    finished(iteration, "n1", "1:0:0")
    # One in part, one not even begun: that one starts afresh.
    iteration.role_changes.take_back(Outcome(1, True, given_up={"n1": [{"sample": "1:0:1", "tokens": 4}, {"sample": "1:0:2", "tokens": 0}]}))
    assert dict(iteration.ledger.dispatch("n2", iteration.ledger.waiting(3))) == {"1:0:1": "n1", "1:0:2": None}
    for sample in ("1:0:1", "1:0:2"):
        assert iteration.ledger.groups["1:0"].state == "generating"
        finished(iteration, "n2", sample)
    (group,) = iteration.ledger.in_state("generated")
    assert group.holders == {"1:0:0": "n1", "1:0:1": "n2", "1:0:2": "n2"}


# Deaths also heal, for what a dead worker held is offered again: so there are histories with few of them, and with many.
@pytest.mark.parametrize("seed, chaos_share, reaped", [(seed, 0.04, False) for seed in range(6)] + [(seed, 0.12, True) for seed in range(2)])
@pytest.mark.parametrize("home, policy", POLICIES.values(), ids=POLICIES)
def test_an_iteration_trains_every_sample_once_also_in_chaos(home, policy, seed, chaos_share, reaped, tmp_path):
    run(home, policy, seed, tmp_path, chaos_share=chaos_share, reaped=reaped)


def test_a_change_that_failed_is_decided_anew_at_once_however_long_decisions_take(tmp_path):
    run(*POLICIES["adaptive, lend owners"], 2, tmp_path, chaos_share=0.04, decides_s=0.3)


def test_a_late_failure_does_not_take_back_what_runs_again_since_the_worker_died(tmp_path):
    policy, home = POLICIES["static"][1], homes(1, 0, 1)
    log = journal.Journal(tmp_path / "journal.jsonl")
    epochs = Epochs(Cluster(home, 0), log, home, 1.0)
    iteration = Iteration(Config(policy=policy), Cluster(home, 0), epochs, WEIGHTS, capabilities(policy, home), set(), ["1:0:0"])
    handed, lives = iteration.ledger.dispatch("n1", ["1:0:0"]), iteration.requests.lives["n1"]
    iteration.worker_lost("n1", "rollout")
    iteration.ledger.dispatch("n1", ["1:0:0"])
    iteration.requests.failed("n1", handed, lives)
    assert iteration.ledger.running == {"1:0:0": "n1"}
    iteration.requests.failed("n1", handed, iteration.requests.lives["n1"])
    assert iteration.ledger.num_waiting == 1
    log.close()


@pytest.mark.parametrize("how", ["for another node", "for another role"])
def test_what_a_node_has_given_up_is_known_before_its_death_is_settled(how, tmp_path):
    """The report of the death, which no longer counts the request as held, overtakes the answer: without it the request
    would begin anew somewhere, and make its tool calls again."""

    async def scenario():
        iteration, cluster = bare(homes(2, 0, 1), ["1:0:0", "1:0:1"], tmp_path)
        iteration.ledger.dispatch("n1", iteration.ledger.waiting(2))
        partial = {"sample": "1:0:0", "tokens": 9, "masked_tokens": 4}

        async def dies_with_the_answer(name, method, /, **args):
            iteration.worker_lost("n1", "rollout", held=["1:0:1"])
            assert set(iteration.ledger.running) == {"1:0:0", "1:0:1"}, "the answer is on its way"
            return [partial]

        if how == "for another node":
            cluster.call = dies_with_the_answer
            iteration._down |= {("n1", "rollout"), ("n2", "rollout")}
            await iteration.requests._relocate("n1", {"1:0:0": "n2"})
        else:
            async def change(moves, weights, reason, on_quiesced, live):
                given_up = {"n1": await dies_with_the_answer("n1", "quiesce")}
                on_quiesced(outcome := Outcome(1, True, given_up=given_up))
                return outcome

            iteration._epochs.change = change
            await iteration.role_changes.carry_out({"n1": "training"})
        assert dict(iteration.ledger.dispatch("n2", iteration.ledger.waiting())) == {"1:0:0": "n1", "1:0:1": "n1"}

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(scenario())


def test_a_request_whose_target_has_left_while_it_was_given_up_goes_elsewhere_at_once(tmp_path):
    async def scenario():
        iteration, cluster = bare(homes(3, 0, 1), ["1:0:0"], tmp_path)
        iteration.ledger.dispatch("n1", ["1:0:0"])
        cluster.agents["n1"].requests["1:0:0"] = [4]
        iteration.hand_outs.leaving |= {"n1", "n2"}
        await iteration.requests._relocate("n1", {"1:0:0": "n2"})
        assert iteration.ledger.running == {"1:0:0": "n3"}
        await asyncio.gather(*iteration._background.tasks)

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(scenario())


def test_moves_that_need_the_same_weights_are_one_change(tmp_path):
    iteration, _ = bare(homes(3, 0, 1), ["1:0:0"], tmp_path)
    moves = {"n1": "inference", "n2": "training"}
    assert iteration.role_changes.by_weights(moves) == [(WEIGHTS, moves)]
    iteration.role_changes.training_weights = ahead = Weights(WEIGHTS.version + 1, "f00d")
    assert iteration.role_changes.by_weights(moves) == [(ahead, {"n2": "training"}), (WEIGHTS, {"n1": "inference"})]


def test_nodes_need_not_dwell_once_all_answers_are_there(tmp_path):
    iteration, _ = bare(homes(1, 0, 1), ["1:0:0"], tmp_path)
    iteration.role_changes._policy = Policy(name="threshold", dwell_s=100.0)
    looked: list = []
    iteration.role_changes.view = lambda to_train: looked.append(to_train) or View({}, {})
    iteration.role_changes.last = time.monotonic()
    iteration.role_changes.consider([])
    assert looked == []
    iteration.ledger.dispatch("n1", ["1:0:0"])
    finished(iteration, "n1", "1:0:0")
    iteration.role_changes.consider([])
    assert len(looked) == 1


def test_a_move_that_is_refused_is_not_wanted_again_at_once(tmp_path):
    policy, home = POLICIES["eager"][1], homes(2, 0, 1)
    log = journal.Journal(tmp_path / "journal.jsonl")
    describe(log, home, capabilities(policy, home), policy)
    log.append("weights_staging", version=9)  # while they are on their way, nobody may move

    async def go():
        epochs = Epochs(Cluster(home, 0), log, home, 1.0)
        iteration = Iteration(Config(policy=policy), Cluster(home, 0), epochs, WEIGHTS, capabilities(policy, home), set(), ["1:0:0"])
        began = asyncio.get_running_loop().time()
        await iteration.role_changes.carry_out({"n1": "training"})
        assert asyncio.get_running_loop().time() - began >= 0.1 and epochs.roles == home
        assert "on its way" in iteration.tally.switches[0].reason

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(go())


def test_the_reason_of_a_change_is_the_work_that_there_is(tmp_path):
    iteration, cluster = bare(homes(2, 1, 1), ["1:0:0", "1:1:0", "1:1:1"], tmp_path)
    reasons = []

    async def change(moves, weights, reason, *_):
        reasons.append(reason)
        return Outcome(1, True)

    async def go():
        iteration._epochs.change = change
        await iteration.role_changes.carry_out({"n1": "training"})
        iteration.ledger.dispatch("n1", ["1:0:0", "1:1:0", "1:1:1"])
        for sample in ("1:0:0", "1:1:0"):
            finished(iteration, "n1", sample)
        await iteration.role_changes.carry_out({"n1": "training"})

    asyncio.run(go())
    assert reasons == ["3 requests live", "1 request live, 1 group generated"]


def test_of_an_iteration_that_is_given_up_no_further_change_of_roles_begins(tmp_path):
    """Its second half would meet a job that goes back to a checkpoint, with weights that are no more."""

    async def go():
        iteration, cluster = bare(homes(2, 1, 1), ["1:0:0"], tmp_path)
        seen = []

        async def change(moves, *_):
            seen.append(moves)
            await asyncio.sleep(1.0)
            return Outcome(1, True)

        iteration._epochs.change = change
        iteration.role_changes.training_weights = Weights(WEIGHTS.version + 1, "f00d")  # so that it has two halves
        running = asyncio.create_task(iteration._until(lambda: True, lambda: []))
        iteration.role_changes.begin({"n1": "training", "n2": "inference"})
        moving = iteration.role_changes.current
        await asyncio.sleep(0.5)
        running.cancel()  # though everything is trained, it waited for that change
        await asyncio.gather(running, return_exceptions=True)
        await moving
        assert seen == [{"n1": "training"}]
        for task in [*cluster.tasks]:
            task.cancel()

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(go())


def test_a_change_that_fails_is_raised_in_the_iteration_and_nowhere_else(tmp_path):
    async def go():
        iteration, _ = bare(homes(2, 1, 1), ["1:0:0"], tmp_path)
        told = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["message"]))

        async def change(*_):
            raise StepLost("gone")

        iteration._epochs.change = change
        iteration.role_changes.begin({"n1": "training"})
        with pytest.raises(StepLost):
            await iteration._until(lambda: False, Minibatch(0))
        gc.collect()
        assert told == []

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(go())


def test_what_scheduling_costs_the_controller_is_counted(tmp_path):
    cluster = run(*POLICIES["adaptive, lend owners"], 1, tmp_path)
    spent = cluster.iteration._monitor.overhead.seconds
    assert spent["decisions"] > 0 and spent["routing"] > 0


def test_a_request_whose_hand_out_failed_needs_a_rollout_node_also_while_it_is_not_offered_again(tmp_path):
    """Its node may have changed its role meanwhile; the last one that generates must not follow it."""
    home, policy = POLICIES["adaptive"]
    cluster = Cluster(dict(home), 1)
    generate = cluster.on_generate

    async def refused(node, **order):
        if node.name == "n1":
            raise CallError("a request came while this node changes its role")
        await generate(node, **order)

    cluster.on_generate = refused

    async def go():
        may, samples = capabilities(policy, home), [wire.sample_id(1, 0, member) for member in range(4)]
        config = Config(policy=policy, algorithm=Algorithm(prompts_per_step=1, group_size=4, max_response_tokens=10**6))
        epochs = Epochs(cluster, journal.Journal(tmp_path / "journal.jsonl"), home, 1.0)
        monitor = Monitor(config, clock=asyncio.get_running_loop().time)
        iteration = cluster.iteration = Iteration(config, cluster, epochs, WEIGHTS, may, set(), samples, monitor=monitor)
        cluster.lengths = lambda sample: 10**6
        iteration.hand_outs.hand_out(Minibatch(0))
        epochs.roles["n1"], epochs.num_changes = "training", 1
        for seconds in (0.05, 0.3):  # before and after the pause
            await asyncio.sleep(seconds)
            seen = monitor.situation(iteration.ledger, epochs.roles, may, lambda group: True, True, {})
            assert iteration.role_changes.num_to_generate() == seen.live == len(seen.lengths) == 4
        for task in [*cluster.tasks, *iteration._background.tasks]:
            task.cancel()

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(go())
