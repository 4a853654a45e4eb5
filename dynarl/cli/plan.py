"""`dynarl plan`: which stage gets which devices, in turn or side by side, and why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynarl.cli import output
from dynarl.errors import ConfigError

if TYPE_CHECKING:
    from dynarl.scheduler.placement.problem import Problem


@click.command("plan", cls=output.Command)
@click.argument("config_file", metavar="CONFIG", type=click.Path(path_type=Path))
@click.option("--cluster", metavar="NAME", help="Of a job: the cluster's configuration, as $DYNARL_CLUSTER names it.")
@click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a setting of CONFIG. May be repeated."
)
@click.option("--device", metavar="NAME", help="What a device can do: a file of configs/devices, by its name or path.")
@click.option("--lengths", metavar="NAME=VALUE,...", help="Of a job's answers: median=400,sigma=0.8 and others.")
@click.option(
    "--write", "target", type=click.Path(path_type=Path, dir_okay=False), help="Write the job that carries it out."
)
@click.option("--no-more", is_flag=True, help="Leave out what further nodes would bring.")
@output.format_option()
def command(
    config_file: Path,
    cluster: str | None,
    overrides: tuple[str, ...],
    device: str | None,
    lengths: str | None,
    target: Path | None,
    no_more: bool,
    output_format: str,
) -> None:
    """Plan a job, or a plan file such as those in configs/plans: placement over devices and time, and why.

    Nothing is started. Times are predictions from what devices and models are known to do (docs/planning.md).
    """
    from dynarl.scheduler.placement import job, summary

    problem, model, config, notes = _problem(config_file, cluster, overrides, device, lengths)
    with output.busy(f"planning {problem.devices} devices"):
        planned = summary.plan(problem, model)
        told = summary.as_json(planned, more=not no_more)
    told["notes"] = notes
    told["job"] = job.settings(planned)
    if target is not None:
        if config is None:
            raise ConfigError(f"--write needs a job's configuration, and {config_file} is a plan file")
        target.write_text(job.written(config, told["job"]), encoding="utf-8")
        told["written"] = str(target)
    if output_format == "json":
        output.print_json(told)
    else:
        _show(told)


def _problem(
    path: Path, cluster: str | None, overrides: tuple[str, ...], device: str | None, lengths: str | None
) -> tuple[Problem, Any, Any, list[str]]:
    """The problem, a job's model and configuration, and what was assumed."""
    from dynarl.config import text
    from dynarl.scheduler.placement import job, problem

    data = job.read(path)
    if not job.is_plan_file(data):
        if cluster:
            os.environ["DYNARL_CLUSTER"] = cluster
        return job.problem(path, overrides, device, lengths)
    if lengths:
        raise ConfigError(f"--lengths is for a job's configuration; {path} says its lengths itself")
    if cluster:
        raise ConfigError(f"--cluster is for a job's configuration; {path} names its device itself, or --device does")
    data = job.overridden(data, overrides)
    if device:
        data.items["device"] = text.node(device, "--device")
    return problem.parse(data, str(path)), None, None, []


def _show(told: dict[str, Any]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from dynarl.report import plan_text

    console = output.console()
    fancy, colour = output.fancy(console), console.is_terminal and not console.no_color

    def section(title: str, lines: list[str]) -> None:
        console.print(f"\n[bold]{title}[/bold]")
        for line in lines:
            console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))

    for line in plan_text.head(told):
        console.print(Text(line), soft_wrap=True)
    console.print()
    for line in plan_text.tree(told, fancy, colour):
        console.print(line, soft_wrap=True)
    if told["sync_s"] >= 0.05:
        console.print(f"then weights go to the other devices: {plan_text.took(told['sync_s'], told)}", soft_wrap=True)
    console.print()
    for line in plan_text.picture(told, min(console.width, 120), fancy, colour):
        console.print(line, soft_wrap=True)
    if rows := plan_text.memory_rows(told):
        console.print()
        table = output.table("memory of a device", "what", ">sum", ">share")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    section("Why", [*plan_text.reasons(told), plan_text.sureness(told), plan_text.limits(told)])
    if told.get("more"):
        noun = "node" if told["unit"] == told["devices_per_node"] and told["unit"] > 1 else "device"
        whats = [f"{each['units']} {noun}{'s' * (each['units'] > 1)} more" for each in told["more"]]
        times = [f"{plan_text.took(each['seconds'], told)}, {each['saved']:.1%} less" for each in told["more"]]
        section("With more", [f"{what}: {time}" for what, time in zip(whats, times, strict=True)])
    section("As a job", _job_lines(told["job"]))
    for note in told["notes"]:
        output.note(f"note: {note}")
    if "written" in told:
        output.note(f"written: {told['written']}; try it with: dynarl submit {told['written']} --dry-run")


def _job_lines(job: dict[str, Any]) -> list[str]:
    if job["settings"] is None:
        return [job["reason"]]
    lines = [f"{key}: {_flow(value)}" for key, value in job["settings"].items()]
    return lines + ([job["reason"]] if job["reason"] else [])


def _flow(value: Any) -> str:
    """As YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}"
    return str(value)
