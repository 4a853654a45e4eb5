import json
import math
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from dynarl.cli.main import main
from dynarl.config import load
from dynarl.scheduler.placement import job
from dynarl.scheduler.placement.plan import Alone, InTurn, SideBySide
from dynarl.scheduler.placement.problem import parse, pose

ROOT = Path(__file__).parents[2]
PLANS, JOBS = ROOT / "configs" / "plans", ROOT / "configs" / "jobs"
JOB = JOBS / "arithmetic-grpo.yaml"


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.setenv("DYNARL_CLUSTER", "none")


def run(*arguments, code=0):
    done = CliRunner().invoke(main, ["plan", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


def plan(path, *arguments):
    return json.loads(run(path, "-o", "json", *arguments))


def stages(node):
    return [node] if node["kind"] == "stage" else [leaf for part in node["parts"] for leaf in stages(part)]


def test_a_plan_file_is_told_with_times_devices_memory_and_reasons():
    told = plan(PLANS / "grpo-7b-math.yaml")
    found = stages(told["plan"])
    assert [leaf["stage"] for leaf in found] == ["rollout", "inference", "training"]
    assert max(leaf["end_s"] for leaf in found) + told["sync_s"] == pytest.approx(told["seconds"])
    assert all(0 <= leaf["devices"][0] < leaf["devices"][1] <= 64 for leaf in found)
    assert all(0 < sum(leaf["memory_bytes"].values()) <= told["memory_limit_bytes"] for leaf in found)
    assert told["why"]["modes"]["temporal"] == pytest.approx(told["seconds"])
    assert all(each["slower"] >= 0 for each in told["why"]["alternatives"])
    assert told["why"]["stability"]["draws"] == 64 and 0 <= told["why"]["stability"]["best"] <= 1
    assert [each["saved"] for each in told["more"]] == sorted(each["saved"] for each in told["more"])


def test_the_same_plan_is_told_twice_the_same():
    both = [plan(PLANS / "moe-30b-a3b.yaml", "--no-more") for _ in range(2)]
    for told in both:
        del told["search_s"]
    assert both[0] == both[1]


def test_a_person_reads_a_tree_a_picture_and_reasons():
    text = run(PLANS / "ppo-7b.yaml", "--no-more")
    for part in (
        "side by side",
        "in 64 chunks of 8 groups",
        "memory of a device",
        "Why",
        "slower",
        "% of 64 draws",
        "As a job",
    ):
        assert part in text
    rows = [line for line in text.splitlines() if line.startswith("node")]
    assert [sum(letter in row for row in rows) for letter in ("RRRR", "CCCC", "TTTT")] == [1, 1, 1]
    assert all(" R" not in row[11:] for row in rows)  # rollout begins at once, what follows it does not


def test_settings_can_be_changed():
    assert (
        plan(PLANS / "grpo-7b-math.yaml", "--no-more", "--set", "devices=128", "--set", "lengths.median=3000")[
            "devices"
        ]
        == 128
    )
    run(PLANS / "grpo-7b-math.yaml", "--set", "devices", code=3)
    assert plan(PLANS / "grpo-7b-math.yaml", "--no-more", "--device", "h200")["device"] == "h200"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ("model=qwen2.5-72b", "weights"),
        ("devices=60", "devices = 60 are 7.5 nodes of 8"),
        ("microbatch_tokens=100", "does not hold one sequence of 28672 tokens"),
        ("lengths.cap=0", "cap = 0"),
        ("groups=0", "groups"),
        ("wrong=1", "wrong"),
        ("kv_fraction=0.01", "rollout"),
        ("lengths.sigma=1e9", "sigma = 1e+09 must be at most 10"),
        ("kv_fraction=2", "kv_fraction: expected float <= 1.0, got 2"),
        ("residue_gb=-5", "residue_gb: expected float >= 0.0, got -5"),
        ("rollout_tp=[]", "rollout_tp: expected array of length >= 1, got []"),
        ("max_running_shared=-1", "max_running_shared: expected int >= 1, got -1"),
        ("devices_per_node=0", "--set devices_per_node: devices_per_node: expected int >= 1, got 0"),
        ("lengths.medain=3", "--set lengths.medain: unknown key lengths.medain; did you mean lengths.median?"),
        ("loop.rounds=2", "--set loop.rounds: loop.members is missing"),
        ("residue_gb=.nan", "residue_gb: expected a finite number, got nan"),
        ("lengths.sigma=.inf", "lengths.sigma: expected a finite number, got inf"),
        ("loop={rounds: 2, members: {a: {fixed_s: 1, item_s: 1, most: .nan}}}", "most: expected a finite number"),
        ("minibatches=1000", "minibatches = 1000 of groups = 512"),
    ],
)
def test_what_cannot_be_is_refused_with_the_arithmetic(changed, told):
    devices = ["--set", "devices=8"] if changed.startswith("model") else []
    assert told in run(PLANS / "grpo-7b-math.yaml", "--set", changed, *devices, code=3)


