"""An asyncio event loop on simulated time: waiting costs nothing, its clock jumps to the next timer.

- Time is an integer number of nanoseconds. `time()` gives it in seconds, as the programs that run here expect; what
  they ask for in seconds is rounded to nanoseconds, which a float carries exactly for more than 100 days.
- The order is total: timers by (time, number in which they were set), and what is due is run first in, first out. So
  the same program does the same on every machine, with every hash seed.
- No sockets, threads or processes: there is nothing outside of this loop.

Timers are set by the simulated **world** (`at`: an engine that finishes an answer, a message that arrives) or by the
program that runs in it (`asyncio.sleep`, time limits). A program that polls never runs out of timers, so it is stuck
when the world has had nothing to do for `patience_s`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from dynarl.errors import DynarlError

SECOND_NS = 1_000_000_000


class StuckError(DynarlError):
    """The simulation cannot go on; the message says what waits for what."""


def nanoseconds(seconds: float) -> int:
    """
    >>> nanoseconds(0.25)
    250000000
    """
    return round(seconds * SECOND_NS)


class Happening:
    """A timer of the world: far lighter than the loop's own, and what its callback raises ends the simulation."""

    __slots__ = ("_args", "_callback", "_cancelled")

    def __init__(self, callback: Callable[..., Any], args: tuple):
        self._callback, self._args, self._cancelled = callback, args, False

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled

    def _run(self) -> None:
        self._callback(*self._args)


class VirtualLoop(asyncio.BaseEventLoop):
    """explain: called when nothing goes on any more, says what waits for what."""

    def __init__(self, patience_s: float = 60.0, explain: Callable[[], str] = lambda: "") -> None:
        super().__init__()
        self.now_ns = 0
        self.explain = explain
        self.num_timers = 0  # that have come due
        self._patience_ns = nanoseconds(patience_s)
        self._number = 0  # of the timer that was set last
        self._timers: list[tuple[int, int, asyncio.TimerHandle | Happening]] = []
        self._num_of_world = 0  # of these
        self._world_ns = 0  # when the world had something to do

    def time(self) -> float:
        return self.now_ns / SECOND_NS

    # --- timers

    def at(self, when_ns: int, callback: Callable[..., Any], *args: Any) -> Happening:
        """Something happens in the simulated world at this time."""
        happening = Happening(callback, args)
        self._number += 1
        self._num_of_world += 1
        heappush(self._timers, (when_ns if when_ns > self.now_ns else self.now_ns, self._number, happening))
        return happening

    def after(self, delay_ns: int, callback: Callable[..., Any], *args: Any) -> Happening:
        """As `at`, counted from now."""
        return self.at(self.now_ns + delay_ns, callback, *args)

    def pause(self, delay_ns: int) -> asyncio.Future[None]:
        """What takes so long in the simulated world, to be awaited."""
        done = self.create_future()
        self.after(delay_ns, _set_result, done)
        return done

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self._set(nanoseconds(when), callback, args, context)

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self._set(self.now_ns + nanoseconds(delay), callback, args, context)

    def _set(
        self, when_ns: int, callback: Callable[..., Any], args: tuple, context: contextvars.Context | None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when_ns / SECOND_NS, callback, args, self, context)
        self._number += 1
        heappush(self._timers, (when_ns, self._number, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is dropped when its time comes."""

    # --- what BaseEventLoop calls

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Without the checks of the loop's own: nobody calls from another thread here."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def _run_once(self) -> None:
        ready = self._ready
        if not ready:
            self._jump()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _jump(self) -> None:
        """To the next timer that has not been cancelled. All that are due then are run, in the order in which they were
        set; what they set for now comes after that."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            self._num_of_world -= type(heappop(timers)[2]) is Happening
        if not timers and self._stopping:
            return
        if not timers or (not self._num_of_world and timers[0][0] - self._world_ns > self._patience_ns):
            raise StuckError(f"nothing goes on at {self.time():.3f} s of simulated time. {self.explain()}")
        self.now_ns = now_ns = max(self.now_ns, timers[0][0])
        due = []
        while timers and timers[0][0] <= now_ns:
            timer = heappop(timers)[2]
            if type(timer) is Happening:
                self._num_of_world -= 1
                self._world_ns = now_ns
            if not timer._cancelled:
                due.append(timer)
        self.num_timers += len(due)
        for timer in due:
            if not timer._cancelled:  # by one before it
                timer._run()

    def _write_to_self(self) -> None:
        """Nobody can wait in a selector here."""

    def _process_events(self, event_list: Any) -> None:
        """There is none."""


def _set_result(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
