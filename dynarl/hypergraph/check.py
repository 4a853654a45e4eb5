"""The rules that the hypergraph of a job keeps at all times.

1. A node has at most one active role; it changes only by a move of a committed epoch, from the role it had.
2. Epochs rise, and each commit or cancel ends the proposal made last.
3. The last rollout node does not leave while requests are live.
4. Optimizer state has owners; a step needs a trainer.
5. Every sample counts in exactly one optimizer step.
"""

from __future__ import annotations

from dynarl.hypergraph.graph import Graph


def check(graph: Graph, live_requests: int = 0) -> list[str]:
    """The broken rules as sentences for a person; empty when all is well. `live_requests`: unfinished now, if known."""
    broken = list(graph.faults)
    if live_requests and graph.roles and not graph.with_role("rollout"):
        broken.append(f"{live_requests} requests are live, but no node has the role rollout")
    if graph.step_nodes and not graph.owners:
        broken.append("no node has training as its home: nobody owns the optimizer state")
    tally = graph.samples.tally()
    if tally.lost:
        broken.append(f"{tally.lost} samples of finished iterations are in no optimizer step")
    if tally.doubled:
        broken.append(f"{tally.doubled} samples are in more than one optimizer step")
    return broken
