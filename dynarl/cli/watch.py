"""`dynarl watch`: follow a run until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from dynarl import rundir
from dynarl.cli import output

POLL_S = 0.5
# Slurm is asked only while the journal is silent, and then no more often than this.
ASK_SLURM_EVERY_S = 15.0


@click.command("watch", cls=output.Command)
@click.argument("run", default="last")
def command(run: str) -> None:
    """Follow a run until it ends: a live view on a terminal, a line per event elsewhere.

    RUN: its id, the start of it, a Slurm job id, or `last`. Ends with 0 if the run completed, 1 if it failed, was
    cancelled or got lost. Leaving with Ctrl-C (130) does not touch the run.
    """
    from dynarl.report.run import ENDED_WELL, RunView

    view = RunView(rundir.resolve(run))
    console = output.console()
    follow = _live if console.is_terminal and not console.is_dumb_terminal else _plain
    try:
        state = follow(view, console)
    except KeyboardInterrupt:
        output.note(f"the run goes on; come back with: dynarl watch {view.run.name}")
        raise SystemExit(130) from None
    raise SystemExit(0 if state.name in ENDED_WELL else 1)


def _live(view, console):
    from rich.live import Live

    from dynarl.report.watch_view import Screen, draw

    fancy = output.fancy(console)
    ask = _politely()

    def picture():
        screen = Screen(console.width, console.height, not console.no_color, fancy)
        return draw(view, state, time.time(), screen)

    view.poll()
    state = view.state(ask)
    with Live(picture(), console=console, auto_refresh=False, redirect_stderr=False) as live:
        while not state.final:
            time.sleep(POLL_S)
            view.poll()
            state = view.state(ask)
            live.update(picture(), refresh=True)
    return state


def _plain(view, console):
    """One line per event. Starts with all that has happened, so that a log has everything whenever it began."""
    from dynarl.report.watch_lines import Lines

    lines = Lines(view)
    ask = _politely()
    while True:
        for line in lines.take(view.poll()):
            click.echo(line)
        state = view.state(ask)
        for line in lines.state(state):
            click.echo(line)
        if state.final:
            return state
        time.sleep(POLL_S)


def _politely() -> Callable:
    """ask_slurm, answered from memory for a while."""
    from dynarl.report import run

    answers: dict[str, tuple[float, run.JobInfo]] = {}

    def ask(job_id: str) -> run.JobInfo:
        asked, answer = answers.get(job_id, (0.0, None))
        if answer is None or time.monotonic() - asked > ASK_SLURM_EVERY_S:
            answer = run.ask_slurm(job_id)
            answers[job_id] = time.monotonic(), answer
        return answer

    return ask
