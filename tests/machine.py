"""CPU time, and how much of it things take on this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

NOMINAL_S = 0.03  # what `_work` takes on the machine that the limits are meant for


def slowness() -> float:
    """CPU time of some plain Python here and now, as a multiple of what it takes on the machine that limits are meant
    for; 1 on a faster one."""
    return max(1.0, max(_work() for _ in range(3)) / NOMINAL_S)


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _work() -> float:
    began, seen = time.process_time(), {}
    for number in range(200_000):
        seen[number % 1000] = (number * number) % 97 + len(str(number))
    return time.process_time() - began
