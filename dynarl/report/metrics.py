"""Scalars of a run by step: JSON lines always, TensorBoard event files where its package is installed. Beside them the
trace of its iterations.

A line of metrics.jsonl is `{"step":3,"t":1700000000.5,"data":{"critic/rewards/mean":0.4,...}}`; the names are verl's
where verl has one. A run that was resumed logs some steps again: what comes later in the file counts.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dynarl import rundir
from dynarl.lines import LineReader

log = logging.getLogger(__name__)

# Of `trace.jsonl`. When it is full it becomes `trace.1.jsonl`, in place of the one before: so the newest iterations stay,
# between one and two files full of them, however long the job runs.
TRACE_BYTES = 64 << 20


def _end_line(fd: int) -> None:
    """A start that was killed in the middle of a line must not spoil the next one."""
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        os.write(fd, b"\n")


def _write(fd: int, line: bytes, path: Path) -> None:
    """One write, so that a reader on the same host sees all of it or nothing. Raises OSError where it falls short."""
    if (written := os.write(fd, line)) != len(line):
        raise OSError(f"{path}: only {written} of {len(line)} bytes were written (file system full?)")


class MetricsWriter:
    """Appends to the metrics of a run. `resume_step`: the step that this start of the controller logs first."""

    def __init__(self, run: Path, resume_step: int | None = None):
        self._path = rundir.metrics(run)
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _end_line(self._fd)
        self._board = _open_board(rundir.tensorboard(run), resume_step)
        self._trace, self._older_trace = rundir.trace(run), rundir.older_trace(run)

    def trace(self, line: bytes) -> None:
        """Add a line to the run's trace (`controller.trace`), which is far larger than the scalars."""
        fd = os.open(self._trace, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _end_line(fd)
            _write(fd, line, self._trace)
            if os.fstat(fd).st_size >= TRACE_BYTES:
                os.replace(self._trace, self._older_trace)
        finally:
            os.close(fd)

    def log(self, step: int, data: Mapping[str, float]) -> None:
        """Write scalars of one step. Values that are not finite become null in the JSON."""
        now = time.time()
        line = msgspec.json.encode({"step": step, "t": now, "data": {name: float(v) for name, v in data.items()}})
        _write(self._fd, line + b"\n", self._path)
        if self._board:
            self._board.log(step, now, data)

    def close(self) -> None:
        os.close(self._fd)
        if self._board:
            self._board.close()


def _open_board(directory: Path, resume_step: int | None) -> Any:
    try:
        from dynarl.report.tensorboard import Board
    except ImportError as error:
        log.info(
            "no TensorBoard files (%s); metrics.jsonl has everything. pip install 'dynarl[report]' for both", error
        )
        return None
    return Board(directory, resume_step)


class MetricsReader:
    """The metrics of a run so far: `steps[n]` is everything logged for step n. `poll` takes in what came since."""

    def __init__(self, run: Path):
        self._lines = LineReader(rundir.metrics(run))
        self.steps: dict[int, dict[str, float | None]] = {}

    def poll(self) -> None:
        for line in self._lines:
            try:
                entry = msgspec.json.decode(line)
            except msgspec.DecodeError:  # cut short by a crash
                continue
            # Steps come in order, so those taken again are the last ones.
            while self.steps and next(reversed(self.steps)) > entry["step"]:
                self.steps.popitem()
            self.steps.setdefault(entry["step"], {}).update(entry["data"])

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every step that has a value of this name."""
        return [(step, data[name]) for step, data in self.steps.items() if data.get(name) is not None]

    def last(self) -> dict[str, float | None]:
        """The newest value of each name."""
        newest: dict[str, float | None] = {}
        for data in self.steps.values():
            newest.update(data)
        return newest
