import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dynarl.cli import main as cli
from dynarl.report.units import parse_rate, parse_size, size

ROOT = Path(__file__).parents[2]
PLAN = ["vps", "plan", "--model", "qwen2.5-1.5b", "--from", "tp=2,pp=2,dp=2", "--to", "tp=1,dp=8"]


def run(*arguments, **options):
    return CliRunner().invoke(cli.main, list(arguments), **options)


def test_json_has_the_plans_fields_and_lists_by_rank():
    done = run(*PLAN, "--link", "25GB/s", "-o", "json")
    assert done.exit_code == 0, done.output
    plan = json.loads(done.output)
    assert plan["schema"] == 1 and plan["ranks"] == list(range(8)) and len(plan["digest"]) == 32
    for name in ("bytes_received", "lower_bound", "bytes_sent", "peak_bytes"):
        assert len(plan[name]) == 8 and all(isinstance(value, int) for value in plan[name]), name
    assert plan["bytes_received"] == plan["lower_bound"]
    assert sum(plan["bytes_sent"]) == sum(plan["bytes_received"]) > 0
    assert plan["rounds"] > 0 < plan["seconds_at_best"] <= plan["seconds"]
    assert plan["seconds_to_plan"] > 0 < plan["seconds_to_plan_one_rank"]
    assert sorted(plan["dst"]["ranks"]) == plan["ranks"]


def test_the_table_says_bytes_bound_peak_rounds_time_and_shows_a_picture():
    done = run(*PLAN, "--link", "25GB/s", env={"PYTHONUTF8": "1"})
    assert done.exit_code == 0, done.output
    for word in (
        "received",
        "the least possible",
        "peak memory",
        "rounds in",
        "Time:",
        "busiest link",
        "from  to 0 ... 7",
    ):
        assert word in done.output, word
    rows = [line for line in done.output.splitlines() if line.endswith("|")]
    assert all(row.split("|")[1][2 * i : 2 * i + 2] == "  " for i, row in enumerate(rows))  # nobody sends to itself
    assert [line.split("|")[0].strip() for line in rows] == [str(rank) for rank in range(8)]
    assert len({len(line) for line in rows}) == 1


def test_the_picture_needs_no_symbols_beyond_ascii():
    from dynarl.cli.vps import picture
    from dynarl.vps.layout_text import parse
    from dynarl.vps.plan import plan_transition
    from dynarl.vps.presets import preset

    plan = plan_transition(preset("smollm2-135m"), parse("dp=2"), parse("engine:tp=3,ranks=2-4"), kinds=["param"])
    plain, fancy = ("\n".join(picture(plan, fancy)) for fancy in (False, True))
    assert plain.isascii() and "#" in plain and "█" in fancy


def test_without_links_there_is_no_estimate():
    assert json.loads(run(*PLAN, "-o", "json").output)["seconds"] is None
    assert "Time:" not in run(*PLAN).output


def test_many_ranks_are_grouped_by_node():
    done = run(
        "vps", "plan", "--model", "qwen2.5-1.5b", "--from", "tp=2,dp=24", "--to", "tp=4,dp=12", "--ranks-per-node", "8"
    )
    rows = [line.split("|")[0].strip() for line in done.output.splitlines() if line.endswith("|")]
    assert rows == ["0-7", "8-15", "16-23", "24-31", "32-39", "40-47"]


def test_kinds_are_those_that_both_ends_hold_unless_chosen():
    def kinds(*options):
        return json.loads(run("vps", "plan", "--model", "smollm2-135m", *options, "-o", "json").output)["kinds"]

    assert kinds("--from", "dp=2", "--to", "dp=1") == ["param", "master", "exp_avg", "exp_avg_sq"]
    assert kinds("--from", "dp=2", "--to", "engine:tp=3") == ["param"]
    assert kinds("--from", "dp=2", "--to", "dp=1", "--kinds", "master,exp_avg") == ["master", "exp_avg"]


def test_a_model_may_be_a_config_file_or_its_directory(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (tmp_path, tmp_path / "config.json"):
        done = run("vps", "plan", "--model", str(model), "--from", "tp=2", "--to", "dp=2", "-o", "json")
        assert json.loads(done.output)["model"] == tmp_path.name


@pytest.mark.parametrize(
    "changed, message",
    [
        (["--from", "tp=5"], "tp must divide the attention heads"),
        (["--to", "tp=x"], "'x' in 'tp=x'"),
        (["--to", "teapot:tp=1"], "'teapot'"),
        (["--model", "gpt-5"], "'gpt-5' is not one of"),
        (["--budget", "many"], "'many' is no size"),
        (["--link", "25"], "'25' is no rate"),
        (["--kinds", "param,step"], "'step'"),
        (["--budget", "1"], "bytes are the least"),
    ],
)
def test_what_cannot_be_planned_is_said_with_exit_code_3(changed, message):
    done = run(*PLAN, *changed, "-o", "json")
    assert done.exit_code == 3
    assert message in json.loads(done.output)["error"]["message"]


@pytest.mark.parametrize("arguments", [["vps", "--help"], ["vps", "plan", "--help"]])
def test_help_imports_neither_torch_nor_numpy(arguments):
    code = (
        f"import sys; sys.argv = ['dynarl', *{arguments!r}]\nfrom dynarl.cli.main import main\ntry: main()\n"
        "except SystemExit: pass\nprint([m for m in ('torch', 'numpy', 'dynarl.vps.plan') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_planning_needs_no_torch():
    code = (
        f"import sys; sys.modules['torch'] = None; sys.argv = ['dynarl', *{PLAN!r}]\n"
        "from dynarl.cli.main import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "peak memory" in done.stdout, done.stderr


@pytest.mark.parametrize("text", ["", "1XB", "GiB", "-1GB", "1 2"])
def test_sizes_and_rates_that_cannot_be_read_are_refused(text):
    for parse in (parse_size, parse_rate):
        with pytest.raises(ValueError, match="write it like"):
            parse(text)


def test_sizes_round_to_what_they_show():
    assert [size(n) for n in (999_499, 999_600, 9_960_000, 1.5e15)] == ["999 kB", "1.0 MB", "10 MB", "1500 TB"]


@pytest.mark.parametrize("content, reason", [("", "Expecting value"), ("[1, 2]", "it has no keys"), ("{", "Expecting property")])
def test_a_file_that_is_no_models_config_is_named(tmp_path, content, reason):
    (tmp_path / "config.json").write_text(content)
    done = run("vps", "plan", "--model", str(tmp_path), *PLAN[4:])
    assert done.exit_code == 3
    assert f"{tmp_path}/config.json is no config.json of a model: {reason}" in done.output


def test_more_ranks_than_can_be_planned_are_refused_at_once():
    done = run("vps", "plan", "--model", "smollm2-135m", "--from", "dp=100000", "--to", "dp=8")
    assert done.exit_code == 3 and "100000 ranks is more than the 4096" in done.stderr


def test_a_terminal_shows_that_a_plan_is_under_way_and_nothing_else_does(monkeypatch):
    assert run(*PLAN, "-o", "json").stderr == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes a terminal of stderr
    done = run(*PLAN, "-o", "json")
    assert "planning from 8 to 8 ranks" in done.stderr and json.loads(done.stdout)["ranks"]
