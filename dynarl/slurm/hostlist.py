"""Slurm host lists: "n[1-3,7]" to names and back. Slurm's own tool is often missing inside containers.

>>> expand("n[098-101],gpu[1-2]-ib")
['n098', 'n099', 'n100', 'n101', 'gpu1-ib', 'gpu2-ib']
>>> fold(["n3", "n1", "n2", "login"])
'n[3,1-2],login'
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from dynarl.errors import SlurmError

# Slurm's own limit from 24.05 on; a mistyped range must not fill the memory.
MAX_HOSTS = 262_144

_NUMBERED = re.compile(r"^(.*?)([0-9]+)([^0-9]*)$", re.DOTALL)


class HostlistError(SlurmError):
    """A host list that cannot be read. The message quotes the faulty piece."""

    def __init__(self, what: str, piece: str, text: str):
        self.piece = piece
        super().__init__(f"host list {text!r}: {what}: {piece!r}. Expected names such as n1,n[2-4,07-09]-ib")


def expand(text: str) -> list[str]:
    """Names in the order written, duplicates kept, leading zeros kept. Several brackets give their product, leftmost
    slowest.

    Raises HostlistError.
    """
    hosts: list[str] = []
    for piece in _split(text):
        for host in _expand_piece(piece, text):
            hosts.append(host)
            if len(hosts) > MAX_HOSTS:
                raise HostlistError(f"more than {MAX_HOSTS} hosts", piece, text)
    return hosts


def _split(text: str) -> Iterator[str]:
    """Cut at commas and blanks that are outside brackets."""
    start = depth = 0
    for position, char in enumerate(text):
        if char == "[":
            depth += 1
            if depth > 1:
                raise HostlistError("bracket inside a bracket", text[start : position + 1], text)
        elif char == "]":
            depth -= 1
            if depth < 0:
                raise HostlistError("bracket closed but not opened", text[start : position + 1], text)
        elif depth == 0 and (char == "," or char.isspace()):
            if position > start:
                yield text[start:position]
            start = position + 1
    if depth:
        raise HostlistError("bracket not closed", text[start:], text)
    if start < len(text):
        yield text[start:]


def _expand_piece(piece: str, text: str) -> Iterator[str]:
    parts = re.split(r"\[([^\]]*)\]", piece)  # literal, range list, literal, range list, ... literal
    choices: list[Iterable[str]] = [_numbers(part, text) if index % 2 else [part] for index, part in enumerate(parts)]
    for combination in itertools.product(*choices):
        yield "".join(combination)


def _numbers(ranges: str, text: str) -> list[str]:
    """The inside of one bracket: "2,098-101" to ["2", "098", "099", "100", "101"]."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part, re.ASCII)
        if match is None:
            raise HostlistError("not a number or a range", part, text)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise HostlistError("range runs backwards", part, text)
        if int(last) - int(first) >= MAX_HOSTS:
            raise HostlistError(f"more than {MAX_HOSTS} hosts", part, text)
        # The width is that of the first bound: 098-101 has three digits, 9-10 has none to keep.
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def fold(hosts: Iterable[str]) -> str:
    """The list in brackets. Order and duplicates are kept, so that expand(fold(hosts)) == hosts.

    Only runs of neighbours are joined and the bracket always ends the name, since Slurm before 23.11 refuses a suffix
    after it.
    """
    runs: list[list[str]] = []
    for host in hosts:
        if not host or re.search(r"[\[\],\s]", host):
            raise HostlistError("not the name of one host", host, host)
        if runs and _follows(runs[-1][-1], host):
            runs[-1].append(host)
        else:
            runs.append([host])
    pieces: list[tuple[str, list[str]]] = []  # prefix and the ranges that share one bracket
    for run in runs:
        match = _NUMBERED.match(run[0])
        if match is None or match[3]:
            pieces.extend((host, []) for host in run)
            continue
        last = _NUMBERED.match(run[-1])
        assert last is not None
        span = match[2] if len(run) == 1 else f"{match[2]}-{last[2]}"
        if pieces and pieces[-1][0] == match[1] and pieces[-1][1]:
            pieces[-1][1].append(span)
        else:
            pieces.append((match[1], [span]))
    return ",".join(_bracket(prefix, spans) for prefix, spans in pieces)


def sort_key(host: str) -> list[tuple[str, int]]:
    """Orders names as Slurm sorts a host list: runs of digits count as numbers.

    >>> sorted(["n10", "n9", "rack10-n1", "rack2-n3", "login"], key=sort_key)
    ['login', 'n9', 'n10', 'rack2-n3', 'rack10-n1']
    """
    return [("0", int(part)) if part[0] in "0123456789" else (part, 0) for part in re.findall(r"[0-9]+|[^0-9]+", host)]


def _bracket(prefix: str, spans: list[str]) -> str:
    if not spans:
        return prefix
    if len(spans) == 1 and "-" not in spans[0]:
        return prefix + spans[0]
    return f"{prefix}[{','.join(spans)}]"


def _follows(previous: str, host: str) -> bool:
    """True for n09 and n10, or n9 and n10; false for n9 and n010, or n1-ib and n2-ib."""
    before, after = _NUMBERED.match(previous), _NUMBERED.match(host)
    if before is None or after is None or before[3] or after[3] or before[1] != after[1]:
        return False
    return after[2] == str(int(before[2]) + 1).zfill(len(before[2]))
