"""`dynarl graph`: the hypergraph of a run, as it is now or was at a record of the journal."""

from __future__ import annotations

import itertools

import click

from dynarl import rundir
from dynarl.cli import output


@click.command("graph", cls=output.Command)
@click.argument("run", default="last")
@output.format_option()
@click.option(
    "--at", "version", type=click.IntRange(min=1), help="As it was after this record of the journal; default the last."
)
def command(run: str, output_format: str, version: int | None) -> None:
    """Vertices and hyperedges of a run. RUN: its id, the start of it, a Slurm job id, or `last`."""
    from dynarl.hypergraph.check import check
    from dynarl.hypergraph.fold import fold
    from dynarl.hypergraph.graph import Graph
    from dynarl.hypergraph.journal import read
    from dynarl.report.run import configuration

    path = rundir.resolve(run)
    records = itertools.takewhile(lambda r: version is None or r["seq"] <= version, read(rundir.journal(path)))
    graph = fold(records, Graph(config=configuration(path)))
    if version is not None and version > graph.version:
        output.note(f"the journal ends with record {graph.version}; this is how things are there")
    if output_format == "json":
        edges = [{"kind": e.kind, "vertices": e.vertices, "attributes": e.attributes} for e in graph.edges()]
        output.print_json(
            {
                "run": path.name,
                "version": graph.version,
                "epoch": graph.epoch,
                "vertices": graph.vertices(),
                "edges": edges,
                "broken": check(graph),
            }
        )
        return
    table = output.table("hyperedge", "of", "joins", "with")
    for edge in graph.edges():
        attributes = "  ".join(f"{name}={_short(value)}" for name, value in edge.attributes.items())
        table.add_row(edge.kind, edge.vertices[0], " ".join(edge.vertices[1:]) or "-", attributes)
    console = output.console()
    console.print(f"{path.name}, record {graph.version}, epoch {graph.epoch}", soft_wrap=True)
    console.print(table)
    for text in check(graph):
        console.print(f"broken: {text}", soft_wrap=True)


def _short(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    return "none yet" if value is None else str(value)
