"""What the controller learns for the scheduler, on a clock that the test moves."""

import itertools

import pytest

from dynarl.config.schema import Config, Policy, Rollout
from dynarl.controller.epochs import Outcome
from dynarl.controller.replicas import inside_nodes
from dynarl.controller.telemetry import DECISION_SHARE, Monitor
from dynarl.dataflow.ledger import Ledger
from dynarl.hypergraph import journal

ROLES = {"n1": "rollout", "n2": "rollout", "n3": "training"}
MAY = {node: frozenset({"rollout", "training"}) for node in ROLES}
REPLICAS = {"training": inside_nodes(ROLES, 1, 1), "inference": inside_nodes(ROLES, 1, 1)}
POLICY = Policy(name="adaptive", lend_owners=True, dwell_s=0.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def log(tmp_path):
    opened = journal.Journal(tmp_path / "journal.jsonl")
    yield opened
    opened.close()


def monitor(clock, log=None) -> Monitor:
    milliseconds = itertools.count(0.0, 0.001).__next__  # that each decision takes
    found = Monitor(Config(policy=POLICY, rollout=Rollout(max_running=8)), log, clock=clock, stopwatch=milliseconds)
    found.begin(1)
    return found


def steps(learning: Monitor, clock: Clock, node: str, running: int, step_s: float, count: int = 20, lengths=(5, 50)) -> None:
    """Figures of a worker that makes `running` tokens every step_s, a quarter of a second apart."""
    tokens = 0
    for _ in range(count):
        learning.figures(node, worker=f"{node}-rollout-0", running=running, waiting=0, tokens=tokens, kv_used_tokens=10,
                         kv_total_tokens=10_000, lengths=lengths)
        clock.now += 0.25
        tokens += round(running * 0.25 / step_s)


def consult(learning: Monitor, ledger: Ledger) -> dict[str, str]:
    return learning.consult(POLICY, ledger, ROLES, MAY, set(), lambda group: True, False, REPLICAS, 1e9)


def busy_ledger() -> Ledger:
    """Two requests of 64 live, one on each generating node; all other groups wait to be trained."""
    ledger = Ledger([f"1:{g}:{m}" for g in range(16) for m in range(4)], scored_by_inference=False)
    for node, count in (("n1", 32), ("n2", 32)):
        ledger.dispatch(node, ledger.waiting(count))
    for sample in list(ledger.running):
        if sample not in ("1:0:0", "1:8:0"):
            ledger.finished(sample, ledger.running[sample], reward=1.0, tokens=100, finish="stop")
    return ledger


def test_the_memory_of_a_node_counts_for_those_that_it_may_queue_too(clock):
    learning = Monitor(Config(rollout=Rollout(max_running=8, max_queued=24)), clock=clock)
    steps(learning, clock, "n1", 8, 0.05, count=1)
    assert learning.kv_tokens() == 40_000


def test_reports_that_catch_up_with_each_other_on_the_way_tell_the_time_that_the_worker_had(clock):
    """One comes 0.5 s late, the next right behind it."""
    learning = monitor(clock)
    report = {"worker": "n1-rollout-0", "running": 4, "waiting": 0, "kv_used_tokens": 10}
    for arrived, made_s, tokens in ((0.0, 7.0, 0), (1.0, 7.5, 100), (0.001, 8.0, 200)):
        clock.now += arrived
        learning.figures("n1", tokens=tokens, made_s=made_s, **report)
    (steps,) = learning.trace._decode.values()
    assert steps == pytest.approx([50, 200, 0, 1.0])  # 0.02 s for each


def test_step_times_come_from_tokens_between_figures(clock):
    learning = monitor(clock)
    for running, step_s in ((1, 0.025), (8, 0.05), (1, 0.025), (8, 0.05)):
        steps(learning, clock, "n1", running, step_s)
        clock.now += 10.0  # nothing to do in between: no step of ten seconds
    assert learning.costs.step.seconds(1) == pytest.approx(0.025, rel=0.1)
    assert learning.costs.step.seconds(8) == pytest.approx(0.05, rel=0.1)
    assert learning.kv_tokens() == 10_000


def test_tokens_that_tools_wrote_count_as_work_of_the_stages_and_not_as_decode_steps(clock):
    learning = monitor(clock)
    ledger = Ledger([f"1:0:{m}" for m in range(4)], scored_by_inference=False)
    ledger.dispatch("n1", ledger.waiting(4))
    ledger.finished("1:0:0", "n1", reward=1.0, tokens=100, finish="stop")
    learning.finished("1:0:0", 100, masked_tokens=60)
    ledger.returned("1:0:1", "n1", holder="n1")
    learning.given_up("1:0:1", 50, masked_tokens=20)
    assert learning.lengths.events.nonzero()[0].tolist() == [40]
    seen = learning.situation(ledger, ROLES, MAY, lambda group: False, False, {})
    assert seen.lengths[-1] == 30 and seen.written_per_sampled == 2.5 and seen.finished_tokens == 100


def test_a_sample_of_lengths_stands_for_all_requests_of_a_node(clock):
    learning = monitor(clock)
    steps(learning, clock, "n1", 8, 0.05, count=2)
    clock.now -= 0.25  # to when the last ones came
    assert learning.lengths_on("n1", 4).tolist() == [5, 5, 50, 50]
    assert learning.lengths_on("n1", 1).tolist() == [50]


def test_requests_go_on_between_two_reports_of_their_lengths(clock):
    learning = monitor(clock)
    steps(learning, clock, "n1", 8, 0.05, count=30)
    clock.now += 0.25
    assert learning.lengths_on("n1", 8).tolist() == [pytest.approx(n + 10, abs=1) for n in [5] * 4 + [50] * 4]
    clock.now += 1e6
    assert set(learning.lengths_on("n1", 8)) == {learning.lengths.max_tokens - 1}


def test_a_second_lease_is_counted_from_the_end_of_the_first(clock):
    learning = monitor(clock)
    for lease in (1, 2):
        learning.leased(lease, "training", REPLICAS["training"][2], tokens=1000.0)
    for lease in (1, 2):
        clock.now += 2.0
        learning.done(lease, replicas_beside=1)
    assert learning.costs.seconds_per_token("training") == pytest.approx(0.002)
    learning.done(7, replicas_beside=1)  # an expired lease


def test_a_decision_and_what_came_of_it_are_on_record(clock, log, tmp_path):
    learning = monitor(clock, log)
    for node in ("n1", "n2"):
        steps(learning, clock, node, 1, 0.05, lengths=[100])
    learning.leased(1, "training", REPLICAS["training"][2], tokens=400.0)
    clock.now += 2.0
    learning.done(1, replicas_beside=1)
    moves = consult(learning, busy_ledger())
    assert list(moves.values()) == ["training"]
    learning.moved(ROLES, moves, Outcome(1, True, pause_ms=400.0))
    clock.now += 30.0
    learning.conclude()
    records = list(journal.read(tmp_path / "journal.jsonl"))
    decision, outcome = (next(r for r in records if r["type"] == kind) for kind in ("decision", "decision_outcome"))
    assert decision["candidates"][0]["moves"] == {} and decision["candidates"][decision["chosen"]]["moves"] == moves
    assert decision["iteration"] == 1 and decision["number"] == outcome["number"] == 1
    assert "rollout to training" in decision["reason"] and decision["seen"]["groups/training/waiting"] == 14
    # How long the decision took is one thing, how long its move did another.
    assert 0 < decision["seconds"] < 5 and outcome["actual_cost_s"] == 0.4
    assert outcome["actual_finish_s"] == 30.0 and outcome["predicted_finish_s"] > 0
    assert learning.costs.moves.seconds("rollout", "training") == 0.4 and learning.costs.finish.last


def test_it_looks_again_when_a_node_has_nothing_left_to_do(clock):
    """Two nodes train: at two groups both have one, at one group one of them is free, and nobody waits for the next look, but for a moment."""
    learning, ledger = monitor(clock), busy_ledger()
    roles = {"n1": "rollout", "n2": "training", "n3": "training"}
    looked = []
    learning.situation = lambda *args, inner=learning.situation: looked.append(clock.now) or inner(*args)

    def look() -> int:
        learning.consult(POLICY, ledger, roles, MAY, set(), lambda group: True, False, REPLICAS, 1e9)
        return len(looked)

    assert look() == 1
    leases = [ledger.lease(group, "n2") for group in ledger.in_state("scored")]
    assert look() == 2, "no group waits any more"
    for lease in leases[:-2]:
        ledger.accumulated(lease)
    clock.now += 0.1
    assert look() == 2
    ledger.accumulated(leases[-2])
    assert look() == 3


def test_decisions_take_no_more_than_their_share_of_the_time(clock):
    learning = monitor(clock)
    ledger = Ledger(["1:0:0", "1:0:1"], scored_by_inference=False)
    ledger.dispatch("n1", ledger.waiting(2))
    looked = []
    learning.situation = lambda *args, inner=learning.situation: looked.append(clock.now) or inner(*args)
    for _ in range(1000):
        consult(learning, ledger)
        clock.now += 0.01
    # At half of one hundredth ten seconds have 50 ms for decisions.
    assert 10 <= len(looked) <= 10.0 * DECISION_SHARE / 0.001 + 1
    before = len(looked)
    ledger.finished("1:0:0", "n1", reward=1.0, tokens=3, finish="stop")
    consult(learning, ledger)
    assert len(looked) <= before + 1
    ledger.finished("1:0:1", "n1", reward=1.0, tokens=3, finish="stop")
    consult(learning, ledger)
    assert len(looked) >= before + 1, "the last answer cannot wait"


def test_staying_is_recorded_only_when_its_reason_changes(clock, log, tmp_path):
    learning = monitor(clock, log)
    ledger = Ledger([f"1:{g}:{m}" for g in range(4) for m in range(4)], scored_by_inference=False)
    ledger.dispatch("n1", ledger.waiting(8))
    ledger.dispatch("n2", ledger.waiting(8))
    for _ in range(30):
        assert consult(learning, ledger) == {}
        clock.now += 2.0
    assert len([r for r in journal.read(tmp_path / "journal.jsonl") if r["type"] == "decision"]) == 1


def test_roles_at_the_start_are_the_rules_until_something_was_measured(clock):
    learning = monitor(clock)
    home = {"n1": "rollout", "n2": "training", "n3": "training"}
    assert set(learning.start_roles(POLICY, home, MAY, 4, 4, False).values()) == {"rollout"}
    assert learning.start_roles(Policy(name="threshold"), home, MAY, 4, 4, False) == home
    steps(learning, clock, "n1", 4, 0.05)
    begun = learning.start_roles(POLICY, home, MAY, 4, 4, False)
    assert set(begun) == set(home) and "rollout" in begun.values()
