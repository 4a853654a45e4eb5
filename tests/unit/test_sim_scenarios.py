import math
import sys
from pathlib import Path

import msgspec
import pytest
import yaml
from published_figures import published

from dynarl.errors import ConfigError
from dynarl.sim.run import simulate
from dynarl.sim.scenario import Scenario, load_scenario, scenario_names
from dynarl.sim.workload import Lengths, Tools

POLICIES = ["static", "dynamic-published", "priority-published", "dynarl"]
# Of 7B on 16 GPUs, small enough for tests: 4 nodes of a trainer's replica or two engines.
SMALL = {
    "gpus": 16,
    "placement": {"rollout": 8, "inference": 4, "training": 4},
    "workload": {"prompts": 16, "group_size": 4, "response": {"median": 400, "cap": 4000}},
    "minibatches": 4,
}


def small(**changes) -> Scenario:
    return load_scenario("dynarl-7b-64-agentic", **SMALL | changes)


def test_there_is_a_scenario_for_each_published_experiment():
    assert scenario_names() == sorted({scenario for scenario, _, _ in published()})
    for name in scenario_names():
        assert list(load_scenario(name).policies) == POLICIES


def constants(name: str) -> dict:
    values = msgspec.to_builtins(load_scenario(name))
    return {key: value for key, value in values.items() if key not in ("name", "about", "gpus", "placement")}


@pytest.mark.parametrize("model", ["1.5b", "7b", "32b"])
@pytest.mark.parametrize("task", ["math", "agentic"])
def test_nothing_but_gpus_and_placement_differs_between_sizes(model, task):
    assert constants(f"dynarl-{model}-64-{task}") == constants(f"dynarl-{model}-128-{task}")


@pytest.mark.parametrize("model", ["1.5b", "7b", "32b"])
def test_nothing_but_the_workload_differs_between_tasks(model):
    math, agentic = constants(f"dynarl-{model}-64-math"), constants(f"dynarl-{model}-64-agentic")
    assert {key for key in math if math[key] != agentic[key]} == {"workload", "throughput"}


def test_a_model_differs_in_what_it_is_and_how_long_it_answers_only():
    allowed = {
        "model", "rollout.tp", "rollout.max_running", "rollout.memory_fraction", "inference.tp", "training.tp",
        "moves.join_s.training", "policies.dynamic-published.per_engine", "policies.priority-published.per_engine",
        "workload.response.median", "workload.response.tail_start",
    }  # fmt: skip

    def flat(values: dict, prefix: str = "") -> dict:
        out = {}
        for key, value in values.items():
            out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        return out

    for task in ("math", "agentic"):
        one, *others = (flat(constants(f"dynarl-{model}-64-{task}")) for model in ("1.5b", "7b", "32b"))
        for other in others:
            assert {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)} <= allowed


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_runs_and_gives_the_same_twice(policy):
    first, second = (simulate(small(), policy, seed=3) for _ in range(2))
    assert first == second and first["makespan_s"] > 0
    # Every GPU is accounted for at any time, from the start to the end.
    assert {i["rollout"] + i["inference"] + i["training"] + i["idle"] for i in first["timeline"]} == {16}
    ends = [interval["end_s"] for interval in first["timeline"]]
    assert [interval["start_s"] for interval in first["timeline"]] == [0.0, *ends[:-1]]


def test_in_turn_all_gpus_have_one_role_at_a_time():
    roles = [
        {role for role in ("rollout", "inference", "training") if interval[role]}
        for interval in simulate(small(), "static", 1)["timeline"]
    ]
    assert [role for role in roles if role] == [{"rollout"}, {"inference"}, {"training"}]


def test_slower_hardware_takes_longer():
    base = simulate(small(), "static", 1)["makespan_s"]
    for part in ("rollout", "inference", "training", "moves"):
        assert simulate(small(errors={part: 1.5}), "static", 1)["makespan_s"] > base


