"""Who has the devices of a node, where several components share them and take turns.

One component at a time has all of them, and it may enter as often as it likes as long as nobody else waits::

    rollout enters          has the devices
    rollout enters          so does this: nobody waits
    inference enters        waits
    rollout enters          waits as well, but before inference: what it makes is what inference will want
    rollout leaves, twice   the devices change hands: rollout again, then inference

Why it cannot deadlock: a turn takes everything that it needs at once, so nobody holds devices while it waits for
others; and work is handed to a component only when what it works on has been made, so a turn that holds the devices
never waits for one that wants them. Why nobody starves: turns go first come, first served, but for a component further
up in the workflow, which goes before those below it, and before each of these only once.

Pure: no clock, no tasks. `enter` and `leave` say who may begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Turn:
    """One stay of a component at the devices, or its wait for one. gone_before: components that went before it although
    they came later."""

    component: str
    holds: bool = False
    gone_before: set[str] = field(default_factory=set)


class DeviceLock:
    """order: components, from the first to work on an item to the last."""

    def __init__(self, order: Sequence[str]):
        self._rank = {component: rank for rank, component in enumerate(order)}
        self._inside: list[Turn] = []
        self._waiting: list[Turn] = []

    @property
    def holder(self) -> str | None:
        """The component that has the devices now."""
        return self._inside[0].component if self._inside else None

    @property
    def waiting(self) -> tuple[str, ...]:
        """Components of the turns that wait, the next one first."""
        return tuple(turn.component for turn in self._waiting)

    def enter(self, component: str) -> Turn:
        """A turn; it has the devices at once if it `holds`, else `leave` says when. Raises KeyError for a component
        that does not share them."""
        rank, turn = self._rank[component], Turn(component)
        if not self._waiting and self.holder in (None, component):
            turn.holds = True
            self._inside.append(turn)
            return turn
        place = len(self._waiting)
        while place and self._lets_pass(self._waiting[place - 1], component, rank):
            place -= 1
        for passed in self._waiting[place:]:
            passed.gone_before.add(component)
        self._waiting.insert(place, turn)
        return turn

    def _lets_pass(self, turn: Turn, component: str, rank: int) -> bool:
        return rank < self._rank[turn.component] and component not in turn.gone_before

    def leave(self, turn: Turn) -> list[Turn]:
        """End a turn, or its wait. Returns those that have the devices from now on."""
        (self._inside if turn.holds else self._waiting).remove(turn)
        begun: list[Turn] = []
        while self._waiting and self.holder in (None, self._waiting[0].component):
            following = self._waiting.pop(0)
            following.holds = True
            self._inside.append(following)
            begun.append(following)
        return begun
