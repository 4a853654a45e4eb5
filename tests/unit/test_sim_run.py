"""Whole jobs in the simulator, with the production controller; every one is held against its books by itself."""

import os
import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest
from sim_worlds import STEP, TOOLS, Network, world

from dynarl.dataflow.speeds import Speeds
from dynarl.errors import ConfigError
from dynarl.sim.books import ConservationError
from dynarl.sim.decode import DecodeEngine
from dynarl.sim.loop import StuckError
from dynarl.sim.rollout import Rollout
from dynarl.sim.run import run, simulate
from dynarl.sim.stages import Stages
from dynarl.sim.workload import Lengths, SimRequest, Turn
from dynarl.sim.world import Failure

POLICIES = ["static", "threshold", "colocated", "adaptive", "in_turn", "published"]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["answers", "tools"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_sample_is_generated_scored_and_trained_once_under_every_policy(policy, tools):
    done = run(world(policy, tools=tools), seed=1, iterations=2)
    for iteration in done.iterations:
        assert iteration.samples == 32 and iteration.timeline[-1]["end_s"] == pytest.approx(iteration.makespan_s)
        for before, after in zip(iteration.timeline, iteration.timeline[1:]):
            assert before["end_s"] == after["start_s"]
        for each in iteration.timeline:
            assert each["rollout"] + each["inference"] + each["training"] + each["idle"] == 24
    moved = done.iterations[0].metrics["alloc/switch_count"] > 0
    assert moved or policy in ("static", "adaptive")


def test_the_same_seed_has_the_same_events_and_another_one_others():
    first, second, other = (run(world(tools=TOOLS), seed) for seed in (1, 1, 2))
    assert first == second
    assert first.events_sha256 != other.events_sha256


def test_the_order_of_hashing_changes_nothing():
    imports = "from sim_worlds import TOOLS, world; from dynarl.sim.run import run"
    program = f"{imports}; print(run(world(tools=TOOLS), 3).events_sha256)"
    path = os.pathsep.join([os.path.dirname(__file__), os.getcwd()])
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE,
                         env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path})
        for seed in ("1", "2")
    ]
    found = {process.communicate()[0] for process in processes}
    assert len(found) == 1 and len(found.pop().strip()) == 64


def test_answers_come_when_an_engine_alone_makes_them():
    """One node that generates, two engines with one request each: the only thing to add is what messages take."""
    requests = [SimRequest("1:0:0", 100, (Turn(500),)), SimRequest("1:0:1", 100, (Turn(900),))]
    made = world("static", split=(1, 1, 1), draw=lambda number, seed: requests, groups=1, size=2)
    config = msgspec.structs.replace(made.config, algorithm=msgspec.structs.replace(made.config.algorithm, minibatches=1))
    [iteration] = run(replace(made, config=config), seed=1).iterations
    engine = DecodeEngine(STEP, 60_000, 8)
    engine.add(0, requests[1])
    ends = []
    while (at_ns := engine.next_ns()) is not None:
        ends += engine.advance(at_ns)
    times = made.times
    # Weights to the rollout node and their load; the optimizer's zeros; the requests; verdict and report.
    before_s = times.message_s + times.load("rollout") + 2 * times.message_s
    expected_s = before_s + 1e-9 * ends[-1].at_ns + times.verify_s + times.message_s
    assert iteration.metrics["timing_s/gen"] == pytest.approx(expected_s, abs=1e-8)


def test_an_answer_of_the_greatest_length_was_cut():
    short = world("static", response=Lengths(median=9000, cap=4096))
    assert run(short, seed=1).iterations[0].metrics["response_length/clip_ratio"] == 1.0


