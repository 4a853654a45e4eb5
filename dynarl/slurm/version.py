"""Slurm's release, as `srun --version` prints it.

>>> parse("slurm-wlm 22.05.8") >= OLDEST
True
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dynarl.errors import SlurmError


class Version(NamedTuple):
    """Year and month of the release, and its patch level. Releases compare as tuples."""

    year: int
    month: int
    patch: int = 0

    def __str__(self) -> str:
        return f"{self.year}.{self.month:02}.{self.patch}"


# From 22.05 on --overlap shares memory and GPUs as well as CPUs. Before, the agents' step would block every other one.
OLDEST = Version(22, 5)


def parse(text: str) -> Version:
    """Raises SlurmError, quoting the text, where it holds no version."""
    match = re.search(r"\bslurm\S*\s+(\d{2})\.(\d{2})(?:\.(\d+))?", text)
    if match is None:
        raise SlurmError(f"cannot read Slurm's version from {text.strip()!r}; expected something like 'slurm 24.05.3'")
    return Version(int(match[1]), int(match[2]), int(match[3] or 0))


def require(version: Version) -> None:
    """Raises SlurmError for a release that is too old."""
    if version < OLDEST:
        raise SlurmError(
            f"this is Slurm {version}; dynarl needs {OLDEST.year}.{OLDEST.month:02} or newer "
            "(older ones do not share GPUs and memory between steps)"
        )
