"""Hand-outs on their way into the workers, and how a change of roles waits for them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import AsyncIterator

from dynarl.wire import CallError


class Gate:
    """Open: hand-outs pass, several at a time. Closed: new ones are refused; `close` waits until those inside are
    through.

    Without it a request could reach a worker after that worker was told to give everything back, and stay there for
    ever.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._opened = asyncio.Event()
        self._opened.set()
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def passing(self, what: str) -> AsyncIterator[None]:
        """Around one hand-out. Raises CallError while the gate is closed; the controller then offers the work again."""
        if not self._opened.is_set():
            raise CallError(f"{what} came while this node changes its role")
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    async def close(self, limit_s: float | None = None) -> None:
        """Raises TimeoutError when some are inside after `limit_s`; it stays closed."""
        self._opened.clear()
        async with asyncio.timeout(limit_s):
            await self._empty.wait()

    def open(self) -> None:
        self._opened.set()

    async def opened(self) -> None:
        """Wait until it is open."""
        await self._opened.wait()
