"""`dynarl logs`: what controller, agents and workers wrote, in order of time."""

from __future__ import annotations

import time
from typing import Any

import click

from dynarl import rundir
from dynarl.cli import output
from dynarl.errors import NotFoundError

ROLES = ("batch", "controller", "agent", "rollout", "inference", "training", "environment")
POLL_S = 0.5


def _count(context: click.Context, parameter: click.Parameter, value: str) -> int | None:
    if value == "all":
        return None
    if not value.isdecimal():
        raise click.BadParameter(f"{value!r} is neither a number nor all")
    return int(value)


@click.command("logs", cls=output.Command)
@click.argument("run", default="last")
@click.option("--role", type=click.Choice(ROLES), help="Only what this kind of process wrote.")
@click.option("--node", help="Only what was written on this node.")
@click.option("--attempt", type=click.IntRange(min=1), help="Start of the controller, from 1; default the newest.")
@click.option(
    "-n", "--lines", "count", default="100", callback=_count, metavar="N|all", help="Last lines to show; default 100."
)
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until the run has ended.")
@click.option("--files", "list_files", is_flag=True, help="Print the names of the files instead.")
def command(
    run: str, role: str | None, node: str | None, attempt: int | None, count: int | None, follow: bool, list_files: bool
) -> None:
    """What controller, agents and workers wrote. RUN: its id, the start of it, a Slurm job id, or `last`.

    Lines are in order of their time; each begins with where it is from.
    """
    from dynarl.report.logs import Merged, last, sources

    path = rundir.resolve(run)
    found = sources(path, attempt, role, node)
    if (not found or (attempt and attempt not in rundir.attempts(path))) and not follow:
        raise NotFoundError(_nothing(path, attempt, role, node))
    if list_files:
        for each in found:
            click.echo(each.path)
        return
    merged = Merged()
    merged.add(found)
    write = _writer(max((len(each.name) for each in found), default=16))
    for each, line in last(merged, count):
        write(each, line)
    if follow:
        _follow(path, merged, lambda: sources(path, attempt, role, node), write)


def _nothing(path: Any, attempt: int | None, role: str | None, node: str | None) -> str:
    attempts = rundir.attempts(path)
    if not attempts:
        return f"{path.name} has no logs yet: its controller has not started"
    if attempt and attempt not in attempts:
        return f"{path.name} has no attempt {attempt}; it has {', '.join(map(str, attempts))}"
    from dynarl.report.logs import sources

    there = sources(path, attempt)
    nodes = sorted({each.node for each in there if each.node})
    roles = sorted({each.role for each in there})
    return f"no log fits; there are logs of nodes {', '.join(nodes) or 'none'} and of {', '.join(roles)}"


def _writer(width: int):
    """A function that prints one line with its origin in front, in the colour of its role."""
    from rich.text import Text

    from dynarl.report.palette import ROLE_COLOURS

    console = output.console()
    bar = "│" if output.fancy(console) else "|"

    def write(each, line: str) -> None:
        text = Text(f"{each.name:<{width}} {bar} ", style=ROLE_COLOURS.get(each.role, "dim"))
        console.print(text.append(line, style="default"), soft_wrap=True)

    return write


def _follow(path, merged, refresh, write) -> None:
    """Print new lines, of new files too, until the run has ended and nothing more comes."""
    from dynarl.report.run import RunView

    view = RunView(path)
    while True:
        view.poll()
        ended = view.graph.ended is not None and view.graph.ended["state"] != "requeued"
        merged.add(refresh())
        quiet = True
        for each, line in merged:
            write(each, line)
            quiet = False
        if ended and quiet:
            return
        time.sleep(POLL_S)
