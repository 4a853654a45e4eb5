import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from machine import slowness

from dynarl import __version__
from dynarl.cli import main as cli

ROOT = Path(__file__).parents[2]
BIN = ROOT / "bin" / "dynarl"
ENVIRONMENT = {**os.environ, "DYNARL_PYTHON": sys.executable}


def test_help_takes_less_than_300_ms():
    command = [sys.executable, "-m", "dynarl.cli.main", "--help"]
    times = []
    for _ in range(5):  # the best of five, of CPU time: other programs may be busy beside this one
        before = os.times()
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(times) < 0.3 * slowness(), times


@pytest.mark.parametrize("arguments", [["--help"], ["submit", "--help"], ["doctor", "--help"], ["config", "show"]])
def test_neither_torch_nor_mpi_is_imported(arguments):
    code = (
        f"import sys; sys.argv = ['dynarl', *{arguments!r}]\nfrom dynarl.cli.main import main\ntry: main()\n"
        "except SystemExit: pass\nprint([m for m in ('torch', 'mpi4py', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_help_alone_imports_none_of_the_commands():
    code = (
        "import sys; from dynarl.cli import main; main.main(['--help'], standalone_mode=False); "
        "print([m for m in sys.modules if m.partition('.')[0] == 'dynarl'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert sorted(eval(done.stdout.splitlines()[-1])) == ["dynarl", "dynarl.cli", "dynarl.cli.main"]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_is_there_and_has_help(name):
    done = CliRunner().invoke(cli.main, [name, "--help"])
    assert done.exit_code == 0, done.output
    command = cli.main.get_command(None, name)
    assert command.help


def test_the_checkouts_program_runs_from_anywhere_and_through_a_link(tmp_path):
    (tmp_path / "link").symlink_to(BIN)
    done = subprocess.run(
        [tmp_path / "link", "--version"], capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT, check=True
    )
    assert done.stdout == f"dynarl, version {__version__}\n"


def test_an_unknown_command_is_a_usage_error():
    assert CliRunner().invoke(cli.main, ["frobnicate"]).exit_code == 2


def test_an_interrupt_ends_with_130(monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("dynarl.config.load.load", interrupted)
    assert CliRunner().invoke(cli.main, ["config", "validate", "x.yaml"]).exit_code == 130
