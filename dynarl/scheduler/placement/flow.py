"""What a plan places: the components of a workflow that have devices of their own, and which feeds which.

Components that work on the same item in turns (an environment and the policy that acts in it) are one vertex: a cycle
has no order in which its members could be cut apart. Feedback of a whole minibatch (gradients, returns) closes no such
cycle: nobody waits for it while an item is worked on. Tools on every node's CPUs have no devices; their time is part of
the rollout's.

>>> from dynarl.hypergraph import workflow
>>> flow = Flow.of(workflow.declared("grpo"))
>>> flow.vertices
(('rollout',), ('inference',), ('training',))
>>> [(flow.label(s), flow.label(t)) for s, t in flow.cuts(flow.everything)]
[('rollout', 'inference+training'), ('rollout+inference', 'training')]
"""

from __future__ import annotations

import functools
import graphlib
from dataclasses import dataclass

from dynarl.hypergraph.workflow import Workflow


@dataclass(frozen=True)
class Flow:
    """A directed graph without cycles. Sets of vertices are bit masks: vertex i is bit i, in the order of the work.

    vertices: the components of each vertex, several where they are a cycle; edges: (producer, consumer);
    sync: (owner, holder) of state that the owner makes anew in every iteration and a holder needs.
    """

    vertices: tuple[tuple[str, ...], ...]
    edges: frozenset[tuple[int, int]]
    sync: frozenset[tuple[int, int]] = frozenset()

    @classmethod
    def of(cls, workflow: Workflow) -> Flow:
        """The flow of a declaration, without the components that run on every node."""
        own = set(workflow.roles)
        feeds = {name: set() for name in workflow.components}
        for channel in workflow.channels.values():
            if not (channel.feedback and channel.granularity == "minibatch"):
                for producer in channel.producers:
                    feeds[producer] |= set(channel.consumers)
        reaches = {name: _reached(feeds, name) for name in feeds}
        # a and b are in one cycle where each reaches the other.
        groups = {name: tuple(o for o in workflow.order if o in own and _same(reaches, name, o)) for name in own}
        before = {groups[name]: {groups[o] for o in own if name in reaches[o]} - {groups[name]} for name in own}
        place = {name: number for number, name in enumerate(workflow.order)}
        ordered = sorted(before, key=lambda group: place[group[0]])
        vertices = tuple(graphlib.TopologicalSorter({group: sorted(before[group]) for group in ordered}).static_order())
        index = {name: i for i, group in enumerate(vertices) for name in group}
        edges = {
            (index[name], index[other])
            for name in own
            for other in own
            if other in reaches[name] and index[name] != index[other]
        }
        sync = {
            (index[state.owner], index[holder])
            for state in workflow.state.values()
            for holder in state.held_by
            if holder in own and index[holder] != index[state.owner]
        }
        return cls(vertices, frozenset(edges), frozenset(sync))

    @property
    def everything(self) -> int:
        return (1 << len(self.vertices)) - 1

    def members(self, mask: int) -> list[int]:
        return [i for i in range(len(self.vertices)) if mask >> i & 1]

    def label(self, mask: int) -> str:
        """Names of a set's components, such as `rollout+inference`."""
        return "+".join(name for i in self.members(mask) for name in self.vertices[i])

    def joined(self, first: int, second: int) -> bool:
        """Whether something flows from one set to the other."""
        return any(first >> a & 1 and second >> b & 1 for a, b in self.edges)

    def synced(self, first: int, second: int) -> list[int]:
        """Holders that are cut off from the owner of their state."""
        pairs = [(o, h) for o, h in self.sync if {first >> o & 1, first >> h & 1} == {0, 1}]
        return sorted({h for o, h in pairs if (first | second) >> o & 1 and (first | second) >> h & 1})

    def cuts(self, mask: int) -> list[tuple[int, int]]:
        """Every way to cut a set in two such that nothing flows back from the second part to the first."""
        return list(_cuts(self, mask))


@functools.cache
def _cuts(flow: Flow, mask: int) -> tuple[tuple[int, int], ...]:
    found = []
    first = (mask - 1) & mask
    while first:
        if not flow.joined(mask ^ first, first):
            found.append((first, mask ^ first))
        first = (first - 1) & mask
    return tuple(sorted(found))


def _reached(feeds: dict[str, set[str]], start: str) -> set[str]:
    """Everything that what `start` puts out can come to; itself only by way of a cycle."""
    reached: set[str] = set()
    ahead = [start]
    while ahead:
        new = feeds[ahead.pop()] - reached
        reached |= new
        ahead += new
    return reached


def _same(reaches: dict[str, set[str]], one: str, other: str) -> bool:
    return one == other or (other in reaches[one] and one in reaches[other])
