"""Copies of a model among the workers: which of them run every micro-batch together, and which layout that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

from dynarl.vps.layout import LayoutError
from dynarl.vps.train_layout import TrainLayout

Place = tuple[str, int]  # (node, device)


class Replica(NamedTuple):
    """The workers that work on a lease together, in the order of their ranks; the first has the say.

    They are one copy of the model; several, where its experts are spread over these.

    >>> Replica((("n1", 0), ("n1", 1), ("n2", 0))).on("n1")
    [0, 1]
    """

    places: tuple[Place, ...]

    @property
    @cache  # there are no more of them than workers, and every lease asks
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node for node, _ in self.places))

    def on(self, node: str) -> list[int]:
        """Its devices on a node."""
        return [device for other, device in self.places if other == node]


def inside_nodes(nodes: Iterable[str], devices_per_node: int, width: int) -> list[Replica]:
    """Replicas of `width` neighbouring devices; devices left over at the end of a node are in none."""
    return [
        Replica(tuple((node, device) for device in range(first, first + width)))
        for node in nodes
        for first in range(0, devices_per_node - width + 1, width)
    ]


def of_layout(layout: TrainLayout, place: Callable[[int], Place]) -> list[Replica]:
    """The replicas of a layout; place: of a rank."""
    share = layout.replicas_per_lease
    return [
        Replica(
            tuple(
                place(layout.ranks[t + layout.tp * (first + d + layout.dp * p)])
                for p in range(layout.pp)
                for d in range(share)
                for t in range(layout.tp)
            )
        )
        for first in range(0, layout.dp, share)
    ]


def layout_on(ranks: Sequence[int], tp: int, pp: int, ep: int, vocab_divisible_by: int) -> TrainLayout:
    """The layout of these degrees in which each replica is neighbours in `ranks`. Raises LayoutError if they do not
    divide the ranks.

    >>> layout_on([0, 1, 2, 3], tp=1, pp=2, ep=1, vocab_divisible_by=1).ranks
    (0, 2, 1, 3)
    """
    if len(ranks) % (tp * pp):
        raise LayoutError(f"tp x pp must divide the training workers, but that is {tp * pp} and there are {len(ranks)}")
    dp = len(ranks) // (tp * pp)
    straight = TrainLayout(tp=tp, pp=pp, dp=dp, ep=ep, vocab_divisible_by=vocab_divisible_by)
    ordered = [0] * len(ranks)
    flat = iter(ranks)
    for replica in of_layout(straight, lambda rank: ("", rank)):
        for _, position in replica.places:
            ordered[position] = next(flat)
    return straight.relabelled(ordered)
