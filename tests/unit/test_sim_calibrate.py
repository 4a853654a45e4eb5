"""Constants from a trace: what a cluster of known constants writes gives them back, and predicts other policies."""

from dataclasses import replace

import msgspec
import pytest

from dynarl import rundir
from dynarl.config import load
from dynarl.config.schema import Algorithm, Cluster, Config, Policy, Rollout, Split
from dynarl.controller.trace import Line, Trace
from dynarl.errors import ConfigError
from dynarl.perf.rollout import StepModel
from dynarl.sim import calibrate, replayed, validate
from dynarl.sim.recorded import recorded
from dynarl.sim.run import run
from dynarl.sim.workload import Lengths, SimRequest, Turn, Workload

STEP = StepModel(0.004, 0.0003, 0.0)
STAGES = {"inference": (0.02, 1e-4), "training": (0.05, 4e-4)}
PHASES = {"prepare": 0.01, "vote": 0.002, "drain": 0.004, "transfer": 0.03, "commit": 0.001, "step": 0.2, "sync": 0.1}
TRUE = calibrate.Calibration(STEP, STAGES, PHASES, 0, ())
CONFIG = Config(
    split=Split(rollout=3, inference=1, training=1),
    policy=Policy(name="threshold", threshold=8, lend_owners=True),
    algorithm=Algorithm(prompts_per_step=16, group_size=8, max_response_tokens=1024),
    rollout=Rollout(max_running=32),
)
HOMES = {"n1": "training", "n2": "inference", "n3": "rollout", "n4": "rollout", "n5": "rollout"}
WORK = Workload(prompts=16, group_size=8, prompt=Lengths(median=20, cap=40), response=Lengths(median=200, sigma=0.8, cap=1024))


def traced(policy, iterations=3, true=TRUE):
    world = true.world(msgspec.structs.replace(CONFIG, policy=policy), HOMES, lambda i, seed: WORK.draw(i, seed))
    done = run(world, 1, iterations=iterations)
    return [msgspec.json.decode(line, type=Line) for line in done.traces], done


WHOLE = msgspec.json.decode(
    Trace().line(policy="static", roles={}, step_s=[0.1], sync_s=0.1, seconds=1.0, switches=[])
)


def line_with(**parts):
    return msgspec.convert(WHOLE | parts, Line)


def test_the_constants_of_a_cluster_come_back_from_its_trace():
    lines, _ = traced(CONFIG.policy)
    found = calibrate.fit(lines)
    assert found.step.fixed_s == pytest.approx(STEP.fixed_s, rel=0.05)
    assert found.step.per_request_s == pytest.approx(STEP.per_request_s, rel=0.05)
    for role in ("inference", "training"):
        assert found.stages[role] == pytest.approx(STAGES[role], rel=0.02)
    for name in ("prepare", "vote", "drain", "transfer", "commit", "sync"):
        assert found.phases[name] == pytest.approx(PHASES[name], abs=2e-3), name
    errors = {constant.name: constant.error for constant in found.constants}
    assert errors["training/per_token"] < 0.01 * STAGES["training"][1], "leases take exactly what they take here"


def test_constants_from_one_policy_predict_others():
    lines, _ = traced(CONFIG.policy)
    found = calibrate.fit(lines)
    for policy in (Policy(name="colocated"), Policy(name="static"), Policy(name="adaptive", lend_owners=True)):
        other, done = traced(policy)
        config = msgspec.structs.replace(CONFIG, policy=policy)
        [row] = validate.compare(config, other, found)
        assert row.name == policy.name and row.nodes == 5
        assert row.measured_s == pytest.approx(sum(i.makespan_s for i in done.iterations) / 3, rel=0.01)
        assert abs(row.error) < 0.05, row  # the adaptive policy decides otherwise on fitted constants now and then


def test_a_wrong_constant_shows_in_the_prediction():
    lines, _ = traced(Policy(name="colocated"))
    found = calibrate.fit(lines)
    slow = calibrate.Calibration(STEP.scaled(1.5), found.stages, found.phases, 0, ())
    [row] = validate.compare(msgspec.structs.replace(CONFIG, policy=Policy(name="colocated")), lines, slow)
    assert row.error > 0.1


