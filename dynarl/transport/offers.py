"""Messages that are not packed: their bytes are read where they lie, in the memory of the sender.

The sender says once where each message lies. That table is in its own memory too, and its mailbox says where. It begins
with a random token that the mailbox repeats: a receiver that can read the token has reached the right process, and may
read it. (In another container the same number may be another process's.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from dynarl.transport.mailbox import TOKEN_BYTES, Mailbox
from dynarl.transport.memory import let_read, pieces, read

TOKEN_WORDS = TOKEN_BYTES // 8


class Offers:
    """The sender's side: {message: its spans}. Must be kept as long as somebody may read."""

    def __init__(self, mailbox: Mailbox, spans: Mapping[int, Sequence[Sequence[int]]]):
        token = os.urandom(TOKEN_BYTES)
        numbers = sorted(spans)
        last = numbers[-1] + 1
        counts = np.zeros(last, np.int64)
        counts[numbers] = [len(spans[number]) for number in numbers]
        rows = np.array([span for number in numbers for span in spans[number]], np.int64)
        firsts = np.concatenate([[0], np.cumsum(counts)])
        self._table = np.concatenate([np.frombuffer(token, np.int64), [last], firsts, rows.reshape(-1)])
        let_read(os.getppid())
        mailbox.offer(os.getpid(), self._table.ctypes.data, self._table.nbytes, token)


class Offered:
    """The receiver's side. Raises OSError where the sender's memory may not be read."""

    def __init__(self, mailbox: Mailbox):
        self._pid, address, num_bytes, token = mailbox.offered()
        table = np.empty(num_bytes // 8, np.int64)
        if len(table) <= TOKEN_WORDS:
            raise PermissionError(f"{mailbox.path.name} offers nothing")
        read(self._pid, np.array([[address, TOKEN_BYTES]]), np.array([[table.ctypes.data, TOKEN_BYTES]]))
        if table[:TOKEN_WORDS].tobytes() != token:
            raise PermissionError(f"process {self._pid} is not the one that wrote {mailbox.path.name}")
        read(self._pid, np.array([[address, num_bytes]]), np.array([[table.ctypes.data, num_bytes]]))
        last = int(table[TOKEN_WORDS])
        rows_at = TOKEN_WORDS + 1 + last + 1
        self._firsts = table[TOKEN_WORDS + 1 : rows_at]
        self._spans = table[rows_at:].reshape(-1, 4)

    def read(self, number: int, mine: np.ndarray) -> None:
        """Message `number` of the sender into pieces of our memory. Raises OSError, ValueError."""
        spans = self._spans[self._firsts[number] : self._firsts[number + 1]]
        read(self._pid, pieces(spans.tolist()), mine)
