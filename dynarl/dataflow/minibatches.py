"""Which groups an optimizer step has.

fixed: a share of the prompts, in order; known from the start, so a step waits for the slowest group of its share.
completion: the first groups that are complete, then the next ones; a minibatch fills up as they come.

Pure; every question is answered in O(1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dynarl.dataflow.ledger import Group


@dataclass
class Minibatch:
    """size: groups that it has once all are known."""

    size: int
    groups: list[Group] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def add(self, group: Group) -> None:
        self.groups.append(group)
        self.names.add(group.name)

    @property
    def is_accumulated(self) -> bool:
        """Whether it is known, and all of its gradients are in trainers' buffers, or have been in a step."""
        return len(self.groups) == self.size and all(g.state in ("accumulated", "trained") for g in self.groups)


class Minibatches:
    """`count` of them, as equal in size as whole groups allow; groups left over are in none.

    >>> groups = [Group("1:0", ["1:0:0"]), Group("1:1", ["1:1:0"])]
    >>> late_first = Minibatches(groups, 2, by_completion=True)
    >>> for group in reversed(groups):
    ...     late_first.completed(group)
    >>> [late_first[index].names for index in range(2)]
    [{'1:1'}, {'1:0'}]
    """

    def __init__(self, groups: Sequence[Group], count: int, by_completion: bool):
        self._size, self._by_completion = len(groups) // count, by_completion
        self._batches = [Minibatch(self._size) for _ in range(count)]
        self._num_placed = 0
        for group in () if by_completion else groups:
            self._place(group)

    def __getitem__(self, index: int) -> Minibatch:
        return self._batches[index]

    def completed(self, group: Group) -> None:
        """Its last answer is there."""
        if self._by_completion:
            self._place(group)

    def _place(self, group: Group) -> None:
        index = self._num_placed // self._size if self._size else len(self._batches)
        self._num_placed += 1
        if index < len(self._batches):
            self._batches[index].add(group)
