"""Messages to and from one peer over a connection that may be cut: each arrives once, in order.

TCP loses nothing while it is connected. What was on its way when it broke is gone, though, and a ROUTER socket drops
what it has for a peer that is away. So both ends number what they send and keep it until the other end has said that it
was there::

    send     -> number it, keep it; its header also says up to which number the other end's messages have come
    receive  -> the next number is delivered; an earlier one came before; a later one waits to be sent again
    again    -> what the other end still lacks after a whole round of heartbeats, to be sent once more

A header names two processes by the moments of their starts: who sends, and for whom. A peer that was started again
knows nothing of what its predecessor was sent, so that is dropped and the numbers begin anew.

Pure: no clock, no sockets.
"""

from __future__ import annotations

import struct
from collections import deque

HEADER = struct.Struct("<QQQQ")
# Heartbeats: delivered whenever they come, never sent again.
UNNUMBERED = 0


class Delivery:
    """One end. `start`: when this process began, in any unit that grows; other starts of it have other values.

    >>> here, there = Delivery(1), Delivery(2)
    >>> lost, kept = here.pack(b"one"), here.pack(b"two")
    >>> there.take(kept[0]), here.again(), here.again() == [lost, kept]
    (False, [], True)
    >>> there.take(lost[0]), there.take(kept[0]), there.take(kept[0])
    (True, True, False)
    """

    def __init__(self, start: int):
        self._start, self._peer_start = start, 0
        self._sent = self._received = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._lacking = 0  # number that the other end lacked at the last look

    def pack(self, data: bytes, numbered: bool = True) -> tuple[bytes, bytes]:
        """(header, data) as they go out."""
        if not numbered:
            return self._header(UNNUMBERED), data
        self._sent += 1
        self._kept.append((self._sent, data))
        return self._header(self._sent), data

    def take(self, header: bytes) -> bool:
        """Whether the message that came with this header is to be delivered. Raises struct.error on a foreign one."""
        start, meant_for, number, received = HEADER.unpack(header)
        if start < self._peer_start or meant_for not in (0, self._start):
            return False  # from, or for, a process that is no more
        if start > self._peer_start:
            if self._peer_start:
                self._sent = self._lacking = 0
                self._kept.clear()
            self._peer_start, self._received = start, 0
        if meant_for:
            while self._kept and self._kept[0][0] <= received:
                self._kept.popleft()
        if number == self._received + 1:
            self._received = number
            return True
        return number == UNNUMBERED

    def again(self) -> list[tuple[bytes, bytes]]:
        """Ask once per heartbeat. All that is kept, if its first was lacking at the last call already; else nothing."""
        first = self._kept[0][0] if self._kept else 0
        overdue, self._lacking = first == self._lacking != 0, first
        return [(self._header(number), data) for number, data in self._kept] if overdue else []

    def _header(self, number: int) -> bytes:
        return HEADER.pack(self._start, self._peer_start, number, self._received)
