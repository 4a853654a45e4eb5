"""How commands speak: data to stdout as a table or as JSON, everything else to stderr, and what exit codes mean.

JSON has a `schema` number and stable keys; unknown values are null; times are ISO 8601 in UTC, durations float seconds
unless the key says otherwise (`_ms`). In JSON mode an error is an object on stdout, and the exit code is not 0.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
import msgspec

from dynarl.errors import DynarlError

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
FORMATS = ("table", "json")  # of DYNARL_OUTPUT; some commands have more
PIPED_WIDTH = 100


class Command(click.Command):
    """A command whose DynarlErrors are shown as its `-o` asks, and end it with their exit code; so are files that cannot
    be read or written."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except DynarlError as error:
            raise self._shown(error, context) from error
        except OSError as error:
            if error.filename is None:  # of a socket or a pipe
                raise
            raise self._shown(DynarlError(f"{error.filename}: {error.strerror}"), context) from error

    @staticmethod
    def _shown(error: DynarlError, context: click.Context) -> Shown:
        return Shown(error, as_json=context.params.get("output_format") == "json")


class Shown(click.ClickException):
    """A DynarlError on its way out through click: one line on stderr, or an object on stdout."""

    def __init__(self, error: DynarlError, as_json: bool):
        super().__init__(str(error))
        self.exit_code = error.exit_code
        self.kind = type(error).__name__
        self.as_json = as_json

    def show(self, file: IO[Any] | None = None) -> None:
        if self.as_json:
            print_json({"error": {"kind": self.kind, "message": self.message, "exit_code": self.exit_code}})
        else:
            note(f"error: {self.message}")


def format_option(*formats: str, default: str | None = "table") -> Callable:
    """The option `-o/--format`, passed on as `output_format`; $DYNARL_OUTPUT gives the default where it fits."""
    choices = formats or ("table", "json")

    def fill_in(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        wanted = os.environ.get("DYNARL_OUTPUT")
        if wanted and wanted not in FORMATS:
            raise click.UsageError(f"DYNARL_OUTPUT={wanted!r} is not one of {', '.join(FORMATS)}")
        return value or (wanted if wanted in choices else default)

    help_text = "How to print the result" + (f"; default {default}." if default else ".")
    # Eager, so that an error in another parameter is already reported in the wanted form.
    return click.option(
        "-o", "--format", "output_format", type=click.Choice(choices), callback=fill_in, is_eager=True, help=help_text
    )


def picture_options(stem: str) -> Callable:
    """What a command takes that draws a run: RUN, the form, and `--output`, passed on as `target`."""
    options = (
        click.argument("run", default="last"),
        format_option("text", "png", "svg", "json", default="text"),
        click.option(
            "--output",
            "target",
            type=click.Path(path_type=Path, dir_okay=False),
            help=f"File to write; default {stem}.png or .svg in the run's directory, JSON to stdout.",
        ),
    )
    return lambda command: functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


def print_json(data: dict[str, Any], target: Path | None = None) -> None:
    """Print one JSON object with the schema number in front, or write it to a file. Floats not finite become null."""
    text = msgspec.json.format(msgspec.json.encode({"schema": SCHEMA, **data}), indent=2).decode()
    if target is None:
        click.echo(text)
    else:
        target.write_text(text + "\n", encoding="utf-8")


def note(message: str) -> None:
    """Say something to a person without touching stdout."""
    click.echo(message, err=True)


def console(stderr: bool = False) -> Console:
    """Where tables and colours go. Colour only on a terminal and without NO_COLOR; a fixed width when piped.

    Boxes turn to ASCII by themselves when the stream's encoding is not UTF-8; see `fancy` for other symbols.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PIPED_WIDTH, highlight=False)


@contextmanager
def progress(label: str) -> Iterator[Callable[[int], None]]:
    """A running count of bytes on stderr while something long goes on; silent where that is no terminal.

    Yields what to tell the bytes done since the last time.
    """
    from rich.progress import DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), DownloadColumn(), TransferSpeedColumn()
    screen = console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done: bar.advance(task, done)


@contextmanager
def busy(label: str) -> Iterator[None]:
    """Say on stderr that something is under way whose end is not known; silent where that is no terminal."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    screen = console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        bar.add_task(label, total=None)
        yield


def fancy(console: Console) -> bool:
    """May symbols beyond ASCII be printed there?"""
    return console.encoding.lower().startswith("utf")


def table(*columns: str) -> Any:
    """An empty table in the house style; a column that begins with ">" is right-aligned."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        result.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return result
