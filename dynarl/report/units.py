"""Times, durations and sizes as they are shown, and sizes and rates as people write them."""

from __future__ import annotations

import datetime
import re


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


def within(seconds: float, total_s: float) -> str:
    """A time within one of `total_s`, so that all of them are shown alike: to a tenth of a second below 100 s, else as
    `duration`.

    >>> within(1.64, 43.0), within(120.4, 43.0), within(1.64, 554.0), within(553.7, 554.0)
    ('1.6 s', '120.4 s', '1.6s', '9m14s')
    """
    return f"{seconds:.1f} s" if total_s < 100 else duration(seconds)


_FACTORS = {
    prefix + "i": 1024**power for power, prefix in enumerate(("", "K", "M", "G", "T")) if prefix
} | {prefix: 1000**power for power, prefix in enumerate(("", "k", "M", "G", "T"))}


def parse_size(text: str) -> int:
    """Bytes from `1GiB`, `500MB` or `4096`. Raises ValueError.

    >>> parse_size("1GiB"), parse_size("1.5 kB"), parse_size("12")
    (1073741824, 1500, 12)
    """
    if not (found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i|[kMGT]?)(B?)\s*", text)):
        raise ValueError(f"{text!r} is no size; write it like 1GiB or 500MB")
    return int(float(found[1]) * _FACTORS[found[2]])


def parse_rate(text: str) -> float:
    """Bytes per second from `25GB/s` or `200Gb/s` (bits). Raises ValueError.

    >>> parse_rate("25GB/s") == parse_rate("200Gb/s") == 25e9
    True
    """
    if not (found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i|[kMGT]?)([Bb])/s\s*", text)) or not float(found[1]):
        raise ValueError(f"{text!r} is no rate; write it like 25GB/s or 200Gb/s")
    return float(found[1]) * _FACTORS[found[2]] / (8 if found[3] == "b" else 1)


def size(nbytes: float) -> str:
    """For people: `0`, `512 B`, `3.4 MB`, `120 GB`.

    >>> [size(n) for n in (0, 999, 3_400_000, 119_700_000_000)]
    ['0', '999 B', '3.4 MB', '120 GB']
    """
    if not nbytes:
        return "0"
    power = 0
    while nbytes >= 999.5 and power < 4:
        nbytes, power = nbytes / 1000, power + 1
    digits = 1 if power and nbytes < 9.95 else 0
    return f"{nbytes:.{digits}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
