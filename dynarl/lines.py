"""Reading a file of lines that another process is still appending to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


class LineReader:
    """The complete lines of a growing file. Iterate again to get those that came since.

    A last line without its newline is left for the next time, since its writer may be in the middle of it. A file that
    does not exist yet has no lines; one that became shorter is read from its start again.
    """

    def __init__(self, path: Path | str, offset: int = 0):
        self.path = Path(path)
        self.offset = offset

    def __iter__(self) -> Iterator[bytes]:
        # Opened anew each time: on NFS only an open is promised to show what other hosts have written.
        try:
            file = open(self.path, "rb")
        except FileNotFoundError:
            return
        with file:
            if file.seek(0, 2) < self.offset:
                self.offset = 0
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                yield line
