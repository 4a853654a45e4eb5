"""What a plan needs to know of a component: how long work takes it on any number of devices.

A stage is asked for all sizes at once (arrays over numbers of devices), because a search asks for thousands of them.
`Items` are the pieces that channels carry: groups, or samples where there are no groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


class Layout(NamedTuple):
    """How a stage lies on its devices. used: devices that it really uses; text: such as `tp=2 dp=8`; degrees: by name;
    memory_bytes: the parts of what its fullest device holds.
    """

    used: int
    text: str
    degrees: dict[str, int] = {}
    memory_bytes: dict[str, float] = {}


class Stage(Protocol):
    """Costs of one vertex of a flow.

    `shared`: it takes turns with other stages on the same devices, so that what they leave behind there is in its way.
    """

    def sizes(self, num_devices: int) -> np.ndarray:
        """Numbers of devices at which it becomes faster, int64 ascending, as far as they are few; empty where every
        further device helps a little.
        """

    def seconds(self, devices: np.ndarray, items: float, shared: bool) -> np.ndarray:
        """Seconds from the first item to the last one, float64 [D]; inf where it does not fit."""

    def release(self, devices: np.ndarray, items: float, shared: bool, points: int) -> np.ndarray:
        """When which share of the items is complete: [D, points], point i in seconds for share (i + 1) / points."""

    def load_s(self, devices: np.ndarray) -> np.ndarray:
        """Seconds to bring its state onto the devices and to take it off again, float64 [D]."""

    def layout(self, devices: int, items: float, shared: bool) -> Layout:
        """How it lies on so many devices."""

    def why_not(self, devices: int) -> str:
        """The arithmetic, where it does not fit on so many devices."""


@dataclass(frozen=True)
class Measured:
    """A stage that was seen at work: `seconds_seen` for `items_seen` items on `devices_seen` devices.

    Whole items go to replicas of `unit` devices each, so the time is that of the busiest replica; `fixed_s` of it does
    not depend on the number of items. level_s: no number of devices makes it faster than this share allows, such as
    the longest answer of a rollout.
    """

    seconds_seen: float
    devices_seen: int
    items_seen: int
    unit: int = 1
    fixed_s: float = 0.0
    level_s: float = 0.0
    state_load_s: float = 0.0

    def _replicas(self, devices: np.ndarray) -> np.ndarray:
        return np.asarray(devices, np.int64) // self.unit

    @property
    def _item_s(self) -> float:
        rounds = -(-self.items_seen // max(1, self.devices_seen // self.unit))
        return (self.seconds_seen - self.fixed_s) / rounds

    def sizes(self, num_devices: int) -> np.ndarray:
        return staircase(self.items_seen, self.unit, num_devices)

    def seconds(self, devices: np.ndarray, items: float, shared: bool) -> np.ndarray:
        replicas = self._replicas(devices)
        with np.errstate(divide="ignore"):
            rounds = np.where(replicas > 0, np.ceil(items / np.maximum(replicas, 1) - 1e-9), np.inf)
        share = items / self.items_seen
        return np.maximum(rounds * self._item_s, self.level_s * share) + self.fixed_s * share

    def release(self, devices: np.ndarray, items: float, shared: bool, points: int) -> np.ndarray:
        return evenly(self.seconds(devices, items, shared), points)

    def load_s(self, devices: np.ndarray) -> np.ndarray:
        return np.full(len(devices), self.state_load_s)

    def layout(self, devices: int, items: float, shared: bool) -> Layout:
        replicas = devices // self.unit
        return Layout(replicas * self.unit, f"{replicas} x {self.unit}", {"dp": replicas})

    def why_not(self, devices: int) -> str:
        return f"a replica needs {self.unit} devices, there are {devices}"


def staircase(items: int, unit: int, num_devices: int) -> np.ndarray:
    """The smallest number of devices for each number of items on the busiest replica of `unit` devices.

    >>> staircase(128, 1, 40).tolist()
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 19, 22, 26, 32]
    """
    most = num_devices // unit
    if most < 1:
        return np.empty(0, np.int64)
    replicas = np.arange(1, min(most, items) + 1)
    rounds = -(-items // replicas)
    first = np.concatenate([[True], rounds[1:] < rounds[:-1]])
    return replicas[first] * unit


def evenly(seconds: np.ndarray, points: int) -> np.ndarray:
    """Items that become complete one after the other: [D, points]."""
    return seconds[:, None] * (np.arange(1, points + 1) / points)
