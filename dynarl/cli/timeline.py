"""`dynarl timeline`: which node had which role when."""

from __future__ import annotations

import time
from pathlib import Path

import click

from dynarl import rundir
from dynarl.cli import output
from dynarl.errors import DynarlError


@click.command("timeline", cls=output.Command)
@click.argument("run", default="last")
@output.format_option("text", "png", "svg", "json", default="text")
@click.option("--output", "target", type=click.Path(path_type=Path, dir_okay=False),
              help="File to write; default timeline.png or .svg in the run's directory, JSON to stdout.")
def command(run: str, output_format: str, target: Path | None) -> None:
    """Which node had which role when, with remaps and iterations. RUN: its id, the start of it, a job id, or `last`."""
    from dynarl.report.run import RunView
    from dynarl.report.timeline import timeline

    view = RunView(rundir.resolve(run))
    going_on = view.graph.ended is None and view.state().name == "running"
    try:
        found = timeline(view.graph, time.time() if going_on else None)
    except ValueError as error:
        raise DynarlError(f"{view.run.name}: {error}") from error
    if output_format in ("png", "svg"):
        target = target or view.run / f"timeline.{output_format}"
        _draw(found, target, output_format)
        click.echo(target)
    elif output_format == "json":
        output.print_json(found.as_json(), target)
    else:
        _print(found)


def _draw(found, target: Path, form: str) -> None:
    try:
        from dynarl.report.timeline_plot import draw
    except ImportError as error:
        raise DynarlError(f"no picture without matplotlib ({error}): pip install 'dynarl[report]', or take -o json") from error
    draw(found, target, form)


def _print(found) -> None:
    from dynarl.report.timeline_text import legend, render

    console = output.console()
    colour, fancy = console.is_terminal and not console.no_color, output.fancy(console)
    for line in render(found, console.width, colour, fancy):
        console.print(line, no_wrap=True, crop=False)
    console.print(legend(found, colour, fancy))
