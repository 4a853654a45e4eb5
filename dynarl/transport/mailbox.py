"""Shared memory between one worker and its node's agent, through which packed messages pass.

One file below the node's staging directory, readable by its owner only, mapped by both::

    header | a state byte per outgoing message | per incoming message | outgoing ring | incoming ring

The worker packs outgoing messages into its ring and unpacks incoming ones; the agent's MPI reads and writes the rings
themselves, so no byte is copied in between. Where each message lies follows from the sizes alone (`Ring`), so both
sides know it without a word. A worker on the same node reads its message where it lies in the sender's memory
(`offers`), or, where it may not, straight out of the sender's outgoing ring.

Life of a message: FREE -> FULL (packed, or arrived) -> TAKEN (sent, or unpacked). A place in a ring is written again
only when everything in it has been taken; that is the bound on memory, and what lets packing, wire and unpacking of
successive rounds overlap. On the same node: FREE -> OFFERED (in the sender's memory) -> TAKEN, or OFFERED -> REFUSED
(the receiver cannot read it there) -> FULL -> TAKEN. Waits are short sleeps with a deadline. Either side ends the
other's wait with a reason.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import struct
import threading
import time
from collections import deque
from pathlib import Path
from typing import Callable, Sequence

import numpy as np

FREE, FULL, TAKEN, OFFERED, REFUSED = range(5)

MAGIC = b"dynarlMB"
HEADER = struct.Struct("<8sQQQ")  # magic, bytes of the outgoing ring, of the incoming ring, state bytes per direction
ABORTED_AT = 64
REASON_AT, REASON_BYTES = 72, 1024
OFFER_AT, TOKEN_BYTES = 2048, 16
OFFER = struct.Struct(f"<qqq{TOKEN_BYTES}s")  # process, address and size of its table of offers, token
PAGE = 4096
# Messages start on a cache line, which also suits every dtype.
ALIGN = 64


class Aborted(RuntimeError):
    """The other side ended this transition; the text is its reason."""


class PeerDied(RuntimeError):
    """The process on the other side of a mailbox is gone."""


class Overdue(TimeoutError):
    """Nothing more happened before the deadline."""


class NoStagingMemory(OSError):
    """There is not enough memory for a file below the staging directory."""


def reserve(descriptor: int, num_bytes: int, path: str | os.PathLike[str]) -> None:
    """Give a file `num_bytes` of real memory now. Raises NoStagingMemory: a sparse file in /dev/shm would instead kill
    whoever touches it when memory has run out (SIGBUS)."""
    try:
        os.posix_fallocate(descriptor, 0, max(1, num_bytes))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM):
            raise
        free = os.statvfs(Path(path).parent)
        raise NoStagingMemory(
            error.errno,
            f"no {num_bytes} bytes for {path} ({free.f_bavail * free.f_frsize} free there): lower the transition's "
            "budget, or give the node's staging directory more memory",
        ) from None


class Ring:
    """Where messages of the given sizes lie in a ring of `capacity` bytes, in this order.

    `offset[k]`: where message k starts; `freed[k]`: how many of the first messages must have been taken before k may be
    written.

    >>> ring = Ring([64, 64, 64], 128)
    >>> ring.offset, ring.freed
    ([0, 64, 0], [0, 0, 1])
    """

    def __init__(self, sizes: Sequence[int], capacity: int):
        self.sizes, self.capacity = list(sizes), capacity
        self.offset: list[int] = []
        self.freed: list[int] = []
        live: deque[tuple[int, int, int]] = deque()  # (message, start, stop), oldest first
        at = gone = 0
        for number, size in enumerate(self.sizes):
            if size > capacity:
                raise ValueError(f"message {number} of {size} bytes does not fit a ring of {capacity} bytes")
            if at + size > capacity:
                at = 0
            stop = at + size
            if size:
                hit = max((k for k, start, end in live if start < stop and at < end), default=-1)
                while live and live[0][0] <= hit:
                    gone = live.popleft()[0] + 1
                live.append((number, at, stop))
            self.offset.append(at)
            self.freed.append(gone)
            at = -(-stop // ALIGN) * ALIGN


class Mailbox:
    """One mapped file. `outgoing` and `incoming` are state bytes per message; `out` and `into` views of the rings."""

    def __init__(self, path: Path, memory: mmap.mmap):
        self.path, self._memory = path, memory
        magic, self.out_bytes, self.in_bytes, self.num_states = HEADER.unpack_from(memory)
        if magic != MAGIC:
            raise ValueError(f"{path} is not a mailbox")
        states, rings = PAGE, _rings_at(self.num_states)
        if len(memory) < rings + self.out_bytes + self.in_bytes:
            raise ValueError(f"{path} is cut short: {len(memory)} bytes")
        self._bytes = memoryview(memory)
        flat = np.frombuffer(memory, np.uint8)
        self.outgoing = flat[states : states + self.num_states]
        self.incoming = flat[states + self.num_states : states + 2 * self.num_states]
        self._out_at, self._in_at = rings, rings + self.out_bytes
        self._pidfd: int | None = None
        self._parent: int | None = None

    @classmethod
    def create(cls, path: Path, out_bytes: int, in_bytes: int, num_states: int) -> Mailbox:
        """Make the file, for its owner only, with all its memory. Raises NoStagingMemory; a former one is replaced."""
        path.unlink(missing_ok=True)
        out_bytes, in_bytes = (-(-size // PAGE) * PAGE for size in (out_bytes, in_bytes))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            size = _rings_at(num_states) + out_bytes + in_bytes
            reserve(descriptor, size, path)
            os.pwrite(descriptor, HEADER.pack(MAGIC, out_bytes, in_bytes, num_states), 0)
            return cls(path, mmap.mmap(descriptor, size))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Mailbox:
        descriptor = os.open(path, os.O_RDWR)
        try:
            return cls(Path(path), mmap.mmap(descriptor, 0))
        finally:
            os.close(descriptor)

    def out(self, offset: int, size: int) -> memoryview:
        return self._bytes[self._out_at + offset : self._out_at + offset + size]

    def into(self, offset: int, size: int) -> memoryview:
        return self._bytes[self._in_at + offset : self._in_at + offset + size]

    def fits(self, out_bytes: int, in_bytes: int, num_states: int) -> bool:
        return out_bytes <= self.out_bytes and in_bytes <= self.in_bytes and num_states <= self.num_states

    def reset(self) -> None:
        """All messages FREE again, and no reason to stop. Only while nobody works on it."""
        self.outgoing[:] = FREE
        self.incoming[:] = FREE
        self._memory[ABORTED_AT : ABORTED_AT + 1] = b"\0"
        OFFER.pack_into(self._memory, OFFER_AT, 0, 0, 0, bytes(TOKEN_BYTES))

    def offer(self, pid: int, address: int, num_bytes: int, token: bytes) -> None:
        """Say where the table of offers lies, before the first message is OFFERED."""
        OFFER.pack_into(self._memory, OFFER_AT, pid, address, num_bytes, token)

    def offered(self) -> tuple[int, int, int, bytes]:
        """What the owner's `offer` said; zeros if it did not."""
        return OFFER.unpack_from(self._memory, OFFER_AT)

    def abort(self, reason: str) -> None:
        """End whatever wait the other side is in, now or later."""
        text = reason.encode()[: REASON_BYTES - 8]
        struct.pack_into("<I", self._memory, REASON_AT, len(text))
        self._memory[REASON_AT + 8 : REASON_AT + 8 + len(text)] = text
        fence()
        self._memory[ABORTED_AT : ABORTED_AT + 1] = b"\1"

    def watch(self, pid: int) -> None:
        """`check` raises PeerDied when process `pid` ends (the agent watches its worker)."""
        self.unwatch()
        self._pidfd = os.pidfd_open(pid)

    def watch_parent(self) -> None:
        """`check` raises PeerDied when this process loses its parent (the worker watches its agent)."""
        self._parent = os.getppid()

    def unwatch(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._pidfd = None

    def check(self) -> None:
        """Raises Aborted with the other side's reason, or PeerDied."""
        if self._memory[ABORTED_AT]:
            (length,) = struct.unpack_from("<I", self._memory, REASON_AT)
            raise Aborted(bytes(self._memory[REASON_AT + 8 : REASON_AT + 8 + length]).decode(errors="replace"))
        if self._pidfd is not None and select.select([self._pidfd], [], [], 0)[0]:
            raise PeerDied(f"the worker at {self.path.name} ended in the middle of a transition")
        if self._parent is not None and os.getppid() != self._parent:
            raise PeerDied("the agent ended in the middle of a transition")

    def remove(self) -> None:
        """Take the name away. The memory goes when nobody has it mapped any more."""
        self.unwatch()
        self.path.unlink(missing_ok=True)


def fence() -> None:
    """Memory accesses before this call come before those after it, as other processes see them.

    Two rounds of a lock: an access may move past one release, but not past the acquire behind it (x86 keeps the order
    of stores and of loads anyway, Arm does not).
    """
    for _ in range(2):
        with _lock:
            pass


_lock = threading.Lock()


def mark(states: np.ndarray, number: int, state: int) -> None:
    """Set the state of a message, after all that was written or read before."""
    fence()
    states[number] = state


def is_now(states: np.ndarray, number: int, state: int) -> bool:
    """Whether the message has come to this state; if so, what was written before can be read."""
    if states[number] != state:
        return False
    fence()
    return True


class Patience:
    """Short sleeps while nothing happens, up to a deadline.

    checks: run now and then between sleeps; they end the wait by raising.
    """

    SHORTEST_S, LONGEST_S = 20e-6, 1e-3
    CHECK_S = 5e-3

    def __init__(self, timeout_s: float, what: str, checks: Sequence[Callable[[], None]] = ()):
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s, self._what, self._checks = timeout_s, what, checks
        self._pause_s = self.SHORTEST_S
        self._checked = 0.0
        self.waited_s = 0.0

    def moved(self) -> None:
        """Something happened: the next sleep is a short one again."""
        self._pause_s = self.SHORTEST_S

    def next_pause(self) -> float:
        """Seconds to sleep now. Raises Overdue, or what a check raises."""
        now = time.monotonic()
        if now - self._checked > self.CHECK_S:
            self._checked = now
            for check in self._checks:
                check()
        if now > self._deadline:
            raise Overdue(f"{self._what} did not complete within {self._timeout_s:g} s")
        pause = self._pause_s
        self._pause_s = min(self.LONGEST_S, pause * 1.5)
        self.waited_s += pause
        return pause

    def sleep(self) -> None:
        time.sleep(self.next_pause())


def _rings_at(num_states: int) -> int:
    return PAGE + -(-2 * num_states // PAGE) * PAGE
