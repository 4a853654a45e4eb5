"""`dynarl simulate` and `dynarl sim`: what they print, and how they refuse."""

import json

import pytest
from click.testing import CliRunner

from dynarl.cli.main import main

SMALL = ("--set", "workload.prompts=64", "--set", "minibatches=2", "--set", "workload.response.cap=2000")


def run(*arguments):
    done = CliRunner().invoke(main, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def simulated(*arguments):
    return json.loads(run("simulate", "dynarl-1.5b-64-math", *SMALL, "-o", "json", *arguments).stdout)


def test_results_are_for_each_policy_and_seed_and_the_same_every_time():
    found = simulated("--policy", "static", "--policy", "dynarl", "--seed", "1", "--seed", "2")
    assert [(r["policy"], r["seed"]) for r in found["results"]] == [
        ("static", 1), ("dynarl", 1), ("static", 2), ("dynarl", 2)]  # fmt: skip
    for result in found["results"]:
        assert {"makespan_s", "throughput", "timeline", "events_sha256"} <= result.keys()
        spans = result["timeline"]
        assert spans[0]["start_s"] == 0 and all(a["end_s"] == b["start_s"] for a, b in zip(spans, spans[1:]))
        assert all(sum(span[kind] for kind in ("rollout", "inference", "training", "idle")) == 64 for span in spans)
        assert spans[-1]["end_s"] == pytest.approx(result["makespan_s"])
    assert len({result["events_sha256"] for result in found["results"]}) == 4
    again = simulated("--policy", "static", "--seed", "2")["results"]
    assert again[0]["events_sha256"] == found["results"][2]["events_sha256"]
    ours = found["summary"]["dynarl"]
    assert simulated("--policy", "static", "--seed", "2", "--seed", "2")["results"] == again
    assert ours["seeds"] == [1, 2] and ours["makespan_s_half"] > 0 and ours["faster"] != 1.0


def test_it_says_whether_the_order_of_policies_hangs_on_the_model():
    both = ("--policy", "static", "--policy", "dynamic-published")
    assert "stability" not in simulated(*both) and "stability" not in simulated("--policy", "static", "--stability")
    found = simulated(*both, "--stability")
    assert sorted(found["stability"]["order"]) == ["dynamic-published", "static"]
    as_modelled = {each["policy"]: each["makespan_s"] for each in found["results"]}
    assert len(found["results"]) == 2 and len(found["stability"]["variants"]) == 6
    for each in found["stability"]["variants"]:
        slower = each["off"].endswith("slower")
        assert all((each["makespan_s"][policy] > seconds) == slower for policy, seconds in as_modelled.items()), each
    shown = run("simulate", "dynarl-1.5b-64-math", *SMALL, *both).stdout.splitlines()[-1]
    assert shown.startswith("With one role 10% slower or faster the order (")


def test_a_picture_in_characters_and_a_page(tmp_path):
    shown = run("simulate", "dynarl-1.5b-64-math", *SMALL, "--policy", "static").stdout
    assert shown.startswith("dynarl-1.5b-64-math: Qwen2.5-1.5B on 64 H100, mathematics\n") and "static, seed 1\n" in shown and "RRRR" in shown and "TTTT" in shown
    twice = run("simulate", "dynarl-1.5b-64-math", *SMALL, "--policy", "static", "--set", "iterations=2").stdout
    assert "static, seed 1, the last iteration\n" in twice
    pytest.importorskip("matplotlib")
    target = tmp_path / "page.html"
    assert run("simulate", "dynarl-1.5b-64-math", *SMALL, "--policy", "static", "-o", "html", "--output", str(target)).exit_code == 0
    assert "<svg" in target.read_text() and "dynarl-1.5b-64-math" in target.read_text()


@pytest.mark.parametrize("arguments, code, says", [
    (("nowhere",), 3, "there are dynarl-1.5b-128-agentic"),
    ((), 2, "give a SCENARIO"),
    (("dynarl-7b-64-math", "--policy", "luck"), 2, "has static, dynamic-published"),
    (("dynarl-7b-64-math", "--set", "gpus"), 2, "write KEY=VALUE"),
    (("dynarl-7b-64-math", "--set", "rollout.tp=3"), 3, "rollout.tp = 3 does not divide training.tp = 4"),
    (("dynarl-7b-64-math", "--nodes", "4"), 2, "--from RUN, with --nodes"),
    (("dynarl-7b-64-math", "--split", "4,1,1"), 2, "--from RUN, with --nodes or --split"),
    (("--from", "last", "--split", "0,1,1"), 2, "as in 6,1,1"),
    (("dynarl-7b-64-math", "--set", "gpus=["), 3, "--set gpus: not YAML"),
    (("dynarl-7b-64-math", "--set", "gpus=64", "--set", "gpus.x=1"), 3, "--set gpus.x: gpus: expected int, got {'x': 1}"),
    (("dynarl-7b-64-math", "--set", "name=[]"), 3, "--set name: name: expected str, got []"),
    (("dynarl-7b-64-math", "--set", "moves.sync_s=-1e-3"), 3, "moves.sync_s = -0.001 must be"),
    (("dynarl-7b-64-math", "--seed", "-1"), 2, "--seed"),
    (("dynarl-7b-64-math", "--output", "x.txt"), 2, "give -o png, svg, html or json"),
    (("dynarl-7b-64-math", "-o", "json", "--output", "/no/such/x.json"), 2, "there is no directory /no/such"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_the_reason(arguments, code, says):
    done = run("simulate", *arguments)
    assert done.exit_code == code and says in done.output


def test_every_shipped_scenario_is_listed():
    listed = json.loads(run("simulate", "--list", "-o", "json").stdout)["scenarios"]
    about = {each["name"]: each["about"] for each in listed}
    assert len(about) >= 12 and about["dynarl-32b-128-agentic"] == "Qwen2.5-32B on 128 H100, agents with tools"
    assert len(set(about.values())) == len(about)
    head, _, *rows = run("simulate", "--list").stdout.splitlines()
    assert head.split() == ["scenario", "about"] and len(rows) == len(about)


def test_a_run_without_a_trace_is_told_so(tmp_path):
    (tmp_path / "journal.jsonl").touch()
    done = run("sim", "calibrate", str(tmp_path))
    assert done.exit_code == 1 and "trace.jsonl has no iteration" in done.output


@pytest.mark.parametrize("command", [("sim", "calibrate"), ("sim", "validate"), ("simulate", "--from")])
def test_a_line_of_a_trace_that_lacks_keys_is_told(tmp_path, command):
    (tmp_path / "journal.jsonl").touch()
    (tmp_path / "config.yaml").touch()
    (tmp_path / "trace.jsonl").write_text('{"iteration": 3}\n')
    done = run(*command, str(tmp_path))
    assert done.exit_code == 1 and "trace.jsonl:1: Object missing required field `policy`" in done.output