def test_a_device_without_bandwidth_is_refused(tmp_path):
    device = (ROOT / "dynarl" / "share" / "configs" / "devices" / "h100.yaml").read_text()
    (tmp_path / "slow.yaml").write_text(device.replace("inter_bytes_per_s: 50.0e9", "inter_bytes_per_s: 0"))
    assert "inter_bytes_per_s" in run(PLANS / "grpo-7b-math.yaml", "--device", tmp_path / "slow.yaml", code=3)


def test_a_file_that_is_not_there_or_says_nothing_is_refused(tmp_path):
    run(tmp_path / "none.yaml", code=3)
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert "expected keys" in run(tmp_path / "list.yaml", code=3)


def test_what_has_no_bound_may_be_infinite():
    loop = {"rounds": 2, "members": {"a": {"fixed_s": 1, "item_s": 1, "most": math.inf}}}
    assert parse({"devices": 8, "groups": 8, "loop": loop}, "x").loop.members["a"].most == math.inf


def test_faults_of_a_file_have_its_lines(tmp_path):
    (tmp_path / "mine.yaml").write_text("devices: 8\ngroups: many\nseen:\n  rollout: {seconds: 3, device: 2}\n")
    said = run(tmp_path / "mine.yaml", code=3)
    assert "mine.yaml:2: groups: expected int, got 'many'" in said
    assert "mine.yaml:4: unknown key seen.rollout.device; did you mean seen.rollout.devices?" in said


def test_times_of_a_plan_are_all_shown_alike():
    minutes = run(PLANS / "grpo-7b-math.yaml", "--no-more")
    assert re.search(r"samples in \d+m\d\ds", minutes) and re.search(r"\d\.\ds to \d+m\d\ds", minutes)
    assert not re.search(r"\d\.\d s\b", minutes)
    changes = "groups=8", "devices=16", "lengths.median=700", "lengths.cap=2800"
    seconds = run(PLANS / "grpo-7b-math.yaml", "--no-more", *(word for each in changes for word in ("--set", each)))
    assert re.search(r"\d\.\d s to \d+\.\d s", seconds) and not re.search(r"\d\.\ds\b|\dm\d\ds", seconds)


def test_options_for_jobs_are_refused_with_a_plan_file():
    for option in (("--cluster", "nope"), ("--lengths", "median=3")):
        assert f"{option[0]} is for a job's configuration" in run(PLANS / "grpo-7b-math.yaml", *option, code=3)
    assert "DYNARL_CLUSTER=nope" in run(JOB, "--cluster", "nope", code=3)


