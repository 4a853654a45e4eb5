"""What an iteration has under way in the background, and the bell that says when to look again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from dynarl.controller.leases import ReplicaTorn
from dynarl.wire import CallError

log = logging.getLogger(__name__)

# Before work that could not be handed out is offered again.
RETRY_PAUSE_S = 0.2


class Bell:
    """Whatever happens rings it, and so does the time at which to look though nothing has happened."""

    def __init__(self) -> None:
        self._rung: asyncio.Future[None] | None = None  # of whoever waits
        self._alarm: asyncio.TimerHandle | None = None

    def ring(self) -> None:
        if self._rung is not None and not self._rung.done():
            self._rung.set_result(None)

    async def wait(self, pause_s: float) -> None:
        """Until it rings, at the latest after `pause_s`."""
        loop = asyncio.get_running_loop()
        rung = self._rung = loop.create_future()  # an Event does more, and this waits for most events of a job
        due = loop.time() + pause_s
        # One that rings too early does no harm, and to set another for every event would cost more than most events.
        if self._alarm is None or self._alarm.when() > due:
            self.silence()
            self._alarm = loop.call_at(due, self._due)
        await rung

    def _due(self) -> None:
        self._alarm = None
        self.ring()

    def silence(self) -> None:
        """Forget when to look."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None


class Background:
    """Hand-outs under way. `tasks`: those; `is_given_up`: none of them is for the iteration any more."""

    def __init__(self, bell: Bell):
        self.bell = bell
        self.tasks: set[asyncio.Task] = set()
        self._error: BaseException | None = None
        self.is_given_up = False

    def spawn(self, work: Coroutine[Any, Any, Any], undo: Callable[[], None]) -> None:
        """Run a hand-out. A worker that died is reported by its own event; any other failure ends the job."""

        async def guarded() -> None:
            try:
                await work
            except ReplicaTorn:
                raise
            except (CallError, TimeoutError) as error:
                log.warning("a hand-out failed: %s", error)
                await asyncio.sleep(RETRY_PAUSE_S)
                undo()
                self.bell.ring()

        def finished(task: asyncio.Task) -> None:
            work.close()  # one that was given up before it began; to any other this does nothing
            self._finished(task)

        task = asyncio.ensure_future(guarded())
        self.tasks.add(task)
        task.add_done_callback(finished)

    def _finished(self, task: asyncio.Task) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.fail(task.exception())

    def fail(self, error: BaseException) -> None:
        """This ends the iteration, unless something has before."""
        self._error = self._error or error
        self.bell.ring()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        self.is_given_up = True
        for task in self.tasks:
            task.cancel()
