"""Copies of a model among the workers: which of them run every micro-batch together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

Place = tuple[str, int]  # (node, device)


class Replica(NamedTuple):
    """The workers that share one copy of the model, in the order of their ranks; the first has the say.

    >>> Replica((("n1", 0), ("n1", 1), ("n2", 0))).on("n1")
    [0, 1]
    """

    places: tuple[Place, ...]

    @property
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
