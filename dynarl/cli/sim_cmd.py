"""`dynarl sim`: the constants of the simulator from recorded runs, and how well it predicts."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import click

from dynarl import rundir
from dynarl.cli import output

if TYPE_CHECKING:
    from dynarl.config.schema import Config


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """The simulator held against real runs. To simulate, see `dynarl simulate`."""


@command.command(cls=output.Command)
@click.argument("run", default="last")
@click.option("--on", metavar="NAME", help="Decoding, stages, steps and weights of this candidate or policy alone.")
@output.format_option("table", "json")
def calibrate(run: str, on: str | None, output_format: str) -> None:
    """Fit the simulator's constants to a run's trace; each with its standard error."""
    from dynarl.sim.calibrate import read, warm
    from dynarl.sim.replayed import calibrated
    from dynarl.sim.validate import pick

    path = rundir.resolve(run)
    lines = read(path)
    found = calibrated(_config(path), lines, pick(warm(lines), on) if on else None)
    if output_format == "json":
        rows = [{"name": c.name, "value": c.value, "unit": c.unit, "error": c.error} for c in found.constants]
        output.print_json({"run": path.name, "iterations": len(lines), "constants": rows, "kv_tokens": found.kv_tokens})
        return
    table = output.table("constant", ">value", ">standard error")
    for constant in found.constants:
        shown = _seconds(constant.value) if constant.unit == "s" else f"{constant.value:.3g}"
        table.add_row(constant.name, shown, _seconds(constant.error))
    output.console().print(table)


@command.command(cls=output.Command)
@click.argument("run", default="last")
@click.option("--on", metavar="NAME", help="Fit to iterations of this candidate or policy; default the first in the trace.")
@click.option("--constants", "source", metavar="RUN", help="Fit to this run, to all of it without --on, and predict RUN.")
@output.format_option("table", "json")
def validate(run: str, on: str | None, source: str | None, output_format: str) -> None:
    """Predict the iterations of a run from constants of some of them, and compare with what was measured."""
    from dynarl.sim.calibrate import named, read, warm
    from dynarl.sim.replayed import calibrated
    from dynarl.sim.validate import compare, pick

    path = rundir.resolve(run)
    origin = rundir.resolve(source) if source else path
    fitted = read(origin)
    if not source:
        on = on or next(iter(named(warm(fitted))))
    constants = calibrated(_config(origin), fitted, pick(warm(fitted), on) if on else None)
    rows = compare(_config(path), read(path), constants)
    errors = [abs(row.error) for row in rows if source or row.name != on]
    median = statistics.median(errors) if errors else None
    if output_format == "json":
        listed: list[dict[str, Any]] = [
            {"name": r.name, "nodes": r.nodes, "measured_s": r.measured_s, "measured_range_s": [r.least_s, r.most_s],
             "simulated_s": r.simulated_s, "error": r.error}
            for r in rows
        ]  # fmt: skip
        output.print_json({"run": path.name, "fitted_on": on, "median_error": median, "rows": listed})
        return
    table = output.table("", ">nodes", ">measured", ">range", ">simulated", ">error")
    for r in rows:
        fit_here = " (fitted)" if r.name == on and not source else ""
        table.add_row(r.name + fit_here, f"{r.nodes}", f"{r.measured_s:.2f} s", f"{r.least_s:.2f} to {r.most_s:.2f} s",
                      f"{r.simulated_s:.2f} s", f"{r.error:+.1%}")
    output.console().print(table)
    if median is not None:
        click.echo(f"Median error of what was not fitted: {median:.1%}")


def _config(path) -> Config:
    from dynarl.config import load

    return load.from_text(rundir.config(path).read_text()).config


def _seconds(value: float | None) -> str:
    """
    >>> _seconds(0.00345), _seconds(None)
    ('3.45 ms', '-')
    """
    if value is None:
        return "-"
    scale, unit = next((s, u) for s, u in ((1.0, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns")) if value * s >= 1 or u == "ns")
    return f"{value * scale:.3g} {unit}"