def written(tmp_path, lines):
    rundir.config(tmp_path).write_text(load.dump(msgspec.structs.replace(CONFIG, cluster=Cluster(nodes=5))))
    rundir.trace(tmp_path).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return tmp_path


def test_a_run_on_more_nodes_has_the_same_parts_of_them(tmp_path):
    path = written(tmp_path, traced(CONFIG.policy, 1)[0])
    for num_nodes, parts in ((None, (3, 1, 1)), (10, (6, 2, 2)), (16, (10, 3, 3)), (4, (2, 1, 1)), (2, (1, 0, 1))):
        found = recorded(path, num_nodes)
        homes = list(found.world("threshold").homes.values())
        assert tuple(homes.count(role) for role in ("rollout", "inference", "training")) == parts
        assert f"on {sum(parts)} nodes: {parts[0]} rollout, {parts[1]} inference, {parts[2]} training" in found.about
    given = recorded(path, None, Split(rollout=4, inference=3, training=1))
    assert sorted(given.world("static").homes.values()) == ["inference"] * 3 + ["rollout"] * 4 + ["training"]
    with pytest.raises(ConfigError, match="a split of 8 nodes does not go with 9 nodes"):
        recorded(path, 9, Split(rollout=4, inference=3, training=1))


def test_a_row_that_chance_made_short_does_not_outweigh_the_others():
    rows = [(n, 100, 100 * n, 0, 100 * (0.01 + 0.001 * n)) for n in (2, 4, 8, 16, 32)]
    found = calibrate.fit([line_with(decode=[*rows, (12, 5, 60, 0, 1e-4)])])
    assert found.step.fixed_s + 16 * found.step.per_request_s == pytest.approx(0.026, rel=0.1)


def test_what_would_be_negative_is_left_out():
    found = calibrate.fit([line_with(decode=[(n, 10, 10 * n, 0, 10 * (0.01 - 1e-5 * n)) for n in (1, 2, 5, 9)])])
    assert found.step.per_request_s == 0.0 and found.step.fixed_s == pytest.approx(0.01, rel=0.01)


def test_what_verdicts_take_comes_back_from_when_the_controller_heard_of_answers():
    true = replace(TRUE, verify_s=0.02, verdict_s=0.012)
    config = msgspec.structs.replace(CONFIG, policy=Policy(name="static"))
    lines, _ = traced(config.policy, 2, true)
    found = replayed.with_verdicts(config, lines, TRUE)
    assert found.verdict_s == pytest.approx(0.012, abs=0.001) and found.verify_s == pytest.approx(0.02, abs=0.002)
    assert [c.name for c in found.constants] == ["rollout/verify", "rollout/verdict"]
    without, _ = traced(config.policy, 2)
    assert replayed.with_verdicts(config, without, TRUE).verdict_s < 0.0005


def test_a_node_gives_its_verdicts_one_after_another():
    one = [SimRequest(f"1:0:{member}", 10, (Turn(5),)) for member in range(8)]
    config = Config(split=Split(rollout=1, inference=1, training=1), policy=Policy(name="static"),
                    algorithm=Algorithm(prompts_per_step=1, group_size=8), rollout=Rollout(max_running=32))  # fmt: skip
    homes = {"n1": "training", "n2": "inference", "n3": "rollout"}

    def heard_s(verdict_s):
        done = run(replace(TRUE, verdict_s=verdict_s).world(config, homes, lambda i, seed: one), 1)
        return [answer[-1] for answer in msgspec.json.decode(done.traces[0], type=Line).answers]

    at_once, in_turn = heard_s(0.0), heard_s(0.1)
    assert max(at_once) - min(at_once) < 1e-4
    assert [later - at_once[0] for later in in_turn] == pytest.approx([0.1 * n for n in range(1, 9)], abs=1e-3)


SWITCH = {"prepare_ms": 4.0, "vote_ms": 8.0, "drain_ms": 1.0, "transfer_ms": 20.0, "verify_ms": 6.0, "commit_ms": 2.0}


