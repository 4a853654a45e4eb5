"""Simulated against measured: constants fitted to some iterations of a trace predict the others.

Iterations of a trace go by the name of their candidate (`dynarl bench roles`), else by their policy. Each name is
simulated as often as it was measured, on what its own earlier iterations taught it, and medians are compared.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dynarl.config.schema import Config, Policy
from dynarl.controller.nodes import assign_homes
from dynarl.controller.trace import Line
from dynarl.errors import NotFoundError
from dynarl.sim.calibrate import Calibration, renamed, requests
from dynarl.sim.run import run


@dataclass(frozen=True)
class Row:
    """Median seconds of an iteration, and the range of what was measured."""

    name: str
    nodes: int
    measured_s: float
    least_s: float
    most_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """Of the simulation, relative: above 0 it took longer than the real one."""
        return self.simulated_s / self.measured_s - 1


def named(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Lines of a trace by candidate or policy."""
    found: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        found[line.candidate or line.policy].append(line)
    return found


def pick(lines: Sequence[Line], name: str) -> list[Line]:
    """Those of one name. Raises NotFoundError."""
    found = named(lines)
    if name not in found:
        raise NotFoundError(f"no iteration of {name!r} in the trace; it has {', '.join(found)}")
    return found[name]


def compare(config: Config, lines: Sequence[Line], calibration: Calibration) -> list[Row]:
    """A row for each name in the trace."""
    rows = []
    for name, same in named(lines).items():
        measured = [line.seconds for line in same]
        simulated = simulate(config, same, calibration)
        rows.append(
            Row(name, len(same[0].roles), statistics.median(measured), min(measured), max(measured), simulated)
        )
    return rows


def simulate(config: Config, same: Sequence[Line], calibration: Calibration) -> float:
    """Median seconds of the iterations that these lines tell of, one after another."""
    first = same[0]
    policy = policy_of(config, first)
    homes = first.roles if policy.name == "static" else assign_homes(config, sorted(first.roles))

    def draw(iteration: int, seed: int):
        return renamed(requests(same[iteration - 1]), iteration)

    world = calibration.world(msgspec.structs.replace(config, policy=policy), dict(homes), draw)
    return statistics.median(each.makespan_s for each in run(world, 1, iterations=len(same)).iterations)


def policy_of(config: Config, line: Line) -> Policy:
    """As it ran: a bench's own candidates lend the trainer's nodes, and say in what order requests wait."""
    if not line.candidate:
        return config.policy
    lends = line.policy in ("threshold", "adaptive")
    return msgspec.structs.replace(config.policy, name=line.policy, lend_owners=lends)
