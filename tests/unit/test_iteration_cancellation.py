"""Ending an iteration at the very moment at which something happens in it."""

import asyncio

import pytest

from dynarl.config.schema import Config
from dynarl.controller.iteration import Iteration
from dynarl.controller.telemetry import Monitor


class Idle(Iteration):
    """An iteration in which there is never anything to hand out."""

    def __init__(self):
        self._error, self._change, self._turns, self._alarm, self._tasks = None, None, None, None, set()
        self._changed = asyncio.Event()
        self._monitor, self.rounds = Monitor(Config()), 0

    def _hand_out(self, to_train):
        self.rounds += 1
        if self.rounds > 20:
            raise AssertionError("it goes on after its cancellation")

    def _pause_s(self):
        return 0.1

    def _consider(self, to_train):
        pass

    def _pause_s(self):
        return 0.1


def test_a_cancellation_together_with_an_event_ends_it():
    async def cancelled_with_an_event(turns: int) -> None:
        iteration = Idle()
        task = asyncio.create_task(iteration._until(lambda: False, lambda: []))
        await asyncio.sleep(0.01)
        iteration._wake()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 1.0)

    # How many turns of the loop lie between event and cancellation decides which of them a wait sees first.
    for turns in range(4):
        asyncio.run(cancelled_with_an_event(turns))
