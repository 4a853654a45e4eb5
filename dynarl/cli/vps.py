"""`dynarl vps`: what it takes to move a model from one parallel layout to another."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynarl.cli import output
from dynarl.errors import ConfigError, DynarlError

if TYPE_CHECKING:
    import numpy as np

    from dynarl.vps.layout import Layout
    from dynarl.vps.plan import Plan
    from dynarl.vps.spec import ModelSpec

# Halving dp of a 7B model from 512 ranks is planned in 2 s, from 1024 in 13 s, and each doubling takes about six times as
# long as the one before.
MOST_RANKS = 1 << 12
# Ranks or nodes that the picture shows one by one.
PICTURE_WIDTH = 32
SHADES = {True: " ░▒▓█", False: " .:+#"}


@click.group("vps", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """The Virtual Parameter Space: model state in any parallel layout."""


@command.command("plan", cls=output.Command)
@click.option("--model", required=True, help="A preset by its name, a config.json, or a directory that has one.")
@click.option("--from", "before", required=True, metavar="LAYOUT", help="The layout to leave, such as tp=4,pp=2,dp=8.")
@click.option("--to", "after", required=True, metavar="LAYOUT", help="The layout to reach, such as engine:tp=2,dp=32.")
@click.option(
    "--kinds", help="What moves, comma-separated: param,master,exp_avg,exp_avg_sq; default all that both hold."
)
@click.option("--ranks-per-node", type=click.IntRange(min=1), help="Groups stay in a node; nearest senders first.")
@click.option("--budget", default="1GiB", show_default=True, help="Memory beyond the larger of a rank's two states.")
@click.option("--link", metavar="RATE", help="Bytes per second of every rank, such as 25GB/s, to estimate the time.")
@click.option("--no-relabel", is_flag=True, help="Keep the order of the destination's ranks.")
@output.format_option()
def plan(
    model: str,
    before: str,
    after: str,
    kinds: str | None,
    ranks_per_node: int | None,
    budget: str,
    link: str | None,
    no_relabel: bool,
    output_format: str,
) -> None:
    """Explain a transition: bytes, bound, memory, rounds, time, and who sends to whom.

    LAYOUT is [train:|engine:|hf:|checkpoint:]NAME=VALUE,... ; ranks are 0, 1, 2, ... unless ranks=8-15 says otherwise.
    """
    if importlib.util.find_spec("numpy") is None:
        raise DynarlError("planning needs numpy, which is not installed here: pip install numpy")
    from dynarl.report.units import parse_rate, parse_size
    from dynarl.vps.layout_text import parse
    from dynarl.vps.plan import plan_transition

    try:
        spec, src, dst = _model(model), parse(before), parse(after)
        moved = kinds.split(",") if kinds else [kind for kind in dst.kinds if kind in src.kinds]
        if (ranks := max(len(src.ranks), len(dst.ranks))) > MOST_RANKS:
            raise ConfigError(f"a layout of {ranks} ranks is more than the {MOST_RANKS} that this plans for")
        with output.busy(f"planning from {len(src.ranks)} to {len(dst.ranks)} ranks"):
            result = plan_transition(
                spec,
                src,
                dst,
                kinds=moved,
                relabel=not no_relabel,
                budget_bytes=parse_size(budget),
                links=parse_rate(link) if link else None,
                ranks_per_node=ranks_per_node,
            )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if output_format == "json":
        output.print_json(as_json(result))
    else:
        _show(result, before, after)


def _model(name: str) -> ModelSpec:
    import json

    from dynarl.vps.presets import preset
    from dynarl.vps.spec import ModelSpec

    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is no config.json of a model: {error}") from None
        if not isinstance(config, dict):
            raise ConfigError(f"{path} is no config.json of a model: it has no keys")
        return ModelSpec.from_hf(config, name=path.resolve().parent.name)
    return preset(name)


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan's fields; what is by rank as lists in the order of `ranks`."""
    by_rank = (
        "bytes_received",
        "lower_bound",
        "bytes_sent",
        "peak_bytes",
        "source_bytes",
        "destination_bytes",
        "kept_bytes",
        "derived_bytes",
    )
    return {
        "model": plan.spec.name,
        "kinds": plan.kinds,
        "ranks": plan.ranks,
        "src": {"layout": repr(plan.src), "ranks": plan.src.ranks},
        "dst": {"layout": repr(plan.dst), "ranks": plan.dst.ranks},
        **{name: [getattr(plan, name)[rank] for rank in plan.ranks] for name in by_rank},
        "bytes_saved_by_relabelling": plan.bytes_saved_by_relabelling,
        "budget_bytes": plan.budget_bytes,
        "chunks": plan.num_chunks,
        "rounds": plan.num_rounds,
        "imbalance": plan.imbalance,
        "digest": plan.digest,
        "seconds": plan.seconds,
        "seconds_at_best": plan.seconds_at_best,
        "seconds_to_plan": plan.seconds_to_plan,
        "seconds_to_plan_one_rank": plan.seconds_to_plan_one_rank,
    }


