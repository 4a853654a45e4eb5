"""TensorBoard event files through the `tensorboard` package alone: the controller stays free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class Board:
    """One event file. `resume_step`: TensorBoard forgets what earlier files hold from that step on."""

    def __init__(self, directory: Path, resume_step: int | None = None):
        self._writer = EventFileWriter(str(directory), flush_secs=10)
        if resume_step is not None:
            self._writer.add_event(Event(step=resume_step, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, unix_s: float, data: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in data.items()]
        self._writer.add_event(Event(wall_time=unix_s, step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()
