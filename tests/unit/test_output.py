import json

import click
from click.testing import CliRunner

from dynarl.cli import output
from dynarl.errors import NotFoundError


@click.command(cls=output.Command)
@output.format_option()
@click.option("--fail", is_flag=True)
@click.option("--read")
def command(output_format, fail, read):
    if fail:
        raise NotFoundError("no run 'x'; near: y")
    if read:
        open(read).close()
    if output_format == "json":
        output.print_json({"loss": float("nan"), "name": "é"})
    else:
        table = output.table("name", ">loss")
        table.add_row("é", "1")
        output.console().print(table)


def invoke(*args, **env):
    return CliRunner().invoke(command, args, env=env)


def test_json_has_a_schema_number_and_no_bare_nan():
    assert json.loads(invoke("-o", "json").stdout) == {"schema": 1, "loss": None, "name": "é"}


def test_the_environment_chooses_the_format_and_the_option_wins():
    assert invoke(DYNARL_OUTPUT="json").stdout.startswith("{")
    assert "name" in invoke("-o", "table", DYNARL_OUTPUT="json").stdout
    refused = invoke(DYNARL_OUTPUT="unheard-of")
    assert refused.exit_code == 2 and "DYNARL_OUTPUT='unheard-of' is not one of table, json" in refused.stderr


def test_an_error_is_one_line_on_stderr_and_its_exit_code():
    result = invoke("--fail")
    assert (result.exit_code, result.stdout, result.stderr) == (5, "", "error: no run 'x'; near: y\n")


def test_an_error_in_json_mode_is_an_object_on_stdout_and_its_exit_code():
    result = invoke("--fail", "-o", "json")
    assert result.exit_code == 5
    assert json.loads(result.stdout)["error"] == {
        "kind": "NotFoundError",
        "message": "no run 'x'; near: y",
        "exit_code": 5,
    }


def test_a_file_that_cannot_be_read_is_named_without_a_traceback(tmp_path):
    result = invoke("--read", str(tmp_path))
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"error: {tmp_path}: Is a directory\n")
    told = json.loads(invoke("--read", str(tmp_path / "no"), "-o", "json").stdout)["error"]
    assert told == {"kind": "DynarlError", "message": f"{tmp_path / 'no'}: No such file or directory", "exit_code": 1}


def test_a_pipe_gets_no_colour_codes():
    assert "\x1b" not in invoke().stdout
