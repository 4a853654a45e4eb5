"""Candidates of `dynarl bench roles`, what it looks at, and what it makes of its measurements."""

import asyncio
from collections import defaultdict
from types import SimpleNamespace

import pytest

from dynarl.bench.roles import LOOK_S, RolesBench
from dynarl.bench.roles_summary import FINALISTS, finalists, summary
from dynarl.cli.bench import _show_roles
from dynarl.config.schema import Config, Policy
from dynarl.controller.replicas import inside_nodes

ROLE_KEYS = [f"{role}_{what}_node_s" for role in ("rollout", "inference", "training") for what in ("busy", "idle")]
TIMES = ("enter_s", "generate_s", "finish_s", "step_s", "sync_s", "moving_node_s", *ROLE_KEYS)
MOVE = {"drain_ms": 30.0, "transfer_ms": 90.0, "pause_ms": 120.0, "pause_without_drain_ms": 90.0, "requests_moved": 3}


def measured(*rates: float, saved: float = 0.5) -> list[dict[str, float]]:
    """Iterations of 1000 tokens."""
    return [
        {"tokens_per_s": rate, "seconds": 1000 / rate, "prefill_saved": saved, **dict.fromkeys(TIMES, 1.5)}
        for rate in rates
    ]


def results(rounds: dict, **more) -> dict:
    return {"nodes": 4, "work": {"tokens": 1000}, "rounds": rounds, **more}


ROUNDS = {
    "static 1:1:2": measured(120),  # the fastest, but measured once only
    "static 2:1:1": measured(100, 80, 300),
    "static 1:2:1": measured(90, 95, 91),
    "colocated": measured(110, 110, 110),
    "dynamic": measured(130, 150, 10),
    "adaptive": measured(160, 165, 170),
}
AGENTIC = ROUNDS | {
    "dynamic by arrival": measured(104, 104, 104),
    "adaptive by arrival": measured(150, 150, 150, saved=0.2),
}


def test_ratios_are_of_medians_against_the_best_split_of_those_measured_in_all_rounds():
    figures = summary(results(ROUNDS))
    assert figures["best_static"] == "static 2:1:1"
    assert figures["ratio_to_best_static"] == pytest.approx(1.3)
    assert figures["to_best_static"] == pytest.approx({"colocated": 1.1, "dynamic": 1.3, "adaptive": 1.65})
    assert figures["ratio_to_colocated"] == figures["ratio_to_best"] == pytest.approx(130 / 110)
    assert figures["adaptive_to_dynamic"] == pytest.approx(165 / 130)
    assert set(figures["tokens_per_s"]) == set(ROUNDS) and "static 1:1:2" not in figures["breakdown"]
    assert figures["priority_to_arrival"] == {} and "move" not in figures


def test_the_order_of_waiting_requests_has_a_ratio_for_each_policy_that_was_measured_with_both():
    figures = summary(results(AGENTIC))
    assert figures["priority_to_arrival"] == pytest.approx({"dynamic": 130 / 104, "adaptive": 1.1})
    assert figures["to_best_static"]["adaptive by arrival"] == pytest.approx(1.5)
    assert figures["breakdown"]["adaptive by arrival"]["prefill_saved"] == 0.2


def test_moves_and_restarts_are_compared_where_they_were_measured():
    figures = summary(results(ROUNDS, moves=[MOVE], restarts=[{"pause_ms": 12_000.0}]))
    assert figures["move"] == MOVE
    assert (figures["move_pause_without_drain_ms"], figures["restart_to_move"]) == (90.0, 100.0)


def test_later_rounds_have_the_fastest_splits_of_the_first_and_all_that_moves():
    rounds = {f"static {n}": measured(10.0 * n) for n in range(1, FINALISTS + 4)} | {"colocated": measured(1)}
    assert finalists(rounds) == [f"static {n}" for n in range(FINALISTS + 3, 3, -1)] + ["colocated"]


def test_the_table_has_every_candidate_and_where_its_time_went(capsys):
    _show_roles(summary(results(AGENTIC, moves=[MOVE], restarts=[{"pause_ms": 12_000.0}])))
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if line.startswith("adaptive by arrival")]
    assert [line.split()[3:] for line in lines] == [["150", "1.50", "20%"], [*["1.5"] * 3, "3.0", *["1.5"] * 4]]
    assert "static 1:1:2" in text and "adaptive: 1.10 times as fast by priority as by arrival." in text
    assert "A move pauses its node 120 ms, 90 ms without the drain (drain 30, transfer 90 ms)." in text


def bench(**attributes) -> RolesBench:
    """Without a job around it."""
    found = RolesBench.__new__(RolesBench)
    vars(found).update(attributes)
    return found


@pytest.mark.parametrize("agentic", [False, True])
def test_every_split_is_a_candidate_and_owners_keep_training(agentic):
    home = {"n1": "rollout", "n2": "rollout", "n3": "inference", "n4": "training"}
    found = bench(home=home, config=Config(policy=Policy(threshold=3))).candidates(agentic)
    splits = {name: candidate for name, candidate in found.items() if name.startswith("static")}
    assert set(splits) == {"static 1:1:2", "static 1:2:1", "static 2:1:1"}
    for name, candidate in splits.items():
        roles = list(candidate.roles.values())
        assert name == f"static {roles.count('rollout')}:{roles.count('inference')}:{roles.count('training')}"
        assert candidate.roles["n4"] == "training" and candidate.policy.name == "static"
    by_arrival = ["dynamic by arrival", "adaptive by arrival"] if agentic else []
    assert [name for name in found if name not in splits] == ["colocated", "dynamic", "adaptive", *by_arrival]
    assert {found[name].order for name in by_arrival} <= {"arrival"}
    assert all(found[name].policy == found[name.partition(" by")[0]].policy for name in by_arrival)
    assert found["dynamic"].policy == Policy(name="threshold", threshold=3, lend_owners=True)


def test_a_node_is_busy_when_it_has_work_of_its_role_and_counts_once():
    roles = {"n1": "rollout", "n2": "rollout", "n3": "training", "n4": "training", "n5": "inference"}
    (trainer,) = inside_nodes(["n3"], 1, 1)
    run = SimpleNamespace(
        ledger=SimpleNamespace(running={"1:0:0": "n1", "1:0:1": "n1", "1:0:2": "n4"}),
        leases=SimpleNamespace(at={1: ("training", trainer), 2: ("training", trainer)}),
        hand_outs=SimpleNamespace(leaving={"n5"}),
    )
    seconds = defaultdict(float)

    async def scenario():
        watching = asyncio.ensure_future(bench(epochs=SimpleNamespace(roles=roles)).watch(run, seconds))
        await asyncio.sleep(4.5 * LOOK_S)
        watching.cancel()

    asyncio.run(scenario())
    assert set(seconds) == {"rollout_busy", "rollout_idle", "training_busy", "training_idle", "moving"}
    assert len(set(seconds.values())) == 1 and seconds["moving"] >= LOOK_S
