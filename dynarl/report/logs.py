"""The log files of a run and their lines in order of time."""

from __future__ import annotations

import datetime
import heapq
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dynarl import rundir
from dynarl.hypergraph.journal import decode
from dynarl.lines import LineReader

# What logging's %(asctime)s writes.
STAMP = re.compile(rb"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ")
_AGENT = re.compile(r"(?P<node>.+)-(?P<role>agent)")
_WORKER = re.compile(r"(?P<node>.+)-(?P<role>rollout|inference|training|environment)-(?P<device>\d+)\.(?P<start>\d+)")


@dataclass(frozen=True)
class Source:
    """One log file. role: batch, controller, agent or that of a worker; node None for batch and controller.

    name: what its lines are marked with, e.g. `n2 rollout/0`, from the second start of a worker on `n2 rollout/0.2`.
    """

    path: Path
    name: str
    role: str
    node: str | None = None


def source(path: Path) -> Source:
    """What a file of a log directory is, from its name."""
    if match := _WORKER.fullmatch(path.stem):
        again = "" if match["start"] == "1" else f".{match['start']}"
        return Source(path, f"{match['node']} {match['role']}/{match['device']}{again}", match["role"], match["node"])
    if match := _AGENT.fullmatch(path.stem):
        return Source(path, f"{match['node']} agent", "agent", match["node"])
    return Source(path, path.stem, path.stem)


def sources(run: Path, attempt: int | None = None, role: str | None = None, node: str | None = None) -> list[Source]:
    """Log files that fit, of one start of the controller and of the batch script of its job (default: the newest of
    both)."""
    attempts = rundir.attempts(run)
    job = _job_of(run, attempt) if attempt else next(reversed(rundir.job_ids(run)), None)
    attempt = attempt or (attempts[-1] if attempts else None)
    found = [source(path) for path in sorted(rundir.logs(run, attempt).glob("*.log"))] if attempt else []
    if job and rundir.batch_output(run, job).exists():
        found.append(Source(rundir.batch_output(run, job), "batch", "batch"))
    return [each for each in found if role in (None, each.role) and node in (None, each.node)]


def _job_of(run: Path, attempt: int) -> str | None:
    """The Slurm job of a start of the controller, None where the journal does not tell."""
    found = None
    for line in LineReader(rundir.journal(run)):
        if b'"run_started"' in line and (record := decode(line)) and record.get("attempt") == attempt:
            found = record.get("job_id")
    return found


class Merged:
    """Lines of several files in order of their time stamps; iterate again for what came since.

    A line without a stamp (a traceback, a library's output) belongs to the stamped one before it in its file; in a file
    without any, to the time when the file was last written.
    """

    def __init__(self) -> None:
        self._readers: dict[Source, LineReader] = {}

    def add(self, found: Iterable[Source]) -> None:
        """Take in these files too; those known already are left as they are."""
        for each in found:
            self._readers.setdefault(each, LineReader(each.path))

    def __iter__(self) -> Iterator[tuple[Source, str]]:
        streams = [self._stamped(index, each, reader) for index, (each, reader) in enumerate(self._readers.items())]
        for _, _, each, line in heapq.merge(*streams, key=lambda entry: entry[:2]):
            yield each, line

    @staticmethod
    def _stamped(index: int, each: Source, reader: LineReader) -> Iterator[tuple[bytes, int, Source, str]]:
        stamp, waiting = None, []
        for line in reader:
            text = line.decode(errors="replace").rstrip("\r\n")
            if match := STAMP.match(line):
                stamp = match[1]
                yield from ((stamp, index, each, earlier) for earlier in waiting)
                waiting.clear()
            if stamp is None:
                waiting.append(text)
            elif not (match and each.role == "batch"):  # the controller writes its lines there and to a file of its own
                yield stamp, index, each, text
        if waiting:
            written = datetime.datetime.fromtimestamp(each.path.stat().st_mtime)
            stamp = written.strftime("%Y-%m-%d %H:%M:%S,%f")[:-3].encode()
            yield from ((stamp, index, each, text) for text in waiting)


def last(lines: Iterable[tuple[Source, str]], count: int | None) -> list[tuple[Source, str]]:
    """The last `count` lines, all if None."""
    return list(deque(lines, maxlen=count))
