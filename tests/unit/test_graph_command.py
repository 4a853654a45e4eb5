import json
import struct
import subprocess
import sys
import xml.etree.ElementTree

import pytest
from click.testing import CliRunner
from graph_records import decision
from synthetic_run import SyntheticRun

from dynarl.cli.graph import command


@pytest.fixture
def synthetic(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNARL_RUNS", str(tmp_path))
    synthetic = SyntheticRun(tmp_path)
    synthetic.start()
    return synthetic


def invoke(*args):
    return CliRunner().invoke(command, args)


def placement(*args):
    found = json.loads(invoke("-o", "json", *args).stdout)
    edges = [edge for edge in found["edges"] if edge["vertices"][0] == "component/training"]
    return found["version"], edges[0]["attributes"]["borrowed"]


def test_the_graph_is_shown_as_it_was_at_any_record(synthetic):
    before = synthetic.seq
    synthetic.move("training", ["n1"])
    assert placement() == (before + 2, ["n1"])
    assert placement("--at", str(before)) == (before, [])


@pytest.mark.parametrize("version", [0, 999])
def test_a_record_that_is_not_there_is_an_error_that_names_those_that_are(synthetic, version):
    result = invoke("--at", str(version))
    assert result.exit_code == 1 and result.stdout == ""
    assert f"--at {version}: the journal of {synthetic.run.name} has records 1 to {synthetic.seq}" in result.stderr


def test_a_broken_rule_is_shown_under_the_table(synthetic):
    synthetic.record("step_committed", iteration=5, samples=[])
    assert "which was not started" in invoke().stdout


def test_the_text_says_what_runs_where_what_flows_and_who_waits(synthetic):
    synthetic.iteration(1, moves=False)
    synthetic.record("iteration_started", iteration=2, version=2, samples=[])
    seen = {"groups__inference__waiting": 0, "groups__inference__in_work": 0}
    type, fields = decision(1, 2, requests__waiting=0, requests__running=5, **seen)
    synthetic.record(type, **fields)
    lines = [" ".join(line.split()) for line in invoke().stdout.splitlines()]
    assert lines[0].endswith(", iteration 2")
    assert "rollout n[1-2] 2 instances always weights v2" in lines
    assert "training n4 1 replica, tp=1,pp=1 regular weights v2, optimizer v2" in lines
    assert "prompts controller → rollout samples, 0 wait, 5 at work preferred" in lines
    assert "training n4 gradients" in lines
    assert "inference waits: trajectories is empty until rollout is further" in lines


def test_json_answers_the_questions_that_people_ask_too(synthetic):
    synthetic.record("iteration_started", iteration=1, version=1, samples=[])
    synthetic.wait(3.0)
    synthetic.record("step_committed", iteration=1, samples=[], stages={"rollout": 2.0})
    found = json.loads(invoke("-o", "json").stdout)
    assert (found["free"], found["waits"], found["staleness"]) == ([], [], {"weights": 0, "optimizer": 0})
    assert [(s["component"], s["alone_s"]) for s in found["critical_path"]] == [("rollout", 2.0), ("training", 1.0)]


@pytest.mark.parametrize("workflow, nodes", [("grpo", 4), ("agentic", 40), ("ppo-critic", 4)])
def test_the_picture_names_every_component_and_channel(synthetic, tmp_path, workflow, nodes):
    pytest.importorskip("matplotlib")
    run = SyntheticRun(tmp_path, name=workflow, nodes=nodes)
    run.config["algorithm"]["workflow"] = workflow
    run.start()
    run.move("training", ["n1"])
    result = invoke(run.run.name, "-o", "svg")
    assert result.output.strip() == str(run.run / "graph.svg"), result.output
    drawn = xml.etree.ElementTree.parse(run.run / "graph.svg")
    comments = (run.run / "graph.svg").read_text()  # matplotlib draws letters, and has the text beside them
    found = json.loads(invoke(run.run.name, "-o", "json").stdout)
    kinds = ("component/", "channel/")
    names = [v.partition("/")[2].replace("_", " ") for v in found["vertices"] if v.startswith(kinds)]
    assert len(names) > 7 and [name for name in names if f"<!-- {name} -->" not in comments] == []
    assert drawn.getroot().tag.endswith("svg")


def test_a_png_goes_where_it_is_asked_to(synthetic, tmp_path):
    pytest.importorskip("matplotlib")
    assert invoke("-o", "png", "--output", str(tmp_path / "g.png")).exit_code == 0
    data = (tmp_path / "g.png").read_bytes()
    assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24])[0] > 1000
    assert "cannot write" in invoke("-o", "png", "--output", str(tmp_path / "no" / "g.png")).stderr


def test_text_needs_no_matplotlib(synthetic):
    program = "import sys; sys.modules['matplotlib'] = None; from dynarl.cli.main import main; main(['graph'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "training" in done.stdout