def _show(plan: Plan, before: str, after: str) -> None:
    from dynarl.report.units import size

    console = output.console()
    console.print(f"[bold]{plan.spec.name}[/]: {', '.join(plan.kinds)} from {before} ({len(plan.src.ranks)} ranks) "
                  f"to {after} ({len(plan.dst.ranks)} ranks)\n")  # fmt: skip
    table = output.table("bytes", ">all ranks", ">mean", ">most", "")
    rows = (
        ("held before", plan.source_bytes, ""),
        ("held after", plan.destination_bytes, ""),
        ("  kept where they are", plan.kept_bytes, ""),
        ("  cast from masters", plan.derived_bytes, ""),
        ("  received", plan.bytes_received, _bound(plan)),
        ("sent", plan.bytes_sent, f"most against mean: {plan.imbalance:.2f}"),
        ("peak memory", plan.peak_bytes, f"budget {size(plan.budget_bytes)} beyond the larger of before and after"),
    )
    for name, values, remark in rows:
        some = [value for value in values.values() if value] or [0]
        table.add_row(name, size(sum(some)), size(sum(some) / len(some)), size(max(some)), remark)
    console.print(table)
    console.print()
    if plan.bytes_saved_by_relabelling:
        console.print(f"Ranks change places, which saves {size(plan.bytes_saved_by_relabelling)}: {_order(plan.dst)}")
    console.print(f"{plan.num_rounds} rounds in {plan.num_chunks} chunks; digest {plan.digest}")
    if plan.seconds is not None:
        console.print(f"Time: {_seconds(plan.seconds)}; the busiest link alone needs {_seconds(plan.seconds_at_best)}")
    console.print(
        f"Planned in {_seconds(plan.seconds_to_plan)}; one rank's own part in {_seconds(plan.seconds_to_plan_one_rank)}"
    )
    if plan.num_rounds:
        console.print()
        for line in picture(plan, output.fancy(console)):
            console.print(line, markup=False)


def _bound(plan: Plan) -> str:
    return "the least possible" if plan.bytes_received == plan.lower_bound else "more than the bound"


def _seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _order(layout: Layout) -> str:
    ranks = layout.ranks
    return " ".join(map(str, ranks[:PICTURE_WIDTH])) + (" ..." if len(ranks) > PICTURE_WIDTH else "")


def picture(plan: Plan, fancy: bool) -> list[str]:
    """Lines that show who sends to whom: a row for each sender, a column for each receiver, darker for more bytes.

    Many ranks are shown by groups: nodes where their size is known, else as many ranks as it takes.
    """
    per_group = plan.ranks_per_node if plan.ranks_per_node > 1 and len(plan.ranks) > PICTURE_WIDTH else 1
    groups = [rank // per_group for rank in plan.ranks]
    while len(set(groups)) > PICTURE_WIDTH:
        per_group *= 2
        groups = [rank // per_group for rank in plan.ranks]
    names = sorted(set(groups))
    traffic = _by_group(plan.traffic(), [names.index(group) for group in groups])
    shades, most = SHADES[fancy], int(traffic.max())
    labels = [str(n) if per_group == 1 else f"{n * per_group}-{(n + 1) * per_group - 1}" for n in names]
    width = max(4, *map(len, labels))
    # Twice as wide as high, so that it looks square.
    lines = [f"{'from':>{width}}  to {labels[0]} ... {labels[-1]} (ranks)"]
    for label, row in zip(labels, traffic.tolist()):
        cells = (shades[-(-value * (len(shades) - 1) // most)] for value in row)
        lines.append(f"{label:>{width}} |" + "".join(cell * 2 for cell in cells) + "|")
    from dynarl.report.units import size

    return [*lines, f"{'':{width}}  {shades[-1] * 2} {size(most)}"]


def _by_group(traffic: np.ndarray, group: list[int]) -> np.ndarray:
    import numpy as np

    result = np.zeros((max(group) + 1,) * 2, np.int64)
    np.add.at(result, (np.array(group)[:, None], np.array(group)[None, :]), traffic)
    return result
