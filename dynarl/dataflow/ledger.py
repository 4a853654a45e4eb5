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

Pure: no clock, no sockets. The controller tells it what happened and asks what can be handed out. Every answer and
every change costs what it is about, not what the iteration has: groups are kept by state and lease, requests by node.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from collections import Counter, defaultdict
from typing import Container, Iterable, Iterator, Sequence

from dynarl import wire


@dataclass
class Group:
    """Samples of one prompt. `holder` is the node that has the trajectories, per sample; num_tokens: of finished ones."""

    name: str
    samples: list[str]
    state: str = "generating"
    lease: int | None = None
    node: str | None = None
    holders: dict[str, str] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    finish: dict[str, str] = field(default_factory=dict)
    num_tokens: int = 0


class Ledger:
    """All samples of one iteration. `scored_by_inference` False: groups skip scoring; leases: their numbers."""

    # Of the process, not of the ledger: a late answer to a lease of an earlier iteration must not pass for one of this.
    LEASES = itertools.count(1)

    def __init__(
        self, samples: Sequence[str], *, scored_by_inference: bool = True, leases: Iterator[int] = LEASES
    ):
        self.groups: dict[str, Group] = {}
        for sample in samples:
            self.groups.setdefault(wire.group_of(sample), Group(wire.group_of(sample), [])).samples.append(sample)
        if len(set(samples)) != len(samples):
            raise ValueError("a sample id occurs twice")
        self._scored_by_inference, self._leases = scored_by_inference, leases
        self._in_state: dict[str, dict[str, Group]] = defaultdict(dict)
        self._in_state["generating"] = dict(self.groups)
        self.num_changes: Counter[str] = Counter()  # state -> how often a group has come to it or left it
        self._leased: dict[int, Group] = {}
        self._returned: dict[str, None] = {}  # ordered; given back, so they go first
        self._fresh: dict[str, None] = dict.fromkeys(samples)
        self.running: dict[str, str] = {}
        self._on: dict[str, dict[str, None]] = defaultdict(dict)  # node -> what runs there
        self._listed: dict[str, list[str]] = {}  # the same as lists, where somebody has asked and nothing has changed
        self.num_running: Counter[str] = Counter()  # and how much
        self.freed: dict[str, None] = {}  # nodes on which something has ended since whoever reads this has cleared it
        self.partial: dict[str, str] = {}
        self._unreached: dict[str, None] = {}  # running here, but their hand-out has failed

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
        """What a node runs, what it has had longest first. The same list as long as it does, not to be changed."""
        if node not in self._listed:
            self._listed[node] = list(self._on.get(node, ()))
        return self._listed[node]

    def num_running_on(self, node: str) -> int:
        return self.num_running[node]

    def unreached(self, node: str, samples: Iterable[str]) -> None:
        """A hand-out did not reach `node`. Its requests count as running there until they are given back."""
        self._unreached.update((sample, None) for sample in samples if self.running.get(sample) == node)

    def stranded(self, at_work: Container[str]) -> list[str]:
        """Requests that nobody works on and that do not wait yet: unreached, on a node that is not in `at_work` any
        more."""
        return [sample for sample in self._unreached if self.running[sample] not in at_work]

    def _runs_no_more(self, sample: str) -> None:
        node = self.running.pop(sample)
        self._unreached.pop(sample, None)
        del self._on[node][sample]
        self._listed.pop(node, None)
        self.num_running[node] -= 1
        self.freed[node] = None

    def dispatch(self, node: str, samples: Iterable[str]) -> list[tuple[str, str | None]]:
        """Hand these waiting requests to `node`. Returns (sample, node that holds its partial answer or None) of each.

        Raises KeyError, naming the sample, for one that does not wait; those before it have been handed out.
        """
        handed = []
        self._listed.pop(node, None)
        for sample in samples:
            del (self._returned if sample in self._returned else self._fresh)[sample]
            self.running[sample] = node
            self._on[node][sample] = None
            self.num_running[node] += 1
            handed.append((sample, self.partial.get(sample)))
        return handed

    def returned(self, sample: str, node: str, *, holder: str | None) -> bool:
        """`node` gave the request back; `holder` has its tokens so far (None: none are left, it starts again).

        Returns False, and changes nothing, when the request was not running there (it finished during the abort).
        """
        if self.running.get(sample) != node:
            return False
        self._runs_no_more(sample)
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
        self._runs_no_more(sample)
        self.partial.pop(sample, None)
        group = self.groups[wire.group_of(sample)]
        group.holders[sample] = node
        group.rewards[sample], group.tokens[sample], group.finish[sample] = reward, tokens, finish
        group.num_tokens += tokens
        if len(group.holders) < len(group.samples):
            return None
        self._to(group, "generated" if self._scored_by_inference else "scored")
        return group

    # --- scoring and training

    def in_state(self, *states: str) -> list[Group]:
        """State by state; of each, the group that has been in it longest first."""
        return [group for state in states for group in self._in_state[state].values()]

    def each_in_state(self, state: str) -> Iterator[Group]:
        """The same of one state, one by one: for who looks at the first of many. Meanwhile no group may come or leave."""
        return iter(self._in_state[state].values())

    def num_in_state(self, state: str, *others: str) -> int:
        number = len(self._in_state[state])
        for other in others:
            number += len(self._in_state[other])
        return number

    def _to(self, group: Group, state: str) -> None:
        del self._in_state[group.state][group.name]
        self.num_changes[group.state] += 1
        group.state = state
        self._in_state[state][group.name] = group
        self.num_changes[state] += 1

    def lease(self, group: Group, node: str) -> int:
        """Hand a generated or scored group to `node`; returns the lease number."""
        following = {"generated": "scoring", "scored": "training"}
        if group.state not in following:
            raise ValueError(f"group {group.name} is {group.state}, only generated or scored groups are handed out")
        self._to(group, following[group.state])
        group.node, group.lease = node, next(self._leases)
        self._leased[group.lease] = group
        return group.lease

    def scored(self, lease: int) -> Group | None:
        """The lease's node holds the group with its old log-probabilities now. None: an expired lease."""
        group = self._held(lease, "scoring")
        if group is not None:
            group.holders = dict.fromkeys(group.samples, group.node)
            self._to(group, "scored")
            self._release(group)
        return group

    def accumulated(self, lease: int) -> Group | None:
        """The group's gradient is in the buffer of the lease's node. None: an expired lease."""
        group = self._held(lease, "training")
        if group is not None:
            self._to(group, "accumulated")
        return group

    def handed_back(self, lease: int) -> Group | None:
        """The node did not start the lease; the group can be handed out again."""
        group = self._held(lease, "scoring", "training")
        if group is not None:
            self._reoffer(group)
        return group

    def _held(self, lease: int, *states: str) -> Group | None:
        group = self._leased.get(lease)
        return group if group is not None and group.state in states else None

    def _reoffer(self, group: Group) -> None:
        self._to(group, {"scoring": "generated", "training": "scored", "accumulated": "scored"}[group.state])
        self._release(group)

    def _release(self, group: Group) -> None:
        del self._leased[group.lease]
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
            self._to(group, "trained")
        return [sample for group in groups for sample in group.samples]

    # --- faults

    def worker_lost(
        self, node: str, role: str, held: Iterable[str] = (), among: Iterable[str] | None = None
    ) -> list[str]:
        """A worker of `node` died. What it was doing is handed out again; returns the ids of its requests.

        held: those whose answer so far is recorded on `node`; the others go on from where they were before. among: the
        requests that it had when the worker died, if that is not now.
        """
        if role == "rollout":
            lost, held = self.running_on(node), set(held)
            if among is not None:
                lost = [sample for sample in among if self.running.get(sample) == node]
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
        return self.num_in_state("accumulated", "trained") == len(self.groups)
