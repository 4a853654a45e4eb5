"""Times and durations as they are shown."""

from __future__ import annotations

import datetime


def iso_time(unix_s: float | None) -> str | None:
    """`2026-01-31T12:00:00Z`, the form of all times in JSON."""
    if unix_s is None:
        return None
    time = datetime.datetime.fromtimestamp(unix_s, datetime.timezone.utc)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def duration(seconds: float | None) -> str:
    """For people: `0.4s`, `12s`, `3m05s`, `2h07m`, `1d02h`; "-" when unknown."""
    if seconds is None:
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
