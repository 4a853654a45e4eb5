"""When a role worker hangs: it answers nobody, or it answers and gets nothing done.

A worker answers between two units of work, so a ping says that its loop turns; tokens, finished answers and leases
say that its work goes on. One that is ten times slower than the others does both and is left alone. While it starts,
or reads a model, it cannot answer; then it is enough that its processes use the processor.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Looks per deadline. A worker that has been silent for as long as one is asked for an answer.
LOOKS = 8
# Calls during which a model, a task or the groups of a layout are built.
BUILDING = frozenset(
    "load build ref_load create_model restore open wake prepared reserve adopt run_transition".split()
)
# Less is the wake-ups of a process that waits.
USED_CPU_S = 0.01


@dataclass
class Pulse:
    """Signs of life of one worker; all times in seconds of one clock.

    >>> pulse = Pulse(limit_s=10.0, now=0.0)
    >>> pulse.look(9.0, heard=0.0, busy=False, done=0)
    >>> pulse.look(11.0, heard=0.0, busy=False, done=0)
    'no sign of life for 11 s'
    >>> pulse.look(30.0, heard=30.0, busy=True, done=1), pulse.look(39.0, heard=39.0, busy=True, done=1)
    (None, None)
    >>> pulse.look(41.0, heard=41.0, busy=True, done=1)
    'nothing of its work done for 11 s (last sign of life 0 s ago)'
    """

    limit_s: float
    now: float
    _alive: float = field(init=False)
    _moved: float = field(init=False)
    _done: Any = None
    _cpu_s: float = 0.0

    def __post_init__(self) -> None:
        self._alive = self._moved = self.now

    def look(self, now: float, *, heard: float, busy: bool, done: Any, cpu_s: float | None = None) -> str | None:
        """Why the worker is taken to hang, None if it is not.

        heard: when it last said something; busy: it has work; done: changes as that gets done; cpu_s: processor time of
        all its processes, given while it is building something.
        """
        self._alive = max(self._alive, heard)
        if cpu_s is not None and abs(cpu_s - self._cpu_s) > USED_CPU_S:
            self._alive = self._moved = now
            self._cpu_s = cpu_s
        if done != self._done or not busy:
            self._done, self._moved = done, now
        if now - self._alive > self.limit_s:
            return f"no sign of life for {now - self._alive:.0f} s"
        if now - self._moved > self.limit_s:
            heard_s = now - self._alive
            return f"nothing of its work done for {now - self._moved:.0f} s (last sign of life {heard_s:.0f} s ago)"
        return None

    def is_quiet(self, now: float) -> bool:
        """Whether it should be asked for an answer."""
        return now - self._alive > self.limit_s / LOOKS

    def forgive(self, seconds: float) -> None:
        """Nobody was looking for so long."""
        self._alive += seconds
        self._moved += seconds


def cpu_seconds(group: int) -> float:
    """Processor time that the living members of a process group have used."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