def test_orders_to_nodes_without_work_are_those_of_a_policy_that_moves_all_at_once():
    decode = [(8, 100, 800, 0, 0.5)]
    idle = line_with(policy="colocated", decode=decode, switches=[SWITCH])
    busy = line_with(policy="threshold", decode=decode, switches=[{k: 3 * v for k, v in SWITCH.items()}, SWITCH])
    found = calibrate.fit([line_with(decode=decode)], [idle, busy])
    assert found.at_work == pytest.approx(2.0)
    assert (found.phases["prepare"], found.phases["vote"], found.phases["commit"]) == pytest.approx((0.004, 0.007, 0.002))
    assert found.phases["transfer"] == pytest.approx(0.1 / 3), "a mean over all changes"
    alone = calibrate.fit([busy])
    assert alone.at_work == 1.0 and alone.phases["prepare"] == pytest.approx(0.008)


def test_orders_take_longer_on_nodes_that_work():
    threshold, slow = Policy(name="threshold", threshold=8, lend_owners=True), replace(TRUE, at_work=10.0)
    (quick_line, *_), _ = traced(threshold, 1)
    (slow_line, *_), _ = traced(threshold, 1, slow)
    assert slow_line.switches[0]["prepare_ms"] == pytest.approx(10 * quick_line.switches[0]["prepare_ms"], rel=0.01)
    assert slow_line.switches[0]["transfer_ms"] == pytest.approx(quick_line.switches[0]["transfer_ms"], rel=0.01)


def test_what_a_benchmark_does_not_count_is_neither_fitted_nor_compared():
    lines, done = traced(Policy(name="colocated"), 3)
    seconds = [line.seconds for line in lines]
    first, *rest = [msgspec.structs.replace(line, candidate="colocated") for line in lines]
    cold = msgspec.structs.replace(first, seconds=10 * first.seconds)
    late = [msgspec.structs.replace(line, seconds=line.seconds + 5.0, enter_s=line.enter_s + 5.0) for line in rest]
    assert calibrate.warm([cold, *late]) == late
    [row] = validate.compare(CONFIG, [cold, *late], TRUE)
    assert row.measured_s == pytest.approx(sum(seconds[1:]) / 2, rel=0.02) and abs(row.error) < 0.01
    assert calibrate.warm(lines) == lines, "a job counts all of its iterations"


def test_answers_come_back_as_they_were_with_the_work_of_tools_in_even_shares():
    line = line_with(answers=[("3:7:1", 11, 30, 9, 2, 4.0, 1.5), ("3:7:0", 11, 5, 0, 0, 0.0, 0.5)])
    tool_ns = 2_000_000_000
    assert calibrate.requests(line) == [
        SimRequest("3:7:0", 11, (Turn(5),)),
        SimRequest("3:7:1", 11, (Turn(7, tool_ns, 5), Turn(7, tool_ns, 4), Turn(7))),
    ]


def test_a_run_without_a_trace_is_told_so(tmp_path):
    with pytest.raises(calibrate.NoTrace, match="trace.jsonl has no iteration"):
        calibrate.read(tmp_path)
    with pytest.raises(calibrate.NoTrace, match="too short"):
        calibrate.fit([line_with()])


@pytest.mark.parametrize("bad, says", [
    ({"iteration": 3}, "missing required field `policy`"),
    ([3], "Expected `object`, got `array`"),
    (WHOLE | {"answers": [["3:7", 11, 30, 9, 2, 4.0, 1.5]]}, r"`\$.answers\[0\]\[0\]`"),
    (WHOLE | {"leases": [["training", 11, None]]}, r"`\$.leases\[0\]\[2\]`"),
])  # fmt: skip
def test_a_line_that_lacks_something_is_told_with_its_place(tmp_path, bad, says):
    good = msgspec.json.encode(line_with(iteration=1))
    rundir.trace(tmp_path).write_bytes(good + b'\n{"iteration": 2, "pol\n' + msgspec.json.encode(bad) + b"\n")
    with pytest.raises(calibrate.NoTrace, match=rf"trace.jsonl:3: .*{says}, in '"):
        calibrate.read(tmp_path)
    rundir.trace(tmp_path).write_bytes(good + b'\n{"iteration": 2, "pol\n')
    assert [line.iteration for line in calibrate.read(tmp_path)] == [1], "what a crash cut short is left out"
