import json
import struct
import subprocess
import sys

import pytest
from click.testing import CliRunner
from synthetic_run import SyntheticRun

from dynarl import rundir
from dynarl.cli.timeline import command
from dynarl.hypergraph.fold import fold
from dynarl.hypergraph.journal import read
from dynarl.report.timeline import Span, Timeline, timeline
from dynarl.report.timeline_text import render

ROLES = ("rollout", "inference", "training")


@pytest.fixture
def synthetic(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNARL_RUNS", str(tmp_path))
    return SyntheticRun(tmp_path)


def folded(synthetic) -> Timeline:
    return timeline(fold(read(rundir.journal(synthetic.run))))


def plain(spans, end_s=10.0, **fields):
    empty = {"remaps": [], "stages": [], "iterations": [], "evaluations": [], "checkpoints": [], **fields}
    return Timeline("r", 0.0, end_s, ROLES, {}, {"n1": spans}, **empty)


def test_the_spans_of_a_node_follow_each_other_and_change_role_with_the_remaps(synthetic):
    synthetic.whole()
    found = folded(synthetic)
    for spans in found.spans.values():
        for before, after in zip(spans, spans[1:]):
            assert before.end_s == pytest.approx(after.start_s) and before.role != after.role
        assert spans[-1].end_s == pytest.approx(found.end_s)
    changes = sorted(span.start_s for span in found.spans["n1"][1:])
    assert changes == pytest.approx(sorted(r.t_s for r in found.remaps if r.committed), abs=1e-3)
    assert sum(found.node_seconds().values()) == pytest.approx(4 * found.end_s, rel=0.01)


def test_between_two_attempts_a_node_has_no_role(synthetic):
    synthetic.start()
    synthetic.end("requeued")
    synthetic.wait(50)
    synthetic.start()
    synthetic.wait(10)
    synthetic.end()
    first, second = folded(synthetic).spans["n2"]
    assert second.start_s - first.end_s > 50


def test_a_run_that_goes_on_is_drawn_up_to_now(synthetic):
    synthetic.start()
    graph = fold(read(rundir.journal(synthetic.run)))
    assert timeline(graph, now=synthetic.t + 30).end_s == pytest.approx(30.4)
    assert timeline(graph).end_s == pytest.approx(0.4)


def test_the_text_shows_the_role_that_had_most_of_each_column():
    spans = [Span(0, 2.4, "rollout"), Span(2.4, 5.6, "training"), Span(8, 10, "inference")]
    lines = render(plain(spans), width=16, colour=False, fancy=False)
    assert lines[0].plain == "n1    RRTTTT  II"


def test_the_text_fits_its_width_and_is_ascii_where_it_must_be(synthetic):
    synthetic.whole()
    for width in (20, 60, 133):
        for line in render(folded(synthetic), width, colour=False, fancy=False):
            assert len(line.plain) <= width and line.plain.isascii()


def test_many_nodes_are_cut_with_a_word_about_it():
    many = Timeline("r", 0.0, 1.0, ROLES, {}, {f"n{i}": [] for i in range(100)}, [], [], [], [], [])
    lines = [line.plain for line in render(many, 40, colour=False, fancy=False, max_rows=8)]
    assert lines[8].strip() == "... and 92 more nodes"


def test_json_goes_to_stdout_or_to_a_file(synthetic, tmp_path):
    synthetic.whole()
    shown = CliRunner().invoke(command, ["-o", "json"]).stdout
    assert CliRunner().invoke(command, ["-o", "json", "--output", str(tmp_path / "t.json")]).stdout == ""
    assert (tmp_path / "t.json").read_text() == shown
    found = json.loads(shown)
    assert [node["node"] for node in found["nodes"]] == ["n1", "n2", "n3", "n4"]
    assert found["nodes"][0]["spans"][0]["role"] == "rollout"
    assert len(found["remaps"]) == 22 and len(found["iterations"]) == 10


def test_the_picture_is_a_png_or_svg_of_its_name(synthetic, tmp_path):
    pytest.importorskip("matplotlib")
    synthetic.whole()
    assert CliRunner().invoke(command, ["-o", "png"]).stdout.strip() == str(synthetic.run / "timeline.png")
    data = (synthetic.run / "timeline.png").read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data.startswith(b"\x89PNG") and width == 1650 and 300 < height < 800
    CliRunner().invoke(command, ["-o", "svg", "--output", str(tmp_path / "t.svg")])
    assert "<svg" in (tmp_path / "t.svg").read_text()


def test_a_part_of_the_run_can_be_shown(synthetic):
    synthetic.whole()
    found = folded(synthetic)
    low, high = found.window(3, 4)
    starts = {i["iteration"]: i["start_s"] for i in found.iterations}
    assert (low, high) == (starts[3], starts[5])
    assert found.window(10, 10)[1] == found.end_s
    shown = CliRunner().invoke(command, ["--iterations", "3-4"]).stdout
    assert shown.splitlines()[5].split() == ["iter", "3", "4"]
    assert CliRunner().invoke(command, ["--iterations", "12"]).exit_code == 1
    assert CliRunner().invoke(command, ["--iterations", "4-3"]).exit_code == 2


def test_stages_lie_between_the_events_that_bound_them(synthetic):
    synthetic.whole()
    stages = [(s["stage"], round(s["end_s"] - s["start_s"], 2)) for s in folded(synthetic).stages]
    assert stages == [
        ("start", 0.4),
        ("warm start", 4.0),
        ("evaluation", 1.5),
        ("evaluation", pytest.approx(1.6, abs=0.1)),
    ]


def test_a_run_that_has_not_started_has_no_timeline(synthetic):
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 1
    assert "has not started yet" in result.stderr


def test_the_command_loads_matplotlib_for_pictures_only(synthetic):
    synthetic.whole()
    code = (
        "import sys; from dynarl.cli.timeline import command; command(['-o', sys.argv[1]], standalone_mode=False);"
        "print('matplotlib' in sys.modules, file=sys.stderr)"
    )
    for form, loaded in (("json", "False"), ("text", "False")):
        done = subprocess.run([sys.executable, "-c", code, form], capture_output=True, text=True, check=True)
        assert done.stderr.strip() == loaded
