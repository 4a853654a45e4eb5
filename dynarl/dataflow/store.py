"""Trajectories held by one node, by sample id. Other nodes fetch them; the controller only knows where they are."""

from __future__ import annotations

from typing import Iterable

from dynarl.wire import Trajectory


class Store:
    """A node's samples of the iterations that are not yet trained.

    >>> store = Store()
    >>> store.put(Trajectory("3:17:0", b"", b"", b""))
    >>> store.get(["3:17:0"])[0].sample
    '3:17:0'
    >>> store.forget(3); len(store)
    0
    """

    def __init__(self) -> None:
        self._samples: dict[str, Trajectory] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def put(self, trajectory: Trajectory) -> None:
        """Keep a trajectory; a longer one of the same sample replaces it."""
        self._samples[trajectory.sample] = trajectory

    def get(self, samples: Iterable[str]) -> list[Trajectory]:
        """Raises KeyError naming the first sample that is not held here."""
        return [self._samples[sample] for sample in samples]

    def forget(self, iteration: int) -> None:
        """Drop every sample of iterations up to and including `iteration`."""
        self._samples = {s: t for s, t in self._samples.items() if int(s.split(":", 1)[0]) > iteration}
