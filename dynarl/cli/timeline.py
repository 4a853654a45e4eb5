"""`dynarl timeline`: which node had which role when."""

from __future__ import annotations

import re
import time
from pathlib import Path

import click

from dynarl import rundir
from dynarl.cli import output
from dynarl.errors import DynarlError


def _range(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", value)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise click.BadParameter(f"{value!r} is not a range of iterations such as 3 or 3-7")
    return int(match[1]), int(match[2] or match[1])


@click.command("timeline", cls=output.Command)
@output.picture_options("timeline")
@click.option("--iterations", "window", metavar="FIRST-LAST", callback=_range, help="Only this part of the run.")
def command(run: str, output_format: str, target: Path | None, window: tuple[int, int] | None) -> None:
    """Which node had which role when, with remaps and iterations. RUN: its id, the start of it, a job id, or `last`."""
    from dynarl.report.run import RunView
    from dynarl.report.timeline import timeline

    view = RunView(rundir.resolve(run))
    view.poll()
    going_on = view.graph.ended is None and view.state().name == "running"
    try:
        found = timeline(view.graph, time.time() if going_on else None)
    except ValueError as error:
        raise DynarlError(f"{view.run.name}: {error}") from error
    window_s = found.window(*window) if window else (0.0, found.end_s)
    if output_format in ("png", "svg"):
        target = target or view.run / f"timeline.{output_format}"
        _draw(found, target, output_format, window_s)
        click.echo(target)
    elif output_format == "json":
        try:
            output.print_json(found.as_json(), target)
        except OSError as error:
            raise DynarlError(f"cannot write {target}: {error.strerror or error}") from error
    else:
        _print(found, window_s)


def _draw(found, target: Path, form: str, window_s: tuple[float, float]) -> None:
    try:
        from dynarl.report.timeline_plot import draw
    except ImportError as error:
        raise DynarlError(
            f"no picture without matplotlib ({error}): pip install 'dynarl[report]', or take -o json"
        ) from error
    try:
        draw(found, target, form, window_s)
    except OSError as error:
        raise DynarlError(f"cannot write the picture to {target}: {error.strerror or error}") from error


def _print(found, window_s: tuple[float, float]) -> None:
    from dynarl.report.timeline_text import legend, render

    console = output.console()
    colour, fancy = console.is_terminal and not console.no_color, output.fancy(console)
    for line in render(found, console.width, colour, fancy, window_s):
        console.print(line, no_wrap=True, crop=False)
    console.print(legend(found, colour, fancy))
