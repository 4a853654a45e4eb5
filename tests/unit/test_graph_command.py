import json

import pytest
from click.testing import CliRunner
from synthetic_run import SyntheticRun

from dynarl.cli.graph import command


@pytest.fixture
def synthetic(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNARL_RUNS", str(tmp_path))
    synthetic = SyntheticRun(tmp_path)
    synthetic.start()
    return synthetic


def placement(*args):
    found = json.loads(CliRunner().invoke(command, ["-o", "json", *args]).stdout)
    edges = [edge for edge in found["edges"] if edge["vertices"][0] == "component/training"]
    return found["version"], edges[0]["attributes"]["borrowed"]


def test_the_graph_is_shown_as_it_was_at_any_record(synthetic):
    before = synthetic.seq
    synthetic.move("training", ["n1"])
    assert placement() == (before + 2, ["n1"])
    assert placement("--at", str(before)) == (before, [])


def test_a_broken_rule_is_shown_under_the_table(synthetic):
    synthetic.record("step_committed", iteration=5, samples=[])
    assert "which was not started" in CliRunner().invoke(command, []).stdout
