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
@click.option("--cluster", metavar="NAME", help="The cluster's configuration, as $DYNARL_CLUSTER names it.")
@click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a setting of CONFIG. May be repeated."
)
@click.option("--device", metavar="NAME", help="What a device can do: a file of configs/devices, by its name or path.")
@click.option("--lengths", metavar="NAME=VALUE,...", help="Of a job's answers: median=400,sigma=0.8 and others.")
@click.option("--write", "target", type=click.Path(path_type=Path, dir_okay=False), help="Write the job that carries it out.")
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
    if cluster:
        os.environ["DYNARL_CLUSTER"] = cluster
    from dynarl.scheduler.placement import job, summary

    problem, model, config, notes = _problem(config_file, overrides, device, lengths)
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


def _problem(path: Path, overrides: tuple[str, ...], device: str | None, lengths: str | None) -> tuple[Problem, Any, Any, list[str]]:
    """The problem, a job's model and configuration, and what was assumed."""
    from dynarl.scheduler.placement import job, problem

    data = job.read(path)
    if not job.is_plan_file(data):
        return job.problem(path, overrides, device, lengths)
    if lengths:
        raise ConfigError(f"--lengths is for a job's configuration; {path} says its lengths itself")
    data = job.overridden(data, overrides) | ({"device": device} if device else {})
    return problem.parse(data, str(path)), None, None, []


def _show(told: dict[str, Any]) -> None:
    from dynarl.report import plan_text

    console = output.console()
    fancy, colour = output.fancy(console), console.is_terminal and not console.no_color

    def title(text: str) -> None:
        console.print(f"\n[bold]{text}[/bold]")

    console.print(plan_text.head(told), soft_wrap=True)
    console.print()
    for line in plan_text.tree(told, fancy, colour):
        console.print(line, soft_wrap=True)
    if told["sync_s"] >= 0.05:
        console.print(f"then weights go to the other devices: {told['sync_s']:.1f} s", soft_wrap=True)
    console.print()
    for line in plan_text.picture(told, min(console.width, 120), fancy, colour):
        console.print(line, soft_wrap=True)
    if rows := plan_text.memory_rows(told):
        console.print()
        table = output.table("memory of a device", "what", ">sum", ">share")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    title("Why")
    for line in plan_text.reasons(told):
        console.print(f"  {line}", soft_wrap=True)
    console.print(f"  {plan_text.sureness(told)}", soft_wrap=True)
    console.print(f"  {plan_text.limits(told)}", soft_wrap=True)
    if told.get("more"):
        title("With more")
        noun = "node" if told["unit"] == told["devices_per_node"] and told["unit"] > 1 else "device"
        for each in told["more"]:
            what = f"{each['units']} {noun}{'s' * (each['units'] > 1)} more"
            console.print(f"  {what}: {each['seconds']:.1f} s, {each['saved']:.1%} less", soft_wrap=True)
    title("As a job")
    for line in _job_lines(told["job"]):
        console.print(f"  {line}", soft_wrap=True)
    for note in told["notes"]:
        output.note(f"note: {note}")
    if "written" in told:
        output.note(f"written: {told['written']}; try it with: dynarl submit {told['written']} --dry-run")


def _job_lines(job: dict[str, Any]) -> list[str]:
    if job["settings"] is None:
        return [job["reason"]]
    lines = [f"{key}: {value}" for key, value in job["settings"].items()]
    return lines + ([job["reason"]] if job["reason"] else [])
