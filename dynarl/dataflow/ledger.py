"""Where every sample of one iteration is: the book that makes each of them count exactly once.

Life of a sample, and of the group it belongs to::

    sample:  waiting -> running(node) -> finished(node holds it)
                ^          |
                +----------+   returned: aborted in part (its node holds the tokens), or lost with a worker (from scratch)

    group:   generating -> generated -> scoring(lease) -> scored -> training(lease) -> accumulated -> (step) trained
                              ^            |                ^           |                 |
                              +------------+                +-----------+-----------------+   lost with a worker, or handed back

A group becomes `generated` when its last sample finishes, and is never split: it is scored as a whole and trained as a
whole. Every hand-out is a lease: the group is in flight at one place, and only that lease can complete it. What a dead
worker had accumulated is lost with its gradient buffer, so those groups go back to `scored` and are trained again; since
the optimizer has not stepped, they still count once.

Pure: no clock, no sockets. The controller tells it what happened and asks what can be handed out.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Iterable, Sequence

from dynarl import wire


@dataclass
class Group:
    """Samples of one prompt. `holder` is the node that has the trajectories, per sample."""

    name: str
    samples: list[str]
    state: str = "generating"
    lease: int | None = None
    node: str | None = None
    holders: dict[str, str] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    finish: dict[str, str] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens.values())


class Ledger:
    """All samples of one iteration. `scored_by_inference` False: groups skip scoring."""

    # Of the process, not of the ledger: a late answer to a lease of an earlier iteration must not pass for one of this.
    _leases = itertools.count(1)

    def __init__(self, samples: Sequence[str], *, scored_by_inference: bool = True):
        self.groups: dict[str, Group] = {}
        for sample in samples:
            self.groups.setdefault(wire.group_of(sample), Group(wire.group_of(sample), [])).samples.append(sample)
        if len(set(samples)) != len(samples):
            raise ValueError("a sample id occurs twice")
        self._scored_by_inference = scored_by_inference
        self._returned: dict[str, None] = {}  # ordered; given back, so they go first
        self._fresh: dict[str, None] = dict.fromkeys(samples)
        self.running: dict[str, str] = {}
        self.partial: dict[str, str] = {}

    # --- generation

    @property
    def num_waiting(self) -> int:
        return len(self._returned) + len(self._fresh)

    @property
    def num_live(self) -> int:
        """Requests that are not finished."""
        return self.num_waiting + len(self.running)

    def waiting(self, most: int | None = None) -> list[str]:
        """The first `most` requests that nobody has: those that were given back, then the others in order."""
        return list(itertools.islice(itertools.chain(self._returned, self._fresh), most))

    def running_on(self, node: str) -> list[str]:
        return [sample for sample, where in self.running.items() if where == node]

    def dispatch(self, node: str, samples: Iterable[str]) -> list[tuple[str, str | None]]:
        """Hand these waiting requests to `node`. Returns (sample, node that holds its partial answer or None) of each.

        Raises KeyError, naming the sample, for one that does not wait; those before it have been handed out.
        """
        handed = []
        for sample in samples:
            del (self._returned if sample in self._returned else self._fresh)[sample]
            self.running[sample] = node
            handed.append((sample, self.partial.get(sample)))
        return handed

    def returned(self, sample: str, node: str, *, holder: str | None) -> bool:
        """`node` gave the request back; `holder` has its tokens so far (None: none are left, it starts again).

        Returns False, and changes nothing, when the request was not running there (it finished during the abort).
        """
        if self.running.get(sample) != node:
            return False
        del self.running[sample]
        if holder is None:
            self.partial.pop(sample, None)
        else:
            self.partial[sample] = holder
        self._returned[sample] = None
        return True

    def finished(self, sample: str, node: str, *, reward: float, tokens: int, finish: str) -> Group | None:
        """`node` holds the complete answer. Returns the group when this was its last sample.

        A finish from a node that does not own the request is ignored: the request was moved, its new owner will finish it.
        """
        if self.running.get(sample) != node:
            return None
        del self.running[sample]
        self.partial.pop(sample, None)
        group = self.groups[wire.group_of(sample)]
        group.holders[sample] = node
        group.rewards[sample], group.tokens[sample], group.finish[sample] = reward, tokens, finish
        if len(group.holders) < len(group.samples):
            return None
        group.state = "generated" if self._scored_by_inference else "scored"
        return group

    # --- scoring and training

    def in_state(self, *states: str) -> list[Group]:
        return [group for group in self.groups.values() if group.state in states]

    def lease(self, group: Group, node: str) -> int:
        """Hand a generated or scored group to `node`; returns the lease number."""
        following = {"generated": "scoring", "scored": "training"}
        if group.state not in following:
            raise ValueError(f"group {group.name} is {group.state}, only generated or scored groups are handed out")
        group.state, group.node, group.lease = following[group.state], node, next(self._leases)
        return group.lease

    def scored(self, lease: int) -> Group | None:
        """The lease's node holds the group with its old log-probabilities now. None: an expired lease."""
        group = self._held(lease, "scoring")
        if group is not None:
            group.holders = dict.fromkeys(group.samples, group.node)
            group.state, group.lease, group.node = "scored", None, None
        return group

    def accumulated(self, lease: int) -> Group | None:
        """The group's gradient is in the buffer of the lease's node. None: an expired lease."""
        group = self._held(lease, "training")
        if group is not None:
            group.state = "accumulated"
        return group

    def handed_back(self, lease: int) -> Group | None:
        """The node did not start the lease; the group can be handed out again."""
        group = self._held(lease, "scoring", "training")
        if group is not None:
            self._reoffer(group)
        return group

    def _held(self, lease: int, *states: str) -> Group | None:
        return next((g for g in self.groups.values() if g.lease == lease and g.state in states), None)

    def _reoffer(self, group: Group) -> None:
        group.state = {"scoring": "generated", "training": "scored", "accumulated": "scored"}[group.state]
        group.lease = group.node = None

    def trained(self, groups: Iterable[Group]) -> list[str]:
        """The optimizer has stepped on these groups. Returns their sample ids, the proof for the journal.

        Raises ValueError, and marks none of them, when the gradient of one was not in the step.
        """
        groups = list(groups)
        if len({group.name for group in groups}) != len(groups):
            raise ValueError(f"a group is named twice for one step: {[group.name for group in groups]}")
        for group in groups:
            if group.state != "accumulated":
                raise ValueError(f"group {group.name} is {group.state}: its gradient is not in this step")
        for group in groups:
            group.state = "trained"
        return [sample for group in groups for sample in group.samples]

    # --- faults

    def worker_lost(self, node: str, role: str, held: Iterable[str] = ()) -> list[str]:
        """A worker of `node` died. What it was doing is handed out again; returns the ids of its requests.

        held: those whose answer so far is recorded on `node`; the others go on from where they were before.
        """
        if role == "rollout":
            lost, held = self.running_on(node), set(held)
            for sample in lost:
                self.returned(sample, node, holder=node if sample in held else self.partial.get(sample))
            return lost
        states = {"inference": ("scoring",), "training": ("training", "accumulated")}[role]
        for group in self.in_state(*states):
            if group.node == node:
                self._reoffer(group)
        return []

    @property
    def done(self) -> bool:
        return all(group.state in ("accumulated", "trained") for group in self.groups.values())
