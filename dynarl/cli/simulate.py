"""`dynarl simulate`: what a policy would make of a workload, before a GPU hour is spent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from dynarl import rundir
from dynarl.cli import output
from dynarl.errors import DynarlError

PICTURES = ("png", "svg", "html")


def _split(context: click.Context, parameter: click.Parameter, value: str | None) -> dict[str, int] | None:
    if value is None:
        return None
    if not re.fullmatch(r"[1-9]\d*,\d+,[1-9]\d*", value):
        raise click.BadParameter(f"{value!r}: write the nodes of rollout, inference and training, as in 6,1,1")
    return dict(zip(("rollout", "inference", "training"), map(int, value.split(",")), strict=True))


@click.command("simulate", cls=output.Command)
@click.argument("scenario", required=False)
@click.option("--from", "run", metavar="RUN", help="In place of SCENARIO: the work and the speeds of a recorded run.")
@click.option("--nodes", type=click.IntRange(min=2), help="With --from: on so many nodes.")
@click.option("--split", metavar="R,I,T", callback=_split, help="With --from: nodes for rollout, inference, training. Default: the run's, scaled.")
@click.option("--policy", "policies", multiple=True, metavar="P", help="A policy; may be given again. Default: all.")
@click.option("--seed", "seeds", multiple=True, type=click.IntRange(min=0), metavar="S", help="Of the workload; may be given again. Default 1.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Another value for a key of the scenario, as in minibatches=8.")
@click.option("--network", type=click.Choice(["analytic", "flow"]), help="Short for --set network=...")
@click.option(
    "--stability/--no-stability",
    default=None,
    help="Whether the order of policies holds with each role 10 % slower and faster: six more runs of each policy. Default: yes, in JSON no.",
)
@click.option("--oracle", is_flag=True, help="Policies know all answer lengths beforehand: an upper bound, not a policy.")
@click.option("--list", "listing", is_flag=True, help="Print the scenarios that come with dynarl.")
@output.format_option("table", "json", *PICTURES)
@click.option(
    "--output",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; pictures default to simulation.FORMAT here, JSON to stdout.",
)
def command(scenario: str | None, run: str | None, nodes: int | None, split: dict[str, int] | None, policies: tuple[str, ...],
            seeds: tuple[int, ...], changes: tuple[str, ...], network: str | None, stability: bool | None, oracle: bool,
            listing: bool, output_format: str, target: Path | None) -> None:
    """Policies side by side on a simulated cluster, under the controller that also runs the real one.

    SCENARIO: the name of one that comes with dynarl (--list), or a file.
    """
    if listing:
        _list(output_format)
        return
    if bool(scenario) == bool(run) or ((nodes or split) and not run) or ((changes or network) and run):
        raise click.UsageError("give a SCENARIO (see --list), with --set where wanted, or --from RUN, with --nodes or --split")
    if target is not None:
        if output_format == "table":
            raise click.UsageError("--output is for pictures and JSON: give -o png, svg, html or json too")
        if not target.absolute().parent.is_dir():  # said now, and not after minutes of simulation
            raise click.UsageError(f"--output {target}: there is no directory {target.parent}")
    if run:
        from dynarl.config.schema import Split
        from dynarl.sim.recorded import recorded

        chosen: Any = recorded(rundir.resolve(run), nodes, Split(**split) if split else None)
    else:
        from dynarl.sim.scenario import load_scenario

        for pair in changes:
            key, equals, _ = pair.partition("=")
            if not equals or not all(key.split(".")):
                raise click.UsageError(f"--set {pair!r}: write KEY=VALUE, as in gpus=128 or rollout.tp=2")
        chosen = load_scenario(scenario, (*changes, *((f"network={network}",) if network else ())))
    policies = tuple(dict.fromkeys(policies or chosen.policies))
    if unknown := [policy for policy in policies if policy not in chosen.policies]:
        raise click.UsageError(f"--policy {unknown[0]}: {chosen.name} has {', '.join(chosen.policies)}")
    seeds = tuple(dict.fromkeys(seeds or (1,)))
    if stability is None:
        stability = output_format != "json"
    runs, order = _simulate(chosen, policies, seeds, oracle, stability and len(policies) > 1)
    try:
        _show(chosen, runs, order, output_format, target)
    except OSError as error:
        raise DynarlError(f"cannot write {target}: {error.strerror or error}") from error


def _simulate(
    scenario: Any, policies: tuple[str, ...], seeds: tuple[int, ...], oracle: bool, with_stability: bool
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The runs, and how stable their order is (`sim.stability`) where that is asked for."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from dynarl.sim.run import simulate
    from dynarl.sim.stability import stability, variants

    work = [(f"seed {seed}", scenario, policy, seed) for seed in seeds for policy in policies]
    if with_stability:
        work += [(off, other, policy, seeds[0]) for off, other in variants(scenario) for policy in policies]
    screen = output.console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    runs: list[dict[str, Any]] = []
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", total=len(work))
        for done, (what, each, policy, seed) in enumerate(work):
            bar.update(task, description=f"{policy}, {what}")
            runs.append(simulate(
                each, policy, seed, oracle=oracle,
                progress=lambda part, of, done=done: bar.update(task, completed=done + part / of),
            ))
    if not with_stability:
        return runs, None
    found: dict[str, dict[str, float]] = {}
    for (what, _, policy, _), run in zip(work, runs, strict=True):
        found.setdefault(what, {})[policy] = run["makespan_s"]
    as_modelled = found[f"seed {seeds[0]}"]
    off = {what: makespans for what, makespans in found.items() if not what.startswith("seed ")}
    return runs[: len(seeds) * len(policies)], stability(as_modelled, off)


def _list(output_format: str) -> None:
    from dynarl.sim.scenario import load_scenario, scenario_names

    found = [load_scenario(name) for name in scenario_names()]
    if output_format == "json":
        output.print_json({"scenarios": [{"name": each.name, "about": each.about} for each in found]})
        return
    table = output.table("scenario", "about")
    for each in found:
        table.add_row(each.name, each.about)
    output.console().print(table)


def _show(scenario: Any, runs: list[dict[str, Any]], order: dict[str, Any] | None, form: str, target: Path | None) -> None:
    from dynarl.report.simulation import summary
    from dynarl.report.simulation_text import sureness

    found = summary(runs)
    if form == "json":
        what = {"scenario": scenario.name, "about": scenario.about, "throughput_unit": scenario.throughput_unit}
        output.print_json({**what, "summary": found, "results": runs}
                          | ({"stability": order} if order else {}), target)
    elif form == "table":
        _print(scenario, found, runs)
        if order:
            output.console().print(f"\n{sureness(order)}", soft_wrap=True)
    else:
        target = target or Path(f"simulation.{form}")
        _draw(scenario, found, runs, order, form, target)
        click.echo(target)


def _draw(scenario: Any, found: dict[str, Any], runs: list[dict[str, Any]], order: dict[str, Any] | None, form: str, target: Path) -> None:
    from dynarl.report.simulation_text import sureness

    try:
        from dynarl.report.simulation_page import page
        from dynarl.report.simulation_plot import save
    except ImportError as error:
        raise DynarlError(
            f"no picture without matplotlib ({error}): pip install 'dynarl[report]', or take -o table or -o json"
        ) from error
    title = f"Simulated: {scenario.name}"
    if form == "html":
        facts = _facts(scenario, runs) | ({"stability": sureness(order)} if order else {})
        target.write_text(page(title, scenario.throughput_unit, facts, found, runs), encoding="utf-8")
    else:
        save([run for run in runs if run["seed"] == runs[0]["seed"]], title, target, form)


def _facts(scenario: Any, runs: list[dict[str, Any]]) -> dict[str, str]:
    found = {"scenario": f"{scenario.name}: {scenario.about}".removesuffix(": ")}
    for name in ("model", "device", "gpus", "network"):
        if (value := getattr(scenario, name, None)) is not None:
            found[name] = str(value)
    return found | {"seeds": ", ".join(sorted({str(run["seed"]) for run in runs}))}


def _print(scenario: Any, found: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    from dynarl.report.simulation import KINDS, drawn_s
    from dynarl.report.simulation_text import legend, render

    console = output.console()
    colour, fancy = console.is_terminal and not console.no_color, output.fancy(console)
    plus_minus = "±" if fancy else "+-"
    console.print(_facts(scenario, runs)["scenario"], soft_wrap=True)
    table = output.table("policy", ">makespan", f">{scenario.throughput_unit}", ">times faster", *(f">{kind}" for kind in KINDS))
    for policy, entry in found.items():
        cells = []
        for name, unit, digits in (("makespan_s", " s", 1), ("throughput", "", 1), ("faster", "", 3)):
            half = entry[f"{name}_half"]
            cells.append(f"{entry[name]:,.{digits}f}" + (f" {plus_minus} {half:,.{digits}f}" if half is not None else "") + unit)
        table.add_row(policy, *cells, *(f"{entry['share'][kind]:.0%}" for kind in KINDS))
    console.print(table)
    first = [run for run in runs if run["seed"] == runs[0]["seed"]]
    end_s = drawn_s(first)
    for run in first:
        last = ", the last iteration" if len(run["iterations_s"]) > 1 else ""
        console.print(f"\n{run['policy']}, seed {run['seed']}{last}")
        for line in render(run["timeline"], end_s, console.width, colour, fancy):
            console.print(line, no_wrap=True, crop=False)
    console.print(legend(found[first[-1]["policy"]]["share"], colour, fancy))
