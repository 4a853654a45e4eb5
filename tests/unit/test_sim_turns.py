"""Simulated nodes whose roles take turns by themselves: the production controller and lock, exact books at every end."""

import random

import pytest

from dynarl.config.schema import Algorithm, Cluster, Config, Dataflow, Policy, Rollout, Split
from dynarl.perf.rollout import StepModel
from dynarl.sim.run import Run, run
from dynarl.sim.workload import SimRequest, Turn
from dynarl.sim.world import Failure, Times, World

GROUPS, SIZE, NODES = 16, 4, 4
BY_NODE = Policy(name="colocated", switching="node")


class Network:
    def seconds(self, op, group, num_bytes):
        return 1e-4 + num_bytes / 50e9


def drawn(number: int, seed: int) -> list[SimRequest]:
    """Short answers mostly, some ten times as long."""
    rng = random.Random(seed * 1000 + number)
    return [SimRequest(f"{number}:{g}:{m}", 100, (Turn(1 + int(rng.paretovariate(1.2) * 100) % 2000),))
            for g in range(GROUPS) for m in range(SIZE)]


def seconds_each(token_s: float):
    return lambda samples: token_s * sum(prompt + response for prompt, response in samples)


def simulated(policy: Policy, chunk=None, failures=(), minibatches: int = 2) -> Run:
    config = Config(
        cluster=Cluster(nodes=NODES), split=Split(rollout=NODES - 2, inference=1, training=1), policy=policy,
        algorithm=Algorithm(prompts_per_step=GROUPS, group_size=SIZE, max_prompt_tokens=128, max_response_tokens=2048, minibatches=minibatches),
        rollout=Rollout(max_running=16), dataflow=Dataflow(chunk=chunk or {}))
    times = Times(inference=seconds_each(1e-4), training=seconds_each(4e-4), transfer=lambda source, target: 0.5)
    homes = {"n1": "training", "n2": "inference", "n3": "rollout", "n4": "rollout"}
    world = World(config, homes, 1, 1, StepModel(0.01, 2e-4, 1e-8), 10**6, drawn, times, Network(), 10**8, 10**8, failures=failures)
    return run(world, 1, iterations=2)


@pytest.mark.parametrize("chunk", [None, {"trajectories": 4, "scored": 3}, {"trajectories": "all", "scored": "all"}], ids=str)
def test_samples_are_generated_scored_and_trained_once_whatever_the_chunks(chunk):
    once, again = simulated(BY_NODE, chunk), simulated(BY_NODE, chunk)  # conservation is checked in each run
    assert once.events_sha256 == again.events_sha256
    assert all(each.metrics["alloc/switch_count"] > 0 for each in once.iterations)


def test_nodes_that_do_not_wait_for_each_other_are_earlier_done():
    together = simulated(Policy(name="colocated"))
    alone = simulated(BY_NODE)
    assert sum(each.makespan_s for each in alone.iterations) < sum(each.makespan_s for each in together.iterations)


def test_an_inference_worker_that_dies_in_between_holds_nobody_up():
    healthy = simulated(BY_NODE)
    dies = simulated(BY_NODE, failures=(Failure(1, 0.6 * healthy.iterations[0].makespan_s, "n3", "inference"),))
    assert dies.events_sha256 != healthy.events_sha256 and len(dies.iterations) == 2
