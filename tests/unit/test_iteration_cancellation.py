"""Ending an iteration at the very moment at which something happens in it."""

import asyncio
import gc
from types import SimpleNamespace

import pytest
from pretend_cluster import VirtualTime

from dynarl.controller.background import Background, Bell
from dynarl.controller.iteration import Iteration
from dynarl.controller.leases import ReplicaTorn


class Idle(Iteration):
    """An iteration in which there is never anything to hand out. fails_in: round in which that fails."""

    def __init__(self, fails_in=None):
        self._bell = Bell()
        self._background = Background(self._bell)
        self.role_changes = SimpleNamespace(current=None, consider=lambda to_train: None)
        self.hand_outs = SimpleNamespace(hand_out=self._hand_out, turns=None)
        self.rounds, self.fails_in = 0, fails_in

    def _hand_out(self, to_train, changing=False):
        self.rounds += 1
        if self.rounds == self.fails_in:
            raise KeyError("1:0") from OSError("its cause")
        if self.rounds > 20:
            raise AssertionError("it goes on after its cancellation")

    def _pause_s(self):
        return 0.1


def test_a_cancellation_together_with_an_event_ends_it():
    async def cancelled_with_an_event(turns: int) -> None:
        iteration = Idle()
        task = asyncio.create_task(iteration._until(lambda: False, lambda: []))
        await asyncio.sleep(0.01)
        iteration._bell.ring()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 60.0)

    # How many turns of the loop lie between event and cancellation decides which of them a wait sees first.
    for turns in range(4):
        asyncio.run(cancelled_with_an_event(turns))


def stepping(iteration, meanwhile=lambda: None, error=None):
    """The optimizer steps for an hour, or fails with `error`. Returns the seconds that went by and what was raised."""

    async def step():
        began = asyncio.get_running_loop().time()
        try:
            async with iteration.going_on():
                await asyncio.sleep(0.05)
                meanwhile()
                if error is not None:
                    raise error
                await asyncio.sleep(3600)
        except Exception as raised:
            return asyncio.get_running_loop().time() - began, raised, asyncio.current_task().cancelling()

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(step())


def test_hand_outs_that_fail_while_the_optimizer_steps_end_the_step_at_once_and_say_why():
    seconds, raised, cancelling = stepping(Idle(fails_in=3))
    assert isinstance(raised, KeyError) and isinstance(raised.__cause__, OSError)
    assert seconds < 1.0 and not cancelling


def test_one_that_fails_in_the_background_meanwhile_does_so_too():
    iteration, torn = Idle(), ReplicaTorn("a lease reached only some of its nodes")

    async def fails():
        raise torn

    seconds, raised, _ = stepping(iteration, lambda: iteration._background.spawn(fails(), lambda: None))
    assert raised is torn and seconds < 1.0


def test_a_step_that_fails_says_so_itself_and_what_was_handed_out_meanwhile_is_given_up():
    iteration, error = Idle(), RuntimeError("the optimizer")
    held = []

    def hand_out():
        iteration._background.spawn(asyncio.sleep(3600), lambda: None)
        held.extend(iteration._background.tasks)

    _, raised, _ = stepping(iteration, hand_out, error)
    assert raised is error and [task.cancelled() for task in held] == [True]


def test_what_is_given_up_before_it_has_begun_leaves_nothing_behind(recwarn):
    async def go():
        background = Background(Bell())
        background.spawn(asyncio.sleep(3600), lambda: None)
        background.give_up()
        await asyncio.wait(background.tasks)
        assert not background.tasks

    asyncio.run(go())
    gc.collect()
    assert not [str(each.message) for each in recwarn], "an unraisable warning of a coroutine that was never awaited"


def test_an_error_is_not_lost_where_what_was_waited_for_is_there_at_the_same_time():
    async def both():
        iteration = Idle()
        iteration._background.fail(ReplicaTorn("a lease reached only some of its nodes"))
        await iteration._until(lambda: True, None)

    with pytest.raises(ReplicaTorn):
        asyncio.run(both())
