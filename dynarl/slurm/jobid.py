"""Identifiers of jobs and steps in every form that Slurm's tools print.

>>> parse("57829110_[5-100%4]").array, parse("12+1").job_component, parse("12.0+1").step_component
('[5-100%4]', 1, 1)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dynarl.errors import SlurmError

FORMS = "JOB, JOB_TASK, JOB_[TASKS], JOB+COMPONENT, JOB.STEP, JOB.STEP+COMPONENT, JOB;CLUSTER"

_FORM = re.compile(
    r"(?P<job>[1-9][0-9]*)"
    r"(?:_(?P<array>[0-9]+|\[[0-9,:%-]+(?:\.\.\.)?\]|\*))?"
    r"(?:\+(?P<het>[0-9]+))?"
    r"(?:\.(?P<step>[0-9]+|batch|extern|interactive|TBD)(?:\+(?P<part>[0-9]+))?)?"
    r"(?:;(?P<cluster>\S+))?"
)


class JobIdError(SlurmError):
    """A job id that fits none of the forms."""

    def __init__(self, text: str):
        super().__init__(f"job id {text!r} is none of: {FORMS}")


@dataclass(frozen=True)
class JobId:
    """`job_component`: offset in a heterogeneous job (12+1). `step_component`: part of a heterogeneous step (1.0+1)."""

    job: int
    array: str | None = None
    job_component: int | None = None
    step: str | None = None
    step_component: int | None = None
    cluster: str | None = None

    def __str__(self) -> str:
        pieces = [
            ("", self.job),
            ("_", self.array),
            ("+", self.job_component),
            (".", self.step),
            ("+", self.step_component),
            (";", self.cluster),
        ]
        return "".join(f"{mark}{piece}" for mark, piece in pieces if piece is not None)


def parse(text: str) -> JobId:
    """Raises JobIdError."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise JobIdError(text)
    offsets = [None if match[name] is None else int(match[name]) for name in ("het", "part")]
    return JobId(int(match["job"]), match["array"], offsets[0], match["step"], offsets[1], match["cluster"])


def from_sbatch(output: str) -> JobId:
    """The id in what `sbatch --parsable` printed. Site wrappers add lines before it. Raises JobIdError."""
    lines = [line.strip() for line in output.splitlines()]
    for line in reversed(lines):
        if re.fullmatch(r"[1-9][0-9]*(;\S+)?", line):
            return parse(line)
    raise JobIdError(output.strip())