def test_a_jobs_plan_is_written_as_a_job_that_loads(tmp_path):
    told = plan(JOB, "--no-more", "--write", tmp_path / "planned.yaml")
    config = load.load(tmp_path / "planned.yaml")
    wanted = told["job"]["settings"]
    assert config.policy.name == wanted["policy.name"]
    assert (config.split.rollout, config.split.training) == (wanted["split.rollout"], wanted["split.training"])
    assert config.algorithm == load.load(JOB).algorithm
    assert any("--lengths" in note for note in told["notes"])


def test_a_plan_file_is_no_job_to_be_written(tmp_path):
    assert "plan file" in run(PLANS / "grpo-7b-math.yaml", "--write", tmp_path / "x.yaml", code=3)
    assert not (tmp_path / "x.yaml").exists()


def test_lengths_of_answers_can_be_said():
    short, long = (plan(JOB, "--no-more", "--lengths", f"median={m},sigma=0.3")["seconds"] for m in (10, 150))
    assert short < long
    assert "--lengths" in run(JOB, "--lengths", "median", code=3)
    assert "median = 1000" in run(JOB, "--lengths", "median=1000", code=3)


@pytest.fixture(scope="module")
def posed():
    import os

    os.environ["DYNARL_CLUSTER"] = "none"
    problem, model, _, _ = job.problem(JOBS / "bench-roles.yaml", ["cluster.nodes=8", "split.rollout=6"], None, None)
    return pose(problem, model)


def beside(chunks, *parts):
    """Stages by number with their devices side by side."""
    node = Alone(*parts[0]) if isinstance(parts[0], tuple) else parts[0]
    for part, number in zip(parts[1:], chunks, strict=True):
        second = Alone(*part) if isinstance(part, tuple) else part
        node = SideBySide(node, second, node.devices + second.devices, number)
    return node


def turns(devices):
    return InTurn(Alone(1, devices, True), Alone(2, devices, True), devices)


def test_each_way_to_place_stages_has_its_settings(posed):
    groups = posed.problem.groups
    apart = job._settings(posed, beside([4, 2], (0, 5), (1, 1), (2, 2)))
    assert (apart["policy.name"], apart["split.rollout"], apart["split.inference"], apart["split.training"]) == (
        "static",
        5,
        1,
        2,
    )
    assert apart["dataflow.chunk"] == {"trajectories": groups // 4, "scored": groups // 2}
    shared = job._settings(posed, beside([4], (0, 5), turns(3)))
    assert (shared["policy.name"], shared["split.inference"], shared["split.training"]) == ("static", 0, 3)
    assert shared["dataflow.chunk"] == {"trajectories": groups // 4, "scored": groups // 4}
    all_in_turn = job._settings(posed, InTurn(Alone(0, 8, True), turns(8), 8))
    assert (all_in_turn["policy.name"], all_in_turn["split.training"]) == ("colocated", 8)
    assert "dataflow.chunk" not in all_in_turn
    later = job._settings(posed, InTurn(beside([4], (0, 5), (1, 3)), Alone(2, 8, True), 8))
    assert (later["policy.name"], later["split.rollout"], later["split.training"]) == ("adaptive", 4, 1)
    assert set(apart["plan.stage_s"]) == {"rollout", "inference", "training"}


def test_nodes_that_a_plan_leaves_idle_generate(posed):
    assert job._settings(posed, beside([4, 4], (0, 4), (1, 1), (2, 2)))["split.rollout"] == 5


def test_other_plans_are_refused_with_what_they_lack(posed):
    with pytest.raises(job.ConfigError, match=r"no policy of a job carries out \(rollout > inference\) \| training"):
        job._settings(posed, beside([2], InTurn(Alone(0, 4, True), Alone(1, 4, True), 4), (2, 4)))


def test_a_terminal_shows_that_a_plan_is_under_way(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes a terminal of stderr
    done = CliRunner().invoke(main, ["plan", str(PLANS / "embodied-gpu-simulator.yaml"), "--no-more", "-o", "json"])
    assert "planning 8 devices" in done.stderr and json.loads(done.stdout)["devices"] == 8
