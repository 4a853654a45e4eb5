"""Vertices and hyperedges of a job, read off its graph and the workflow that it follows.

Vertices: components (`component/rollout`), devices (`device/n1:0`), state objects (`state/weights`), channels
(`channel/trajectories`) and communicators (`communicator/world`). Hyperedges join any number of them:

- placement     a component and the devices that run it now, with its layout
- dataflow      a channel and the components at its two ends, with what is known of its progress
- residency     a state object and the devices that hold it, with its version
- communicator  devices whose workers, or agents, exchange messages as a group now, with their ranks in the MPI world
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dynarl.hypergraph.graph import Graph


class Edge(NamedTuple):
    """A hyperedge, e.g. Edge("placement", ("component/rollout", "device/n1:0"), {"instances": 1})."""

    kind: str
    vertices: tuple[str, ...]
    attributes: dict[str, Any]


def vertices(graph: Graph) -> list[str]:
    """All of them; `edges` joins no other."""
    workflow = graph.workflow
    return [
        *(f"component/{name}" for name in workflow.components),
        *devices(graph, graph.nodes),
        *(f"state/{name}" for name in workflow.state),
        *(f"channel/{name}" for name in workflow.channels),
        *(edge.vertices[0] for edge in _communicators(graph)),
    ]


def edges(graph: Graph) -> list[Edge]:
    return [
        *(placement(graph, name) for name in graph.workflow.components),
        *(dataflow(graph, name) for name in graph.workflow.channels),
        *(residency(graph, name) for name in graph.workflow.state),
        *_communicators(graph),
    ]


def devices(graph: Graph, nodes: list[str]) -> tuple[str, ...]:
    """Vertices of the devices of these nodes."""
    return tuple(f"device/{node}:{device}" for node in nodes for device in range(graph.devices_per_node))


def placement(graph: Graph, name: str) -> Edge:
    """Where a component runs. Trainers are owners of optimizer state, or borrowed: they lend gradients only."""
    component = graph.workflow.components[name]
    attributes: dict[str, Any] = {"kind": component.kind, "interruptible": component.interruptible}
    if component.runs_on == "every node":
        return Edge("placement", (f"component/{name}",), attributes | {"nodes": len(graph.roles)})
    nodes = graph.with_role(name)
    found = devices(graph, nodes)
    if component.program == "training":
        attributes["layout"] = graph.layout
        attributes["replicas"] = len(found) // graph.replica_size
        attributes["owners"] = [node for node in nodes if graph.homes.get(node) == name]
        attributes["borrowed"] = [node for node in nodes if graph.homes.get(node) != name]
    else:
        attributes["instances"] = len(found) // (graph.setting("training", "tp", 1) if name == "inference" else 1)
    return Edge("placement", (f"component/{name}", *found), attributes)


def dataflow(graph: Graph, name: str) -> Edge:
    """waiting, at_work: items not yet taken, and taken but not done, when the scheduler looked last; None: unknown."""
    channel = graph.workflow.channels[name]
    ends = dict.fromkeys(f"component/{each}" for each in channel.producers + channel.consumers)
    attributes = {
        "producers": list(channel.producers),
        "consumers": list(channel.consumers),
        "granularity": channel.granularity,
        "affinity": channel.affinity,
        "waiting": seen(graph).get(channel.waiting),
        "at_work": seen(graph).get(channel.at_work),
    }
    return Edge("dataflow", (f"channel/{name}", *ends), attributes)


def seen(graph: Graph) -> dict[str, Any]:
    """The figures that the last decision of the running iteration was made from; empty without one."""
    decision = graph.decision
    return decision["seen"] if decision and decision["iteration"] == graph.iteration else {}


def residency(graph: Graph, name: str) -> Edge:
    """behind: by how many versions the oldest copy is older than what the owners have."""
    state = graph.workflow.state[name]
    owners = [node for node, home in graph.homes.items() if home == state.owner]
    nodes = [n for n, role in graph.roles.items() if role in state.held_by] if state.held_by else owners
    staged = [version for node in nodes if (version := graph.staged.get(node)) is not None]
    newest = graph.in_transit or max(staged, default=graph.weights_version)
    oldest = min(staged, default=newest) if state.held_by else newest
    attributes = {"version": oldest, "behind": newest - oldest if newest is not None else None}
    return Edge("residency", (f"state/{name}", *devices(graph, nodes)), attributes)


def _communicators(graph: Graph) -> list[Edge]:
    groups: list[tuple[str, str, list[str]]] = []
    if graph.ended is not None:
        return []
    if graph.ready:
        groups.append(("world", "votes and model state", graph.step_nodes))
    for name, component in graph.workflow.components.items():
        if component.program == "training" and graph.ready and (nodes := graph.with_role(name)):
            groups.append((name, "gradients", nodes))
    if graph.epochs and graph.epochs[-1].state == "proposed":
        epoch = graph.epochs[-1]
        members = dict.fromkeys([*(move.node for move in epoch.moves), *graph.owners])
        groups.append((f"epoch-{epoch.number}", "the vote on a change of roles", list(members)))
    return [
        Edge(
            "communicator",
            (f"communicator/{name}", *devices(graph, nodes)),
            {"carries": carries, "ranks": sorted(graph.ranks[node] for node in nodes if node in graph.ranks)},
        )
        for name, carries, nodes in groups
    ]
