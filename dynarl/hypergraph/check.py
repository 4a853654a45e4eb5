"""The rules that the hypergraph of a job keeps at all times, and what a change of roles must not do to it.

1. A node has at most one active role; it changes only by a move of a committed epoch, from the role it had.
2. Epochs rise, and each commit or cancel ends the proposal made last.
3. A channel that must not wait has a consumer: the last rollout node does not leave while requests are live.
4. Optimizer state has owners; a step needs a trainer.
5. Every sample counts in exactly one optimizer step.
6. A borrowed node holds whole replicas of the trainer.
7. Roles stay as they are while weights are on their way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dynarl.config.schema import LENDING
from dynarl.hypergraph.graph import Graph, Move


def check(graph: Graph, live_requests: int = 0) -> list[str]:
    """The broken rules as sentences for a person; empty when all is well. `live_requests`: unfinished now, if known."""
    broken = list(graph.faults)
    if graph.roles:
        broken += _channels(graph, graph.roles, live_requests)
    if graph.step_nodes and not graph.owners:
        broken.append("no node has training as its home: nobody owns the optimizer state")
    tally = graph.samples.tally()
    if tally.lost:
        broken.append(f"{tally.lost} samples of finished iterations are in no optimizer step")
    if tally.doubled:
        broken.append(f"{tally.doubled} samples are in more than one optimizer step")
    return broken


def check_proposal(graph: Graph, moves: Sequence[Move], live_requests: int = 0) -> list[str]:
    """Why these moves must not be made, as sentences; empty when they may. Nothing is asked of a job without a step:
    then no node is known."""
    if not graph.step_nodes:
        return []
    broken = []
    if graph.in_transit is not None:
        broken.append(f"version {graph.in_transit} of the weights is on its way: roles stay until it is there")
    targets: dict[str, str] = {}
    for move in moves:
        broken += _move(graph, move)
        if targets.setdefault(move.node, move.target) != move.target:
            broken.append(f"{move.node} cannot have two roles at once, {targets[move.node]} and {move.target}")
    after = {node: targets.get(node, role) for node, role in graph.roles.items()}
    return broken + list(_channels(graph, after, live_requests))


def _move(graph: Graph, move: Move) -> Iterator[str]:
    node, target, workflow = move.node, move.target, graph.workflow
    role = graph.roles.get(node)
    if role is None:
        there = node in graph.step_nodes
        yield f"{node} has no agent in this step" if there else f"{node} is not a node of this step"
        return
    if role != move.source:
        yield f"{node} is in {role}, not in {move.source}: the move was made for another state of the job"
    if target not in workflow.roles:
        yield f"{node} cannot become {target}: a node is given to one of {', '.join(workflow.roles)}"
        return
    yield from _workers(graph, node, target)
    program, home = workflow.components[target].program, graph.homes[node]
    # Those that join the trainer itself are part of its next layout, whatever replicas that has.
    lent = home != target and graph.next_layout is None
    if program == "training" and lent and graph.devices_per_node < graph.replica_size:
        yield (
            f"{node} has {graph.devices_per_node} devices, a replica of the trainer needs {graph.replica_size} "
            f"({graph.layout}): it cannot lend gradients"
        )
    if home != target and role == home and not _lends(graph):
        held = [name for name, state in workflow.state.items() if state.owner == home and not state.held_by]
        if held:
            yield f"{node} owns {', '.join(held)} and stays in {home}: policy.lend_owners is off"


def _lends(graph: Graph) -> bool:
    return graph.setting("policy", "name") in LENDING or graph.setting("policy", "lend_owners", False)


def _workers(graph: Graph, node: str, role: str) -> Iterator[str]:
    """A node may take the roles that workers were started for, and only while these live."""
    found = [graph.workers.get((node, role, device)) for device in range(graph.devices_per_node)]
    if not all(found):
        yield f"{node} may not take the role {role}: it has no {role} workers on all of its devices"
    elif dead := [worker.device for worker in found if worker.state != "up"]:
        yield f"{node} cannot take the role {role} now: its worker on device {', '.join(map(str, dead))} is down"


def _channels(graph: Graph, roles: dict[str, str], live_requests: int) -> Iterator[str]:
    """Channels that would hold something that nobody takes, with these active roles."""
    workflow = graph.workflow

    def runs(components: Iterable[str]) -> bool:
        return any(name in roles.values() or name not in workflow.roles for name in components)

    for name, channel in workflow.channels.items():
        if channel.deferrable or runs(channel.consumers):
            continue
        takers = " or ".join(channel.consumers)
        if not channel.producers and live_requests:
            yield f"{live_requests} requests are live, but no node has the role {takers}"
        elif channel.producers and runs(set(channel.producers) & set(workflow.roles)):
            sources = " and ".join(channel.producers)
            yield f"{name} would fill up: {sources} put into it, but no node has the role {takers}"