def test_workers_that_die_and_come_back_cost_tokens_but_no_sample():
    failures = [Failure(1, 4.0, "n4", "rollout"), Failure(1, 5.5, "n5", "rollout"), Failure(2, 6.0, "n1", "inference")]
    lines: list[bytes] = []
    done = run(world("threshold", tools=TOOLS, failures=failures), seed=1, iterations=2, sink=lines.append)
    died = [line for line in lines if b"worker_died" in line]
    assert len(died) == 3 and done == run(world("threshold", tools=TOOLS, failures=failures), seed=1, iterations=2)
    assert sum(b'"type":"worker_up"' in line and b'"attempt":2' in line for line in lines) == 3


def test_engines_that_died_get_no_requests(monkeypatch):
    place = Rollout._place

    def living(rollout, sample):
        seat = place(rollout, sample)
        assert any(seat is each for each in rollout.seats)
        return seat

    monkeypatch.setattr(Rollout, "_place", living)
    failures = [Failure(1, 4.0, "n4", "rollout"), Failure(1, 5.5, "n5", "rollout")]
    run(world("threshold", tools=TOOLS, failures=failures), seed=1)


@pytest.mark.parametrize(
    "failure, message",
    [
        (Failure(1, 1.0, "n9", "rollout"), "'n9', which is not one of the 6"),
        (Failure(1, 1.0, "n0", "training"), "owns optimizer state"),
    ],
)
def test_a_failure_that_is_not_simulated_is_refused(failure, message):
    with pytest.raises(ConfigError, match=message):
        world(failures=[failure])


def test_a_simulation_that_cannot_go_on_names_what_waits(monkeypatch):
    monkeypatch.setattr(Stages, "_start", lambda self, role, device: None)  # a worker that never begins
    with pytest.raises(StuckError) as error:
        run(world("static"), seed=1)
    told = str(error.value)
    assert "groups scoring" in told and "leases are out: 1 (inference on n1)" in told
    assert "0 requests wait for a node" in told and "roles: 1 inference, 4 rollout" in told


@pytest.mark.parametrize("fault", ["a gradient is lost", "an answer is too long"])
def test_what_is_lost_or_made_up_ends_the_simulation(fault, monkeypatch):
    if fault == "a gradient is lost":
        done = Stages._done

        def losing(self, role, device, lease):
            done(self, role, device, lease)
            self.gradient.pop("1:3:2", None)

        monkeypatch.setattr(Stages, "_done", losing)
    else:
        verified = Rollout._verified

        def stretching(self, sample, tokens):
            verified(self, sample, tokens + (sample == "1:3:2"))

        monkeypatch.setattr(Rollout, "_verified", stretching)
    with pytest.raises(ConservationError, match="1:3:2"):
        run(world("static"), seed=1)


def test_a_faster_network_and_faster_training_end_earlier():
    class Slow(Network):
        def seconds(self, op, group, num_bytes):
            return 10 * super().seconds(op, group, num_bytes)

    fast, slow = (run(world("static", network=network), seed=1).iterations[0] for network in (Network(), Slow()))
    assert fast.makespan_s < slow.makespan_s


def test_the_oracle_leaves_out_the_same_pauses_of_engines(monkeypatch):
    longest = []

    class Noted(Speeds):
        def __init__(self, most_s):
            super().__init__(most_s)
            longest.append(most_s)

    monkeypatch.setattr("dynarl.controller.router.Speeds", Noted)
    run(world("adaptive"), seed=1, oracle=True)
    assert len(set(longest)) == 1


def test_the_oracle_knows_the_lengths_and_is_named_so():
    class Scenario:
        iterations, measured, throughput_unit = 2, 1, "requests/s"

        def world(self, policy):
            return world(policy)

    told: list[tuple[int, int]] = []
    real = simulate(Scenario(), "adaptive", 1, progress=lambda done, of: told.append((done, of)))
    oracle = simulate(Scenario(), "adaptive", 1, oracle=True)
    assert (real["policy"], oracle["policy"]) == ("adaptive", "adaptive, oracle")
    assert real["throughput"] == pytest.approx(32 / real["makespan_s"])
    assert real["events_sha256"] != oracle["events_sha256"]
    assert told == 2 * [(number, 32) for number in range(1, 33)]
