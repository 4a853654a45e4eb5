"""What a person reads of a hypergraph, in words; the table and the picture of `dynarl graph` say the same."""

from __future__ import annotations

from typing import Any

from dynarl.hypergraph.edges import Edge, residency
from dynarl.hypergraph.graph import Graph
from dynarl.hypergraph.queries import critical_path, free_pool, waits
from dynarl.slurm import hostlist


def counted(number: int, noun: str) -> str:
    """`1 replica`, `2 replicas`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def layout(placement: Edge) -> str:
    """How a component lies on its devices."""
    found = placement.attributes
    if "nodes" in found:
        return f"on every node ({found['nodes']})"
    if "replicas" in found:
        return f"{counted(found['replicas'], 'replica')}, {found['layout']}"
    return counted(found["instances"], "instance")


def flow(attributes: dict[str, Any]) -> str:
    """What a channel carries, and how much as far as that is known."""
    parts = [{"minibatch": "minibatches"}.get(attributes["granularity"], attributes["granularity"] + "s")]
    if attributes["waiting"] is not None:
        parts.append(f"{attributes['waiting']} wait")
    if attributes["at_work"] is not None:
        parts.append(f"{attributes['at_work']} at work")
    return ", ".join(parts)


def states(graph: Graph, component: str) -> tuple[str, bool]:
    """State that a component's nodes hold, with versions; and whether a copy is older than the owners' own."""
    found, late = [], False
    for name, state in graph.workflow.state.items() if graph.with_role(component) else ():
        if component == state.owner or component in state.held_by:
            attributes = residency(graph, name).attributes
            version = "" if attributes["version"] is None else f" v{attributes['version']}"
            found.append(name.replace("_", " ") + version)
            late = late or (bool(attributes["behind"]) and component != state.owner)
    return ", ".join(found), late


def nodes_of(devices: tuple[str, ...]) -> str:
    """`n[1-4]` for the vertices of their devices; `-` for none."""
    nodes = dict.fromkeys(vertex.removeprefix("device/").rpartition(":")[0] for vertex in devices)
    return hostlist.fold(list(nodes)) if nodes else "-"


def free(graph: Graph) -> list[str]:
    """The devices without a role in a line, if there are any."""
    pool = free_pool(graph)
    return [f"{counted(len(pool), 'device')} on {nodes_of(pool)}"] if pool and graph.step_nodes else []


def path_of(graph: Graph) -> list[str]:
    """The critical path of the newest iteration that has stepped in a line, if the records tell it."""
    path = critical_path(graph)
    if not path:
        return []
    number = next(n for n, each in reversed(graph.iterations.items()) if each.num_steps)
    parts = ", ".join(f"{each.component} {each.alone_s:.2f} s" for each in path)
    return [f"iteration {number} waited for {parts}"]


def wait_lines(graph: Graph) -> list[str]:
    """Who waits for whom, a line each; one line where all wait for the same."""
    found: dict[str, list[str]] = {}
    for wait in waits(graph):
        found.setdefault(wait.why, []).append(wait.component)
    return [f"{', '.join(names)} wait{'s' * (len(names) == 1)}: {why}" for why, names in found.items()]
