r"""The journal of a run: an append-only file of JSON lines from which everything else about the run follows.

A record is one line, written by one `write` to a file opened for appending::

    {"seq":7,"t":1700000000.25,"type":"agent_up","owner":"1.9f3c01ab","node":"n2","rank":1,"crc":3735928559}\n

- **seq** counts records from 1; **t** is unix time in seconds; **crc** is the CRC-32 of the line without it.
- A line that a crash cut short has no valid crc. Readers skip it, and the next writer ends it with a newline first.
- **owner** is `<term>.<nonce>`. Every writer that opens the journal takes the next term. File locks are not to be
  trusted on shared file systems, so two writers are not kept apart by one: readers drop the records of a writer whose
  term has been passed, and that writer stops (`JournalTaken`) once it sees the other's records.

Floats that are not finite become null.
"""

from __future__ import annotations

import os
import re
import secrets
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from dynarl.errors import DynarlError
from dynarl.hypergraph.fold import apply
from dynarl.hypergraph.graph import Graph
from dynarl.hypergraph.samples import SampleCount
from dynarl.lines import LineReader

Record = dict[str, Any]

RESERVED = frozenset({"seq", "t", "type", "owner", "crc"})
_OWNER = re.compile(r"\d+\.\w*")
_CRC = re.compile(rb',"crc":(\d{1,10})}\n$')


class JournalTaken(DynarlError):
    """Another writer has taken the journal over: whoever gets this must stop acting for the run."""


def encode(record: Record) -> bytes:
    """One line, newline included. `record` is without crc."""
    body = msgspec.json.encode(record)
    return b'%s,"crc":%d}\n' % (body[:-1], zlib.crc32(body))


def decode(line: bytes) -> Record | None:
    """The record of a line, None if it is torn or corrupt."""
    match = _CRC.search(line, max(0, len(line) - 24))
    if match is None:
        return None
    body = line[: match.start()] + b"}"
    if zlib.crc32(body) != int(match[1]):
        return None
    try:
        record = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    return record if isinstance(record, dict) and _is_signed(record) else None


def _is_signed(record: Record) -> bool:
    """Whether it says which record it is, when, of what kind and whose."""
    kinds = {"seq": int, "t": int | float, "type": str, "owner": str}
    return (
        all(isinstance(record.get(name), kind) for name, kind in kinds.items())
        and _OWNER.fullmatch(record["owner"]) is not None
    )


def _term(owner: str) -> int:
    return int(owner.partition(".")[0])


class Reader:
    """Records of a journal in order. Iterate again to get those that came since.

    torn: lines skipped because they were cut short or damaged; stale: records skipped because their writer had been
    replaced by then.
    """

    def __init__(self, path: Path | str):
        self._lines = LineReader(path)
        self.owner = "0."
        self.seq = 0
        self.torn = 0
        self.stale = 0

    def __iter__(self) -> Iterator[Record]:
        for line in self._lines:
            record = decode(line)
            if record is None:
                self.torn += line != b"\n"
            elif self._accept(record):
                yield record

    def _accept(self, record: Record) -> bool:
        owner = record["owner"]
        if owner != self.owner:
            if _term(owner) <= _term(self.owner):
                self.stale += 1
                return False
            self.owner = owner
        self.seq = record["seq"]
        return True


def read(path: Path | str) -> Reader:
    """All records up to now; the returned iterable counts what it skipped."""
    return Reader(path)


def follow(path: Path | str, poll_s: float = 0.2) -> Iterator[Record]:
    """All records, then each new one as it comes, without end; the file may not exist yet."""
    reader = Reader(path)
    while True:
        yield from reader
        time.sleep(poll_s)


class Journal:
    """The one writer of a journal, for use from one thread. Raises JournalTaken if somebody else has become it.

    graph: of all records, also those that were there before; it counts the samples of the running iteration only, and has
    only the newest of the changes of roles.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.graph = Graph(newest_only=True, samples=SampleCount(newest=1))
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _sync_directory(self.path.parent)
        self._reader = Reader(self.path)
        self._look()
        self._seq = self._reader.seq
        self.owner = f"{_term(self._reader.owner) + 1}.{secrets.token_hex(4)}"
        self.append("journal_opened", durable=True, host=os.uname().nodename, pid=os.getpid())
        self._look()
        self._check_owner()

    def append(self, type: str, *, durable: bool = False, **fields: Any) -> Record:
        """Write one record and return it. `durable` waits until it is on the disk.

        Raises JournalTaken, OSError (readers skip what was written of the record), ValueError for a field with a
        reserved name.
        """
        _check_fields(type, fields)
        if os.fstat(self._fd).st_size != self._size:
            self._look()
            self._check_owner()
        record = {"seq": self._seq + 1, "t": time.time(), "type": type, "owner": self.owner, **fields}
        self._write(encode(record))
        self._seq += 1
        apply(self.graph, record)
        if durable:
            os.fsync(self._fd)
        return record

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, line: bytes) -> None:
        """One write, so that a reader on the same host sees all of it or nothing."""
        data = b"\n" + line if self._tail_is_torn else line
        written = os.write(self._fd, data)
        if written != len(data):
            self._size = -1  # look at the tail again before the next record
            raise OSError(f"{self.path}: only {written} of {len(data)} bytes were written (file system full?)")
        self._size += written
        self._tail_is_torn = False

    def _look(self) -> None:
        """Take in what the file holds beyond what this writer knows of."""
        self._size = os.fstat(self._fd).st_size
        self._tail_is_torn = self._size > 0 and os.pread(self._fd, 1, self._size - 1) != b"\n"
        for record in self._reader:
            if record["seq"] > self.graph.version:
                apply(self.graph, record)

    def _check_owner(self) -> None:
        other = self._reader.owner
        if other != self.owner and _term(other) >= _term(self.owner):
            raise JournalTaken(f"{self.path}: writer {other} has replaced this one, {self.owner}")


def add_last_word(path: Path | str, type: str, **fields: Any) -> None:
    """Write one record, durably, for a writer that is gone: as that one's own, so that it counts only if nobody has taken
    the journal over since. Nothing where one of that type is the last already.
    """
    _check_fields(type, fields)
    reader, last = Reader(path), ""
    for record in reader:
        last = record["type"]
    if last == type:
        return
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        tail_is_torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        record = {"seq": reader.seq + 1, "t": time.time(), "type": type, "owner": reader.owner, **fields}
        os.write(fd, (b"\n" if tail_is_torn else b"") + encode(record))
        os.fsync(fd)
    finally:
        os.close(fd)


class SimulatedJournal:
    """The records of a run on simulated time, for who else would have a `Journal`. keep: gets each line; the graph is
    all that stays here. clock: seconds.
    """

    owner = "1.simulated"

    def __init__(self, clock: Callable[[], float], keep: Callable[[bytes], None]):
        self.graph = Graph(samples=SampleCount(newest=1))
        self._clock, self._keep = clock, keep

    def append(self, type: str, *, durable: bool = False, **fields: Any) -> Record:
        """As a journal does. Raises ValueError for a field with a reserved name."""
        _check_fields(type, fields)
        seq = self.graph.version + 1
        record = {"seq": seq, "t": self._clock(), "type": type, "owner": self.owner, **fields}
        self._keep(encode(record))
        apply(self.graph, record)
        return record


def _check_fields(type: str, fields: Record) -> None:
    if RESERVED & fields.keys():
        raise ValueError(f"{type}: the journal itself sets {', '.join(sorted(RESERVED & fields.keys()))}")


def _sync_directory(path: Path) -> None:
    """Make the entry of a new file in this directory survive a crash of the host."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
