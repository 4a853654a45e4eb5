"""Roles of one node that take turns at its devices by themselves, without a change of roles of the whole job.

A hand-out for any role may come at any time. It waits until its role has the devices; the one that had them is put to
sleep first, when it is done. Between `begin` and `end` this node may be in another role than the controller thinks, for
as long as the event `switched` is on its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import AsyncIterator

from dynarl.dataflow.device_lock import DeviceLock, Turn
from dynarl.wire import CallError


class Sharing:
    """switch: puts the active role to sleep and wakes this one, unless it is the active one; has_work: whether a role
    still has something that was handed to it here."""

    def __init__(self, switch: Callable[[str], Awaitable[None]], has_work: Callable[[str], bool]):
        self._switch, self._has_work = switch, has_work
        self._lock: DeviceLock | None = None
        self._begun: dict[Turn, asyncio.Future[None]] = {}  # turns that wait
        self._kept: Turn | None = None  # that of the work that was handed over and is not done
        self._switching = asyncio.Lock()

    def begin(self, order: Sequence[str]) -> None:
        """From here on roles take turns. order: from the first to work on a sample to the last."""
        if self._lock is None:
            self._lock = DeviceLock(order)

    async def end(self) -> None:
        """Roles are for the controller to change again. Hand-outs that wait are refused; those that were not go on."""
        self._lock = self._kept = None
        for begun in self._begun.values():
            if not begun.done():
                begun.set_exception(CallError("roles do not take turns at the devices of this node any more"))
        async with self._switching:
            pass

    @asynccontextmanager
    async def turn(self, role: str, check: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
        """Around a hand-out to `role`, which has the devices then, and keeps them until it has no work left. Raises
        CallError where it cannot get them, and what `check` raises when it is its turn."""
        if (lock := self._lock) is None:
            yield
            return
        turn = lock.enter(role)
        try:
            await self._wait_for(turn)
            async with self._switching:
                if self._lock is lock:
                    check()
                    await self._switch(role)
            if self._lock is not lock:
                raise CallError("roles do not take turns at the devices of this node any more")
            yield
        finally:
            if self._lock is lock:
                if turn.holds and self._kept is None and self._has_work(role):
                    self._kept = turn
                else:
                    self._leave(turn)
                self.look()  # a hand-out that failed may have been all that the role still had

    async def _wait_for(self, turn: Turn) -> None:
        if turn.holds:
            return
        begun = self._begun[turn] = asyncio.get_running_loop().create_future()
        try:
            await begun
        finally:
            del self._begun[turn]

    def _leave(self, turn: Turn) -> None:
        for following in self._lock.leave(turn):
            if not self._begun[following].done():
                self._begun[following].set_result(None)

    def look(self) -> None:
        """Work has ended: if it was the last of its role, the devices are free for others."""
        if self._kept is not None and not self._has_work(self._kept.component):
            kept, self._kept = self._kept, None
            self._leave(kept)
