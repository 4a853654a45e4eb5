"""Two stages that work on the same items in turns: an environment and the policy that acts in it.

An item is an episode; every round takes all of them through the environment and through the policy. Three ways to lay
that out, and the best is taken for each number of devices:

- both on all devices: a round takes environment + policy, and switching where the two do not fit into memory together;
- split, one batch: as long a round, on fewer devices each; only where the two do not fit together;
- split, K batches on their way: while one batch is with the policy another is in the environment. The slower part sets
  the pace: max(environment + policy, K * slower) a round, of batches of 1/K.

Published planners split a cycle evenly; here all splits are tried, up to FINE devices one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dynarl.scheduler.placement.stage import Layout

# Devices up to which every split is tried; beyond that this many shares.
FINE = 128
BATCHES = (1, 2, 3, 4)


@dataclass(frozen=True)
class Turn:
    """One member. A round of n items on d devices takes fixed_s + item_s * ceil(n / d); a device holds at most
    `most` items, of all batches together.
    """

    name: str
    fixed_s: float
    item_s: float
    most: float = np.inf

    def seconds(self, devices: np.ndarray, items: float) -> np.ndarray:
        return self.fixed_s + self.item_s * np.ceil(items / devices - 1e-9)


@dataclass(frozen=True)
class Cycle:
    """A stage made of two turns; see the top of the module. together_most: items on a device that has both members;
    switch_s: of a round on such a device, to bring the one in and the other out; way: how it may lie, `even` being apart
    on equal halves.
    """

    first: Turn
    second: Turn
    rounds: int
    together_most: float = np.inf
    switch_s: float = 0.0
    state_load_s: float = 0.0
    way: Literal["any", "together", "apart", "even"] = "any"

    def _ways(self, devices: np.ndarray, items: float) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
        """Seconds [W, D] of each way, and what it is: (batches, devices of the first member; 0: together) each."""
        both = self.first.seconds(devices, items) + self.second.seconds(devices, items) + self.switch_s
        fits = (items <= np.minimum(self.together_most, items) * devices) & (self.way in ("any", "together"))
        seconds, ways = [np.where(fits, self.rounds * both, np.inf)], [(1, np.zeros(len(devices), np.int64))]
        for given in self._splits(devices):
            for batches in BATCHES if items >= 2 else (1,):
                seconds.append(self._apart(devices, given, items, batches))
                ways.append((batches, given))
        return np.array(seconds), ways

    def _apart(self, devices: np.ndarray, given: np.ndarray, items: float, batches: int) -> np.ndarray:
        """With `given` devices for the first member and so many batches on their way."""
        rest = devices - given
        # A member's devices hold the items of all batches.
        fits = (given > 0) & (rest > 0)
        fits &= (self.first.most >= items / np.maximum(given, 1)) & (self.second.most >= items / np.maximum(rest, 1))
        a, b = (t.seconds(np.maximum(d, 1), items / batches) for t, d in ((self.first, given), (self.second, rest)))
        slower, sum_s = np.maximum(a, b), a + b
        # Where the slower part never waits it works on all batches of all rounds without a gap.
        gapless = sum_s + (self.rounds * batches - 1) * slower
        waiting = self.rounds * sum_s + (batches - 1) * slower
        return np.where(fits, np.where(batches * slower >= sum_s, gapless, waiting), np.inf)

    def _splits(self, devices: np.ndarray) -> list[np.ndarray]:
        if self.way == "together":
            return []
        if self.way == "even":
            return [devices // 2]
        most = int(devices.max())
        if most <= FINE:
            return [np.minimum(np.full(len(devices), number), devices) for number in range(1, most)]
        return [(devices * k // FINE).clip(1) for k in range(1, FINE)]

    def sizes(self, num_devices: int) -> np.ndarray:
        return np.empty(0, np.int64)

    def seconds(self, devices: np.ndarray, items: float, shared: bool) -> np.ndarray:
        return self._ways(np.asarray(devices), items)[0].min(axis=0)

    def release(self, devices: np.ndarray, items: float, shared: bool, points: int) -> np.ndarray:
        """All episodes go through all rounds, so all end at the end."""
        return np.repeat(self.seconds(devices, items, shared)[:, None], points, axis=1)

    def load_s(self, devices: np.ndarray) -> np.ndarray:
        return self.state_load_s / np.maximum(np.asarray(devices), 1)

    def layout(self, devices: int, items: float, shared: bool) -> Layout:
        seconds, ways = self._ways(np.array([devices]), items)
        batches, given = ways[int(seconds[:, 0].argmin())]
        first = int(given[0])
        if not first:
            return Layout(devices, f"{self.first.name} and {self.second.name} on each", {"batches": 1})
        rest = devices - first
        degrees = {self.first.name: first, self.second.name: rest, "batches": batches}
        text = (
            f"{self.first.name} {first} | {self.second.name} {rest}, {batches} batch{'es' * (batches > 1)} on the way"
        )
        return Layout(devices, text, degrees)

    def why_not(self, devices: int) -> str:
        return f"the items do not fit on {devices} devices, together or apart"
