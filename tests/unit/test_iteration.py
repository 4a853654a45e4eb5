"""An iteration with the real ledger, policy and epochs on a pretended cluster. What the optimizer step would add up must be
every sample of the step, once."""

import asyncio
from collections import Counter

import pytest
from pretend_cluster import WEIGHTS, Cluster, VirtualTime

from dynarl import wire
from dynarl.config.schema import Algorithm, Config, Policy, Rollout
from dynarl.controller.epochs import Epochs
from dynarl.controller.iteration import Iteration
from dynarl.hypergraph import journal
from dynarl.scheduler.policy import capabilities, start_roles


def run(home: dict[str, str], policy: Policy, seed: int, tmp_path, *, chaos_share=0.0, reaped=False, minibatches=1, groups=8, size=3,
        limit_s=10.0):
    """One iteration. Returns the cluster, after the checks that hold for every iteration. `reaped`: idle workers die, too."""
    samples = [wire.sample_id(1, g, m) for g in range(groups) for m in range(size)]
    may = capabilities(policy, home)
    cluster = Cluster(start_roles(policy, home), seed, chaos_share)
    log = journal.Journal(tmp_path / f"journal-{seed}-{chaos_share}.jsonl")

    async def go():
        epochs = Epochs(cluster, log, home, policy.vote_timeout_s)
        epochs.roles = start_roles(policy, home)
        config = Config(policy=policy, rollout=Rollout(max_running=8), algorithm=Algorithm(normalize_std=False))
        iteration = cluster.iteration = Iteration(
            config, cluster, epochs, WEIGHTS, may, cluster.down, samples,
            scored_by_inference=any("inference" in choices for choices in may.values()))
        if reaped:
            cluster.spawn(cluster.reap(may))
        names = list(iteration.ledger.groups.values())
        share = len(names) // minibatches
        for batch in (names[i * share:(i + 1) * share] for i in range(minibatches)):
            await iteration.accumulate(batch)
            needed = {n for n, role in home.items() if role == "training"} | {group.node for group in batch}
            await iteration.train_on(needed)  # or what they hold would be out of reach when the optimizer steps
            assert chaos_share or all(cluster.agents[n].active == "training" for n in needed)
            total = Counter()
            for node in {group.node for group in batch}:
                total += cluster.agents[node].buffer
            assert total == Counter(s for group in batch for s in group.samples), "the step would not be over its groups"
            assert sorted(iteration.ledger.trained(batch)) == sorted(total)
            for node in cluster.agents.values():
                node.buffer.clear()
        assert all(cluster.agents[n].active == r for n, r in epochs.roles.items())
        cluster.switches = iteration.tally.switches
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
        pytest.fail(f"no end after {limit_s} s: {Counter(g.state for g in ledger.groups.values())}, waiting {list(ledger._waiting)}, "
                    f"running {ledger.running}, in engines { {n: a.requests for n, a in cluster.agents.items()} }, "
                    f"leases {cluster.iteration._at}, down {cluster.down}, faults {cluster.faults}")
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
    "one node": ({"n1": "training"}, Policy(name="colocated", dwell_s=0.0)),
    "static": (homes(1, 1, 1), Policy(name="static")),
}


@pytest.mark.parametrize("home, policy", POLICIES.values(), ids=POLICIES)
def test_an_iteration_trains_every_sample_once(home, policy, tmp_path):
    cluster = run(home, policy, 1, tmp_path)
    assert any(outcome.committed for outcome in cluster.switches) == (policy.name != "static")


def test_minibatches_step_on_their_own_groups(tmp_path):
    run(*POLICIES["threshold"], 2, tmp_path, minibatches=4)


# Deaths also heal, for what a dead worker held is offered again: so there are histories with few of them, and with many.
@pytest.mark.parametrize("seed, chaos_share, reaped", [(seed, 0.04, False) for seed in range(6)] + [(seed, 0.12, True) for seed in range(2)])
@pytest.mark.parametrize("home, policy", POLICIES.values(), ids=POLICIES)
def test_an_iteration_trains_every_sample_once_also_in_chaos(home, policy, seed, chaos_share, reaped, tmp_path):
    run(home, policy, seed, tmp_path, chaos_share=chaos_share, reaped=reaped)


def test_a_late_failure_does_not_take_back_what_runs_again_since_the_worker_died(tmp_path):
    policy, home = POLICIES["static"][1], homes(1, 0, 1)
    log = journal.Journal(tmp_path / "journal.jsonl")
    epochs = Epochs(Cluster(home, 0), log, home, 1.0)
    iteration = Iteration(Config(policy=policy), Cluster(home, 0), epochs, WEIGHTS, capabilities(policy, home), set(), ["1:0:0"])
    handed, lives = iteration.ledger.dispatch("n1", 1), iteration._lives["n1"]
    iteration.worker_lost("n1", "rollout")
    iteration.ledger.dispatch("n1", 1)
    iteration._requests_failed("n1", handed, lives)
    assert iteration.ledger.running == {"1:0:0": "n1"}
    iteration._requests_failed("n1", handed, iteration._lives["n1"])
    assert iteration.ledger.num_waiting == 1
    log.close()
