"""`dynarl status`: how a run is doing, from its journal."""

from __future__ import annotations

import time
from typing import Any

import click

from dynarl import rundir
from dynarl.cli import output
from dynarl.report.units import duration

# What a person wants to see of the last iteration: metric, name on screen, format.
SHOWN_METRICS = [
    ("critic/rewards/mean", "reward", "{:.3f}"),
    ("response_length/mean", "response length", "{:.0f}"),
    ("response_length/clip_ratio", "cut", "{:.1%}"),
    ("actor/grad_norm", "grad norm", "{:.2f}"),
    ("training/rollout_probs_diff_mean", "probs diff", "{:.1e}"),
    ("perf/throughput", "tokens/s per device", "{:.0f}"),
    ("scheduling/share", "scheduling", "{:.2%}"),
    ("warm_start/loss", "warm-start loss", "{:.3f}"),
]


@click.command("status", cls=output.Command)
@click.argument("run", default="last")
@output.format_option()
@click.option("-q", "--quiet", is_flag=True, help="Print nothing, answer by exit code alone.")
def command(run: str, output_format: str, quiet: bool) -> None:
    """How a run is doing. RUN: its id, the start of it, a Slurm job id, or `last`.

    With --quiet the exit code is 0 while it is under way and when it has completed, 1 when it failed, was cancelled or
    got lost, 4 when that cannot be told.
    """
    from dynarl.report.run import ENDED_BADLY, RunView
    from dynarl.report.summary import summary

    view = RunView(rundir.resolve(run))
    view.poll()
    state = view.state()
    if quiet:
        raise SystemExit(1 if state.name in ENDED_BADLY else 4 if state.name == "unknown" else 0)
    found = summary(view, state, time.time())
    if output_format == "json":
        output.print_json(found)
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:
    from rich.text import Text

    from dynarl.report.palette import STATE_STYLES

    console = output.console()
    head = Text.assemble((found["run"], "bold"), "  ", (found["state"], STATE_STYLES.get(found["state"], "")))
    if found["stage"] and found["state"] == "running":
        head.append(f", {found['stage']}")
    console.print(head, soft_wrap=True)
    if found["reason"]:
        console.print(f"  {found['reason']}", soft_wrap=True)
    for name, value in _lines(found, output.fancy(console)):
        # Soft wrap: a path must come out in one piece wherever this goes.
        console.print(Text.assemble((f"{name:<14}", "dim"), value), soft_wrap=True)


def _lines(found: dict[str, Any], fancy: bool) -> list[tuple[str, Any]]:
    arrow = " → " if fancy else " -> "
    lines = [
        (
            "job",
            _job(found),
        ),
        ("iterations", _iterations(found)),
        ("accuracy", _accuracy(found["eval"], arrow)),
        ("nodes", _nodes(found)),
        ("moves", _moves(found["moves"], found["iterations"])),
        ("trainer", _trainer(found["trainer"])),
        ("samples", "{trained} trained, {lost} lost, {doubled} doubled".format(**found["samples"])),
        ("last metrics", _metrics(found["metrics"])),
        ("logs", found["logs"] or found["path"]),
    ]
    if found["checkpoint"]:
        lines.insert(-1, ("checkpoint", f"after iteration {found['checkpoint']['iteration']}"))
    deaths = found["workers"]["deaths"]
    lines += [("died", f"{d['role']} worker {d['device']} on {d['node']}: {d['status']}") for d in deaths[-3:]]
    return lines + [("problem", text) for text in found["problems"][:5]]


def _job(found: dict[str, Any]) -> str:
    job, attempt = found["job_id"] or "none", found["attempt"] or "-"
    return f"{job}, attempt {attempt}, {duration(found['elapsed_s'])} since the start"


def _iterations(found: dict[str, Any]) -> str:
    total, each = found["iterations_total"], found["s_per_iteration"]
    text = f"{found['iterations']} of {total if total is not None else '?'}"
    if each is None:
        return text
    left = (
        f", about {duration((total - found['iterations']) * each)} left"
        if total and found["state"] == "running"
        else ""
    )
    return f"{text}, {duration(each)} each{left}"


def _accuracy(evaluation: dict[str, Any], arrow: str) -> str:
    if evaluation["last"] is None:
        return "not evaluated yet"
    values = [evaluation["start"], evaluation["end"] if evaluation["end"] is not None else evaluation["last"]]
    shown = arrow.join(f"{value:.1%}" for value in dict.fromkeys(values) if value is not None)
    return f"{shown} of {evaluation['size']} held-out" + (
        f", {evaluation['timeouts']} timed out" if evaluation["timeouts"] else ""
    )


def _nodes(found: dict[str, Any]) -> Any:
    from rich.text import Text

    from dynarl.report.palette import ROLE_COLOURS, role_style
    from dynarl.slurm import hostlist

    nodes_of = {role: [n for n, active in found["roles"].items() if active == role] for role in (*ROLE_COLOURS, None)}
    text = Text(f"{found['nodes'] or '?'}")
    if found["state"] in ("running", "unknown"):
        for role, nodes in nodes_of.items():
            if nodes:
                text.append("  ").append(role or "no role", style=role_style(role)).append(f" {hostlist.fold(nodes)}")
    return text


def _moves(moves: dict[str, Any], iterations: int) -> str:
    pause = moves["median_pause_ms"]
    text = f"{moves['committed']} committed, {moves['cancelled']} cancelled"
    if pause is not None:
        text += f", median pause {pause:.0f} ms"
        text += f", into training in {moves['into_training_iterations']} of {iterations} iterations"
    return text


def _trainer(trainer: dict[str, Any]) -> str:
    changes = [change for change in trainer["changes"] if change["state"] == "committed"]
    cancelled = len(trainer["changes"]) - len(changes)
    text = trainer["layout"]
    if changes:
        text += f", {len(changes)} changes, the last paused {changes[-1]['pause_ms'] or 0:.0f} ms"
    return text + (f", {cancelled} cancelled" if cancelled else "")


def _metrics(metrics: dict[str, Any] | None) -> str:
    if metrics is None:
        return "none yet"
    shown = [f"{name} {form.format(metrics[key])}" for key, name, form in SHOWN_METRICS if metrics.get(key) is not None]
    return f"step {metrics['step']}: " + ", ".join(shown)