def fails(**changes) -> dict:
    return {"failures": [{"iteration": 1, "at_s": 1.0, "node": "n3", "role": "rollout"} | changes]}


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"gpus": 18}, "18 GPUs / training.tp = 4 leaves 2 over"),
        ({"placement": {"rollout": 12}}, r"placement: 12 \+ 4 \+ 4 = 20 GPUs, but gpus = 16"),
        ({"placement": {"rollout": 10, "inference": 2}}, "placement.rollout = 10 GPUs is no multiple of training.tp = 4"),
        ({"placement": {"rollout": 12, "inference": 4, "training": 0}}, "placement.training = 0"),
        ({"rollout": {"tp": 3}}, "rollout.tp = 3 does not divide training.tp = 4"),
        ({"minibatches": 3}, "16 prompts / minibatches = 3 leaves 1 over"),
        ({"minibatches": 8}, "4 replicas of the trainer, but a minibatch has 16 / 8 = 2 groups"),
        ({"model": "qwen2.5-72b"}, "rollout of qwen2.5-72b.*weights 145.4 GB / 2 = 72.7 GB per device > 0.55 x"),
        ({"model": "qwen2.5-32b", "rollout": {"memory_fraction": 0.9}}, "training of qwen2.5-32b.*GB per device >"),
        ({"rollout": {"memory_fraction": 0.092}}, "are .* tokens, but an engine of 2 GPUs holds"),
        ({"training": {"step_s": -1.0}}, "training.step_s = -1 must be 0 seconds or more"),
        ({"errors": {"moves": 0.0}}, "errors.moves = 0 is a factor, above 0"),
        ({"iterations": 2, "measured": 3}, "measured = 3 of iterations = 2"),
        ({"gpu": 16}, r"unknown key gpu; did you mean gpus\?"),
        ({"minibatches": 0}, "minibatches = 0 must be at least 1"),
        ({"training": {"tp": 0}}, "training.tp = 0 must be at least 1"),
        ({"rollout": {"max_running": -3}}, "rollout.max_running = -3 must be at least 1"),
        ({"rollout": {"step_overhead_s": 0.0}}, "rollout.step_overhead_s = 0 must be above 0"),
        ({"tools_at_once": 0}, "tools_at_once = 0 must be at least 1"),
        ({"policies": {"static": {"max_queued": -5}}}, "policies.static.max_queued = -5 must not be below 0"),
        ({"failures": [{"at_s": 1.0}]}, r"failures\[0\].iteration is missing"),
        (fails(at_s=-1), r"failures\[0\].at_s: expected float >= 0.0, got -1"),
        (fails(iteration=0), r"failures\[0\].iteration: expected int >= 1, got 0"),
        (fails(iteration=2), r"failures\[0\].iteration = 2: there are iterations = 1"),
        (fails(role="foo"), r"failures\[0\].role: expected one of rollout, inference, training, got 'foo'"),
        (fails(node="n01"), r"failures\[0\].node = 'n01' is none of the 4 nodes, n0 to n3"),
        ({"policies": {"static": {"policy": {"name": "greedy"}}}}, "policies.static.policy.name: expected one of .*'greedy'"),
        ({"policies": {"static": {"per_engine": 0}}}, "policies.static.per_engine = 0 must be at least 1"),
        ({"moves": {"join_s": {"rolout": 1.0}}}, "unknown key moves.join_s.rolout"),
        ({"rollout": 3}, "rollout is a section with keys of its own, got 3"),
        ({"model": "gpt5"}, "model 'gpt5': there are"),
        ({"device": "b9000"}, "device 'b9000': there are"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_with_the_arithmetic(changes, text):
    values = {
        key: {**SMALL[key], **value} if isinstance(value, dict) and isinstance(SMALL.get(key), dict) else value
        for key, value in changes.items()
    }
    with pytest.raises(ConfigError, match=text):
        small(**values)


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf"])
@pytest.mark.parametrize(
    "key",
    ["workload.response.sigma", "workload.response.median", "workload.response.drift", "workload.response.tail_alpha",
     "workload.tools.median_s", "workload.tools.most_s", "workload.tools.later_turn_share", "workload.tools.mean_calls",
     "rollout.memory_fraction", "rollout.efficiency.memory", "rollout.step_overhead_s", "moves.join_s.rollout", "moves.sync_s",
     "errors.moves", "decision_s", "policies.static.policy.dwell_s"],
)  # fmt: skip
def test_numbers_are_finite(key, number):
    with pytest.raises(ConfigError, match=rf"--set {key}: {key}: expected a finite number, got"):
        load_scenario("dynarl-7b-64-agentic", [f"{key}={number}"])


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_law_is_of_finite_numbers(wrong):
    for law in (lambda: Lengths(median=wrong, cap=1), lambda: Lengths(median=1, cap=1, tail_alpha=wrong),
                lambda: Tools(mean_calls=1, most_calls=1, median_s=wrong)):  # fmt: skip
        with pytest.raises(ValueError, match="must be a finite number"):
            law()


def test_a_device_without_bandwidth_is_refused(tmp_path):
    share = Path(sys.modules["dynarl"].__file__).parent / "share" / "configs" / "devices" / "h100.yaml"
    values = yaml.safe_load(share.read_text()) | {"memory_bytes_per_s": 0.0}
    (tmp_path / "broken.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match="memory_bytes_per_s = 0 must be above 0"):
        small(device=str(tmp_path / "broken.yaml"))


def test_faults_of_a_device_have_their_lines(tmp_path):
    share = Path(sys.modules["dynarl"].__file__).parent / "share" / "configs" / "devices" / "h100.yaml"
    lines = [line for line in share.read_text().splitlines() if not line.startswith("reserved_bytes")]
    (tmp_path / "broken.yaml").write_text("\n".join([*lines, "step_overhed_s: 1e-3", "reserved_bytes: .nan"]))
    with pytest.raises(ConfigError) as told:
        small(device=str(tmp_path / "broken.yaml"))
    assert str(told.value).splitlines() == [
        f"{tmp_path}/broken.yaml:{len(lines) + 1}: unknown key step_overhed_s; did you mean step_overhead_s?",
        f"{tmp_path}/broken.yaml:{len(lines) + 2}: reserved_bytes: expected a finite number, got nan",
    ]


def test_files_that_extend_each_other_are_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: [a.yaml]\n")
    with pytest.raises(ConfigError, match="a.yaml extends b.yaml extends a.yaml: a circle"):
        load_scenario(str(tmp_path / "a.yaml"))


def test_a_file_of_ones_own_lies_over_those_that_come_with_dynarl(tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: dynarl-7b-64-math.yaml\nname: mine\nrollout: {max_running: 32}\n")
    mine, theirs = load_scenario(str(tmp_path / "mine.yaml")), load_scenario("dynarl-7b-64-math")
    assert mine.rollout.max_running == 32 and mine.rollout.tp == theirs.rollout.tp
    with pytest.raises(ConfigError, match="there are dynarl-1.5b-128-agentic, "):
        load_scenario("no-such")


def test_a_scenario_without_a_policy_is_refused(tmp_path):
    (tmp_path / "none.yaml").write_text(
        "model: qwen2.5-1.5b\ndevice: h100\ngpus: 3\nplacement: {rollout: 1, inference: 1, training: 1}\n"
        "workload: {prompts: 8, group_size: 2, prompt: {median: 1, cap: 2}, response: {median: 5, cap: 10}}\n"
        "moves: {leave_rollout_s: 1, join_s: {}}\npolicies: {}\n"
    )
    with pytest.raises(ConfigError, match="policies: there is none to simulate"):
        load_scenario(str(tmp_path / "none.yaml"))


def test_faults_of_a_file_have_its_lines_and_the_nearest_keys(tmp_path):
    (tmp_path / "below.yaml").write_text("extends: dynarl-7b-64-math.yaml\nrollout:\n  tp: two\n")
    (tmp_path / "mine.yaml").write_text(
        "extends: below.yaml\nworkload:\n  response:\n    medain: 3\n    sigma: -1\npolicies:\n"
        "  static:\n    policy: {treshold: 4}\n  own: {order: arrival}\n"
    )
    with pytest.raises(ConfigError) as told:
        load_scenario(str(tmp_path / "mine.yaml"), ["minibatchs=2"])
    assert sorted(str(told.value).splitlines()) == sorted([
        f"{tmp_path}/below.yaml:3: rollout.tp: expected int, got 'two'",
        f"{tmp_path}/mine.yaml:4: unknown key workload.response.medain; did you mean workload.response.median?",
        f"{tmp_path}/mine.yaml:8: unknown key policies.static.policy.treshold; did you mean policies.static.policy.threshold?",
        f"{tmp_path}/mine.yaml:9: policies.own.policy is missing",
        "--set minibatchs: unknown key minibatchs; did you mean minibatches?",
    ])  # fmt: skip
