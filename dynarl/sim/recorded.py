"""A recorded run as a scenario: its iterations again, under any policy and with any number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from dynarl import rundir
from dynarl.config import load
from dynarl.config.schema import Config, Split
from dynarl.controller.nodes import assign_homes
from dynarl.controller.trace import Line
from dynarl.errors import ConfigError
from dynarl.scheduler.allocations import shares
from dynarl.sim.calibrate import Calibration, read, renamed, requests
from dynarl.sim.replayed import calibrated
from dynarl.sim.workload import SimRequest
from dynarl.sim.world import World

POLICIES = ("static", "colocated", "threshold", "adaptive")


class Recorded:
    """Iterations of a run again, one after another, under any policy and with any number of nodes; see `simulate`."""

    policies = POLICIES
    throughput_unit = "tokens/s"

    def __init__(self, name: str, config: Config, lines: Sequence[Line], calibration: Calibration):
        self.name, self._config, self._lines, self.calibration = name, config, lines, calibration
        self.split, self.num_nodes = config.split, config.cluster.nodes
        self.iterations = self.measured = len(lines)
        split = f"{self.split.rollout} rollout, {self.split.inference} inference, {self.split.training} training"
        self.about = f"{len(lines)} recorded iterations on {self.num_nodes} nodes: {split}"

    def world(self, policy: str) -> World:
        config = msgspec.structs.replace(self._config, policy=msgspec.structs.replace(self._config.policy, name=policy))
        names = [f"n{index + 1}" for index in range(self.num_nodes)]
        return self.calibration.world(config, assign_homes(config, names), self._draw)

    def slowed(self, role: str, factor: float) -> Recorded:
        """The same where work of this role takes `factor` times as long."""
        known = self.calibration
        if role == "rollout":
            off = replace(known, step=known.step.scaled(factor))
        else:
            fixed_s, per_token_s = known.stages[role]
            off = replace(known, stages={**known.stages, role: (fixed_s * factor, per_token_s * factor)})
        return Recorded(self.name, self._config, self._lines, off)

    def _draw(self, iteration: int, seed: int) -> list[SimRequest]:
        return renamed(requests(self._lines[iteration - 1]), iteration)


def recorded(run: Path, num_nodes: int | None = None, split: Split | None = None) -> Recorded:
    """A run as a scenario, with another split where one is given, else with its own, scaled to `num_nodes`. Raises
    NoTrace, ConfigError.
    """
    config = load.from_text(rundir.config(run).read_text()).config
    lines = [line for line in read(run) if line.answers]
    split = split or scaled(config.split, num_nodes or config.cluster.nodes)
    total = split.rollout + split.inference + split.training
    if num_nodes not in (None, total):
        raise ConfigError(f"a split of {total} nodes does not go with {num_nodes} nodes")
    cluster = msgspec.structs.replace(config.cluster, nodes=total)
    changed = msgspec.structs.replace(config, cluster=cluster, split=split)
    return Recorded(run.name, changed, lines, calibrated(config, lines))


def scaled(split: Split, num_nodes: int) -> Split:
    """The same parts of `num_nodes` nodes, by largest remainders; none loses its last node as long as there are enough.

    >>> scaled(Split(rollout=2, inference=1, training=1), 6)
    Split(rollout=3, inference=1, training=2)
    >>> scaled(Split(rollout=5, inference=1, training=2), 16)
    Split(rollout=10, inference=2, training=4)
    """
    roles = ("training", "rollout", "inference")
    return Split(**dict(zip(roles, shares(num_nodes, [getattr(split, role) for role in roles]), strict=True)))
