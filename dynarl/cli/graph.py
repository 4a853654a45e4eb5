"""`dynarl graph`: the hypergraph of a run, as it is now or was at a record of the journal."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynarl import rundir
from dynarl.cli import output
from dynarl.errors import DynarlError

if TYPE_CHECKING:
    from dynarl.hypergraph.graph import Graph


@click.command("graph", cls=output.Command)
@output.picture_options("graph")
@click.option("--at", "version", type=int, help="As it was after this record of the journal; default the last.")
def command(run: str, output_format: str, target: Path | None, version: int | None) -> None:
    """What runs where, what flows between, and who holds which state. RUN: its id, the start of it, a Slurm job id, or
    `last`."""
    path = rundir.resolve(run)
    graph = _graph(path, version)
    try:
        if output_format in ("png", "svg"):
            target = target or path / f"graph.{output_format}"
            _draw(graph, _title(path.name, graph), target, output_format)
            click.echo(target)
        elif output_format == "json":
            output.print_json(_as_json(path.name, graph), target)
        else:
            _print(path.name, graph)
    except OSError as error:
        raise DynarlError(f"cannot write {target}: {error.strerror or error}") from error


def _graph(path: Path, version: int | None) -> Graph:
    from dynarl.hypergraph.fold import fold
    from dynarl.hypergraph.graph import Graph
    from dynarl.hypergraph.journal import read
    from dynarl.report.run import configuration

    journal = read(rundir.journal(path))
    records = itertools.takewhile(lambda r: version is None or r["seq"] <= version, journal)
    graph = fold(records, Graph(config=configuration(path)))
    if version is not None and not 1 <= version <= journal.seq:
        list(journal)  # to its end
        has = f"records 1 to {journal.seq}" if journal.seq else "no records yet"
        raise DynarlError(f"--at {version}: the journal of {path.name} has {has}")
    return graph


def _title(run: str, graph: Graph) -> str:
    iteration = f", iteration {graph.iteration}" if graph.iteration is not None else ""
    return f"{run}, record {graph.version}, epoch {graph.epoch}{iteration}"


def _as_json(run: str, graph: Graph) -> dict[str, Any]:
    from dynarl.hypergraph import queries
    from dynarl.hypergraph.check import check
    from dynarl.hypergraph.edges import edges, vertices

    return {
        "run": run,
        "version": graph.version,
        "epoch": graph.epoch,
        "iteration": graph.iteration,
        "vertices": vertices(graph),
        "edges": [edge._asdict() for edge in edges(graph)],
        "free": queries.free_pool(graph),
        "waits": [wait._asdict() for wait in queries.waits(graph)],
        "critical_path": [stage._asdict() for stage in queries.critical_path(graph)],
        "staleness": queries.staleness(graph),
        "broken": check(graph),
    }


def _draw(graph: Graph, title: str, target: Path, form: str) -> None:
    try:
        from dynarl.report.graph_plot import draw
    except ImportError as error:
        raise DynarlError(
            f"no picture without matplotlib ({error}): pip install 'dynarl[report]', or take -o text"
        ) from error
    draw(graph, title, target, form)


def _print(run: str, graph: Graph) -> None:
    from dynarl.hypergraph.check import check
    from dynarl.hypergraph.edges import edges
    from dynarl.report import graph_text as words

    console = output.console()
    arrow = "→" if output.fancy(console) else "->"
    tables = {
        "placement": output.table("component", "nodes", "layout", "interruptible", "state"),
        "dataflow": output.table("channel", "from", "", "to", "what flows", "affinity"),
        "residency": output.table("state", ">version", "on"),
        "communicator": output.table("communicator", "nodes", "carries"),
    }
    for edge in edges(graph):
        name, a = edge.vertices[0].partition("/")[2], edge.attributes
        if edge.kind == "placement":
            nodes = "-" if "nodes" in a else words.nodes_of(edge.vertices[1:])
            row = (name, nodes, words.layout(edge), a["interruptible"], words.states(graph, name)[0])
        elif edge.kind == "dataflow":
            ends = ", ".join(a["producers"]) or "controller", arrow, ", ".join(a["consumers"])
            row = (name, *ends, words.flow(a), a["affinity"])
        elif edge.kind == "residency":
            version = "-" if a["version"] is None else str(a["version"])
            version += f" ({a['behind']} behind)" if a["behind"] else ""
            row = (name, version, words.nodes_of(edge.vertices[1:]))
        else:
            row = (name, words.nodes_of(edge.vertices[1:]), a["carries"])
        tables[edge.kind].add_row(*row)
    console.print(_title(run, graph), soft_wrap=True)
    for table in tables.values():
        if table.row_count:
            console.print()
            console.print(table)
    lines = [f"free: {text}" for text in words.free(graph)] + words.path_of(graph) + words.wait_lines(graph)
    for line in lines + [f"broken: {text}" for text in check(graph)]:
        console.print(line, soft_wrap=True)
