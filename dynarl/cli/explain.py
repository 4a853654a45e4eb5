"""`dynarl explain`: why nodes changed role, what was weighed, what came of it, and how the run got over faults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dynarl import rundir
from dynarl.cli import output
from dynarl.errors import DynarlError

if TYPE_CHECKING:
    from dynarl.report.explain import Entry


@click.command("explain", cls=output.Command)
@click.argument("run", default="last")
@output.format_option("text", "json", default="text")
@click.option(
    "--decision", "label", metavar="NUMBER", help="All about one: a decision, or a change of roles such as e103."
)
@click.option("--all", "everything", is_flag=True, help="List the decisions to stay, too.")
def command(run: str, output_format: str, label: str | None, everything: bool) -> None:
    """Why nodes changed role, and what came of it; recoveries too. RUN: its id, the start of it, a Slurm job id, or
    `last`."""
    from dynarl.hypergraph.journal import read
    from dynarl.report.explain import entries

    path = rundir.resolve(run)
    found = entries(read(rundir.journal(path)))
    if label is not None:
        entry = _chosen(found, label, path.name)
        if output_format == "json":
            output.print_json({"run": path.name, "entry": entry.as_json()})
        else:
            _print_one(entry)
    elif output_format == "json":
        output.print_json({"run": path.name, "entries": [e.as_json() for e in found if everything or not e.stays]})
    else:
        _print_list(path.name, found, everything)


def _chosen(found: list[Entry], label: str, run: str) -> Entry:
    """The newest entry of this label: numbers may begin anew with a new start of the controller."""
    labels = {entry: {entry.label, *(f"e{epoch['epoch']}" for epoch in entry.epochs)} for entry in found}
    if matching := [entry for entry in found if label in labels[entry]]:
        return matching[-1]
    numbers = [entry.label for entry in found if entry.kind == "decision"]
    epochs = [each for names in labels.values() for each in names if each[:1] == "e" and each[1:].isdecimal()]
    known = [f"{what} {each[0]} to {each[-1]}" for what, each in (("decisions", numbers), ("changes", epochs)) if each]
    raise DynarlError(f"{run} has no decision {label}; it has {' and '.join(known) or 'none yet'}")


def _print_list(run: str, found: list[Entry], everything: bool) -> None:
    from dynarl.report.units import duration

    console = output.console()
    shown = [entry for entry in found if everything or not entry.stays]
    table = output.table(">at", ">iteration", ">number", "what", ">gain", "what came of it")
    for entry in shown:
        gain = entry.chosen.get("gain_s")
        result, reason = entry.result(), entry.reason if entry.kind != "decision" else ""
        table.add_row(
            duration(entry.at_s),
            "-" if entry.iteration is None else str(entry.iteration),
            entry.label or "-",
            entry.what,
            f"{gain:.2f} s" if gain else "-",
            f"{result} ({reason})" if result and reason else result or reason or "-",
        )
    if shown:
        console.print(table)
    else:
        console.print(f"{run}: nothing has been decided, and nothing has broken", soft_wrap=True)
    if hidden := len(found) - len(shown):
        output.note(f"decisions to stay that are left out: {hidden}; --all lists them")


def _print_one(entry: Entry) -> None:
    from rich.markup import escape
    from rich.padding import Padding

    from dynarl.report.units import duration

    console = output.console()
    name = {"decision": "decision ", "roles": "change of roles "}.get(entry.kind, "")

    def line(title: str, text: str) -> None:
        console.print(f"[dim]{title:<11}[/dim]{escape(text)}", soft_wrap=True)

    console.print(f"[bold]{name}{entry.label}: {escape(entry.what)}[/bold]", soft_wrap=True)
    line("when", "; ".join(_when(entry, duration(entry.at_s))))
    line("why", entry.reason or "no reason is on record")
    for index, text in enumerate(_seen(entry.record.get("seen") or {})):
        line("" if index else "seen", text)
    if candidates := entry.record.get("candidates"):
        line("weighed", f"{len(candidates)} ways to go on; > is the one that was taken")
        console.print(Padding(_weighed(candidates, entry.record["chosen"]), (0, 0, 0, 11)))
    for index, text in enumerate(_came(entry) or [entry.result() or "nothing is on record"]):
        line("" if index else "came of it", text)


def _when(entry: Entry, at: str) -> list[str]:
    parts = []
    if entry.iteration is not None:
        after = entry.record.get("at_s")
        parts.append(f"iteration {entry.iteration}" + (f", {after:.1f} s after its start" if after is not None else ""))
    parts.append(f"{at} into the run")
    if (seconds := entry.record.get("seconds")) is not None:
        parts.append(f"decided in {1e3 * seconds:.1f} ms")
    return parts


def _seen(seen: dict[str, Any]) -> list[str]:
    """Figures in lines, those with a common beginning (`groups/inference/`) together."""
    groups: dict[str, list[str]] = {}
    for name, value in seen.items():
        group, _, last = name.rpartition("/")
        shown = f"{value:g}" if isinstance(value, (int, float)) else str(value)
        groups.setdefault(group, []).append(f"{last} {shown}")
    return [f"{group}: {', '.join(parts)}" if group else ", ".join(parts) for group, parts in groups.items()]


def _weighed(candidates: list[dict[str, Any]], chosen: int) -> Any:
    from dynarl.report.explain import moves_text

    table = output.table("", "moves", ">finish", ">cost", ">gain")
    for index, each in enumerate(candidates):
        figures = [each.get(name) for name in ("finish_s", "cost_s", "gain_s")]
        cells = ["-" if value is None else f"{value:.2f} s" for value in figures]
        table.add_row(">" if index == chosen else "", moves_text(each["moves"]), *cells)
    return table


def _came(entry: Entry) -> list[str]:
    from dynarl.report.explain import compared, moves_text

    lines = []
    for epoch in entry.epochs:
        name = "" if epoch["epoch"] is None else f"epoch {epoch['epoch']}, "
        text = f"{name}{moves_text(epoch['moves'])}: {epoch['state']}"
        if epoch["state"] == "committed":
            phases = ", ".join(f"{k.removesuffix('_ms')} {v:.0f}" for k, v in (epoch.get("phases") or {}).items())
            text += f", paused {epoch.get('pause_ms') or 0:.0f} ms" + (f" ({phases})" if phases else "")
            if epoch.get("given_up"):
                text += f"; {epoch['given_up']} unfinished answers went on elsewhere"
        elif epoch.get("reason"):
            text += f": {epoch['reason']}"
        lines.append(text)
    outcome = entry.outcome or {}
    return lines + [text for name in ("finish", "cost") if (text := compared(outcome, name))]
