"""Simulated against measured: constants fitted to some iterations of a trace predict the others.

Iterations of a trace go by the name of their candidate (`dynarl bench roles`), else by their policy. Each name is
simulated as often as it was measured, on what its own earlier iterations taught it, and means are compared, as the
constants are means. What a benchmark does not count is not compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dynarl.config.schema import Config
from dynarl.controller.trace import Line
from dynarl.errors import NotFoundError
from dynarl.sim.calibrate import Calibration, named, warm
from dynarl.sim.replayed import replay


@dataclass(frozen=True)
class Row:
    """Mean seconds of an iteration, and the range of what was measured."""

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


def pick(lines: Sequence[Line], name: str) -> list[Line]:
    """Those of one name. Raises NotFoundError."""
    found = named(lines)
    if name not in found:
        raise NotFoundError(f"no iteration of {name!r} in the trace; it has {', '.join(found)}")
    return found[name]


def compare(config: Config, lines: Sequence[Line], calibration: Calibration) -> list[Row]:
    """A row for each name in the trace."""
    counted = {id(line) for line in warm(lines)}
    rows = []
    for name, same in named(lines).items():
        # What is not counted is simulated all the same: the policy learns from it.
        again = replay(config, same, calibration)
        pairs = [(line, other) for line, other in zip(same, again, strict=True) if id(line) in counted]
        if not pairs:
            continue
        measured = [_seconds(line, line) for line, _ in pairs]
        simulated = statistics.fmean(_seconds(line, other) for line, other in pairs)
        rows.append(
            Row(name, len(same[0].roles), statistics.fmean(measured), min(measured), max(measured), simulated)
        )
    return rows


def _seconds(line: Line, of: Line) -> float:
    """Of an iteration like `line`; of a benchmark's from its start roles on: it comes from those of another candidate."""
    return of.seconds - (of.enter_s if line.candidate else 0.0)
