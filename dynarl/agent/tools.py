"""Tool calls of one node: each is made once, whatever becomes of the answer that asked for it.

    asked for -> waits for a seat -> in the environment worker -> recorded in the store -> used, as often as need be

A call belongs to (sample, number). While it is in flight its answer may be given back and go on at another node: that
node asks this one (`elsewhere`), which has the record or waits for it. A call whose process hangs or dies is not made
again, for nobody knows how far it came: the model is told that there is no answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Awaitable, Callable

from dynarl.agent.verifier import Seat
from dynarl.dataflow.store import Store
from dynarl.wire import CallError, ToolCall

log = logging.getLogger(__name__)


class ToolSeat(Seat):
    """An environment worker that runs tools, one call at a time."""

    async def answer(self, turn: bytes, session: bytes) -> dict[str, bytes] | None:
        """{output, session}, or None when there is no answer in time or the process dies of it."""
        async with self._turn:
            try:
                await self._be_ready()
                return await self._call("call_tool", timeout_s=self._timeout_s, turn=turn, session=session)
            except TimeoutError:
                log.warning("a tool was ended: no answer within %g s", self._timeout_s)
                await self._end()
            except CallError as error:
                log.warning("a tool call failed: %s", error)
            return None


class Tools:
    """call_end: token id at which the model hands over; no_answer: token ids of what it then gets at worst."""

    def __init__(self, seats: list[ToolSeat], store: Store, call_end: int, no_answer: bytes):
        self.seats, self.call_end = seats, call_end
        self._store, self._no_answer = store, no_answer
        self._free: asyncio.Queue[ToolSeat] = asyncio.Queue()
        for seat in seats:
            self._free.put_nowait(seat)
        self._in_flight: dict[tuple[str, int, bytes], asyncio.Task[ToolCall]] = {}

    async def result(self, sample: str, number: int, turn: bytes, session: bytes,
                     elsewhere: Callable[[], Awaitable[Any]] | None = None) -> ToolCall:
        """The call number `number` of a sample, recorded here. Made now, unless it was made or is in flight.

        elsewhere: asks the node where the sample was before; it answers with the call, or None if it knows of none.
        """
        task = self._find(sample, number, turn)
        if isinstance(task, ToolCall):
            return task
        if task is None:
            key = (sample, number, turn)
            task = self._in_flight[key] = asyncio.ensure_future(self._make(sample, number, turn, session, elsewhere))
            task.add_done_callback(lambda _: self._in_flight.pop(key, None))
        return await asyncio.shield(task)  # whoever waits may be cancelled; the call goes on

    async def known(self, sample: str, number: int, turn: bytes) -> ToolCall | None:
        """The call if it was made here or is in flight here, in that case once it is done."""
        found = self._find(sample, number, turn)
        return await asyncio.shield(found) if isinstance(found, asyncio.Task) else found

    def _find(self, sample: str, number: int, turn: bytes) -> ToolCall | asyncio.Task[ToolCall] | None:
        return self._store.call(sample, number, turn) or self._in_flight.get((sample, number, turn))

    async def _make(self, sample: str, number: int, turn: bytes, session: bytes,
                    elsewhere: Callable[[], Awaitable[Any]] | None) -> ToolCall:
        began = time.monotonic()
        call: ToolCall | None = None
        answer: dict[str, bytes] | None = None
        try:
            call = await elsewhere() if elsewhere is not None else None
            if call is None:
                answer = await self._run(turn, session)
        except (CallError, TimeoutError) as error:
            log.warning("what came of tool call %d of %s is lost: %s", number, sample, error)
        if call is None:
            answer = answer or {"output": self._no_answer, "session": session}
            call = ToolCall(sample, number, turn, answer["output"], answer["session"], time.monotonic() - began)
        self._store.record(call)
        return call

    async def _run(self, turn: bytes, session: bytes) -> dict[str, bytes] | None:
        seat = await self._free.get()
        try:
            return await seat.answer(turn, session)
        finally:
            self._free.put_nowait(seat)
