"""Slurm's time limits.

>>> minutes("1-12:30")
2190
>>> minutes("30:00"), minutes("0:01"), minutes("UNLIMITED")
(30, 1, None)
"""

from __future__ import annotations

import re

from dynarl.errors import SlurmError

FORMS = (
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds, "
    "UNLIMITED"
)

_UNLIMITED = {"unlimited", "infinite"}
_PLAIN = re.compile(r"([0-9]+)(?::([0-9]+))?(?::([0-9]+))?")
_WITH_DAYS = re.compile(r"([0-9]+)-([0-9]+)(?::([0-9]+))?(?::([0-9]+))?")


class TimeLimitError(SlurmError):
    """A time limit that fits none of the forms."""

    def __init__(self, text: str):
        super().__init__(f"time limit {text!r} is none of: {FORMS}")


def seconds(text: str) -> int | None:
    """The length in seconds as written; None for no limit (the words, or 0). Raises TimeLimitError."""
    text = text.strip()
    if text.lower() in _UNLIMITED:
        return None
    if match := _WITH_DAYS.fullmatch(text):
        days, hours, mins, secs = (int(part or 0) for part in match.groups())
        total = ((days * 24 + hours) * 60 + mins) * 60 + secs
    elif match := _PLAIN.fullmatch(text):
        first, second, third = match.groups()
        if third is not None:
            total = (int(first) * 60 + int(second)) * 60 + int(third)
        else:
            # One or two numbers begin with minutes: "30:00" is half an hour, not thirty.
            total = int(first) * 60 + int(second or 0)
    else:
        raise TimeLimitError(text)
    return total or None


def minutes(text: str) -> int | None:
    """What Slurm will grant, in minutes: seconds are rounded up. None for no limit."""
    total = seconds(text)
    return None if total is None else -(-total // 60)


def formatted(total_minutes: int | None) -> str:
    """The one form dynarl writes: D-HH:MM:SS, or HH:MM:SS under a day.

    >>> formatted(90), formatted(2190), formatted(None)
    ('01:30:00', '1-12:30:00', 'UNLIMITED')
    """
    if total_minutes is None:
        return "UNLIMITED"
    days, rest = divmod(total_minutes, 24 * 60)
    return (f"{days}-" if days else "") + f"{rest // 60:02}:{rest % 60:02}:00"
