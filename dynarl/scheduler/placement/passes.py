"""Cost of what passes over whole sequences: training (forward, backward, update) and inference (forward).

A replica of tp x pp devices takes micro-batches of whole sequences through its pipeline; sequences are spread over the
replicas as evenly as whole ones can be. For m micro-batches in p stages, (m + p - 1) slots of (forward + backward) / p,
which is 1F1B with even stages; then the update: gradients are summed over the replicas, and each one updates its shard.

Time is a staircase over the devices: it falls where the busiest replica gets one sequence less.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dynarl.scheduler.placement.stage import Layout, evenly, staircase

# Share of a device's memory that a plan may fill: allocators leave holes.
USABLE = 0.95
# Replicas beyond which none is looked for.
MOST = 1 << 14


@dataclass(frozen=True)
class Replica:
    """One way to cut a model over tp x pp devices.

    token_s: of one token in a stage, with backward if there is one; hop_s: of a micro-batch between two
    stages; update_s(dp), memory(dp): seconds of one update and bytes of a device by part, with so many replicas.
    """

    tp: int
    pp: int
    ep: int
    token_s: float
    hop_s: float
    update_s: Callable[[int], float]
    memory: Callable[[int], dict[str, float]]

    @property
    def devices(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        expert = f" ep={self.ep}" if self.ep > 1 else ""
        return f"tp={self.tp} pp={self.pp}{expert}"


@dataclass(frozen=True)
class Passes:
    """A stage of training or inference; items are groups of `group_size` sequences of `sequence` tokens on average.

    updates: optimizer steps in an iteration of `iteration_items`, 0 for inference; state_bytes: of the whole model, that
    go to host memory and come back where the stage takes turns.
    """

    replicas: Sequence[Replica]
    group_size: int
    sequence: float
    microbatch_tokens: int
    iteration_items: int
    memory_bytes: float
    host_bytes_per_s: float
    state_bytes: float
    residue_bytes: float = 0.0
    updates: int = 0
    least: dict[tuple[Replica, bool], int] = field(default_factory=dict, compare=False)
    update: dict[tuple[Replica, int], float] = field(default_factory=dict, compare=False)

    def sizes(self, num_devices: int) -> np.ndarray:
        """Where the number of sequences on the busiest replica falls, as far as those are few."""
        steps = [staircase(self.iteration_items, each.devices, num_devices) for each in self.replicas]
        return np.unique(np.concatenate(steps)) if steps else np.empty(0, np.int64)

    def _seconds(self, devices: np.ndarray, items: float, shared: bool) -> np.ndarray:
        """[replicas, D]"""
        found = np.full((len(self.replicas), len(devices)), np.inf)
        samples = items * self.group_size
        per_microbatch = max(1.0, self.microbatch_tokens // self.sequence)
        updates = self.updates * items / self.iteration_items
        for row, each in enumerate(self.replicas):
            dp = devices // each.devices
            fits = self._fits(each, dp, shared)
            mine = np.ceil(samples / np.maximum(dp, 1) - 1e-9)
            microbatches = np.ceil(mine / per_microbatch)
            # The pipeline fills and drains once for each update, or once for a chunk that is less than one.
            bubbles = (each.pp - 1) * max(1.0, updates) * mine / microbatches
            work = (mine + bubbles) * self.sequence * each.token_s + (microbatches + each.pp - 1) * each.hop_s
            found[row] = np.where(fits, work, np.inf)
            if updates:
                distinct, back = np.unique(dp, return_inverse=True)
                found[row] += updates * np.array([self._update_s(each, int(d)) for d in distinct])[back]
        return found

    def _fits(self, replica: Replica, dp: np.ndarray, shared: bool) -> np.ndarray:
        return (dp >= self._least(replica, shared)) & (dp % replica.ep == 0)

    def _least(self, replica: Replica, shared: bool) -> int:
        """Fewest replicas at which one fits, since memory falls with their number; beyond MOST: never."""
        key = replica, shared
        if key not in self.least:
            limit = self._limit(shared)
            tried = range(replica.ep, MOST + 1, replica.ep)
            found = bisect.bisect_left(tried, True, key=lambda dp: sum(replica.memory(dp).values()) <= limit)
            self.least[key] = tried[found] if found < len(tried) else MOST + 1
        return self.least[key]

    def _update_s(self, replica: Replica, dp: int) -> float:
        key = replica, dp
        if key not in self.update:
            self.update[key] = replica.update_s(dp) if dp and dp % replica.ep == 0 else np.inf
        return self.update[key]

    def _limit(self, shared: bool) -> float:
        return USABLE * self.memory_bytes - (self.residue_bytes if shared else 0.0)

    def seconds(self, devices: np.ndarray, items: float, shared: bool) -> np.ndarray:
        return self._seconds(np.asarray(devices, np.int64), items, shared).min(axis=0, initial=np.inf)

    def release(self, devices: np.ndarray, items: float, shared: bool, points: int) -> np.ndarray:
        return evenly(self.seconds(devices, items, shared), points)

    def load_s(self, devices: np.ndarray) -> np.ndarray:
        """There and back."""
        return 2 * self.state_bytes / np.maximum(devices, 1) / self.host_bytes_per_s

    def layout(self, devices: int, items: float, shared: bool) -> Layout:
        best = self.replicas[int(self._seconds(np.array([devices]), items, shared)[:, 0].argmin())]
        dp = devices // best.devices
        memory = best.memory(dp) | ({"asleep": self.residue_bytes} if shared else {})
        return Layout(
            dp * best.devices, f"{best} dp={dp}", {"tp": best.tp, "pp": best.pp, "ep": best.ep, "dp": dp}, memory
        )

    def why_not(self, devices: int) -> str:
        """Of the way that comes nearest."""
        if not self.replicas:
            return "no tp and pp divide the model"
        tried = [each for each in self.replicas if each.devices <= devices]
        if not tried:
            return f"a replica needs {min(each.devices for each in self.replicas)} devices, there are {devices}"
        need = {each: each.memory(each.ep * max(1, devices // each.devices // each.ep)) for each in tried}
        nearest = min(tried, key=lambda each: sum(need[each].values()))
        parts = " + ".join(f"{name} {part / 1e9:.1f}" for name, part in need[nearest].items())
        return (
            f"{nearest} dp={devices // nearest.devices} needs {parts} = {sum(need[nearest].values()) / 1e9:.1f} GB a device "
            f"> {self._limit(False) / 1e9:.1f} GB ({USABLE:.0%} of {self.memory_bytes / 1e9:.0f} GB)"
        )

    def useful(self, num_devices: int) -> Passes:
        """The same without the ways that are nowhere the best, or all of them where none fits."""
        grid = np.unique(np.geomspace(1, num_devices, 200).round().astype(np.int64))
        won: set[int] = set()
        for items, shared in itertools.product((1.0, self.iteration_items), (False, True)):
            seconds = self._seconds(grid, items, shared)
            won |= set(seconds.argmin(axis=0)[np.isfinite(seconds.min(axis=0))].tolist()) if len(seconds) else set()
        return dataclasses.replace(self, replicas=[self.replicas[i] for i in sorted(won)] or self.replicas)
