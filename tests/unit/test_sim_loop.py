"""The event loop of simulated time."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynarl.sim.loop import SECOND_NS, StuckError, VirtualLoop, nanoseconds


def run(program, **options):
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(**options)) as runner:
        return runner.run(program())


@given(st.lists(st.integers(0, 5), max_size=20))
def test_what_is_due_at_one_time_happens_in_the_order_in_which_it_was_asked_for(delays_s):
    async def program():
        loop, happened = asyncio.get_running_loop(), []

        async def wait(number, delay_s):
            await asyncio.sleep(delay_s)
            happened.append((loop.time(), number))

        await asyncio.gather(*(wait(*each) for each in enumerate(delays_s)))
        return happened

    # Sleeping for no time at all goes through no timer: it is one turn of the loop.
    assert run(program) == sorted((float(delay_s), number) for number, delay_s in enumerate(delays_s))


def test_time_is_whole_nanoseconds_and_waiting_costs_nothing():
    async def program():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(1e6)
        await asyncio.sleep(1e-9)
        return loop.now_ns

    assert run(program, patience_s=2e6) == 10**6 * SECOND_NS + 1


def test_a_time_limit_ends_what_it_is_around():
    async def program():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await asyncio.sleep(1.0)
        return asyncio.get_running_loop().now_ns

    assert run(program) == nanoseconds(0.3)


def test_a_program_that_waits_for_nothing_is_stuck_and_is_told_so():
    async def program():
        await asyncio.sleep(2.0)
        await asyncio.Event().wait()

    with pytest.raises(StuckError, match="at 2.000 s of simulated time. the lamp"):
        run(program, explain=lambda: "the lamp waits for the switch")


def test_a_program_that_polls_is_stuck_when_the_world_stands_still_for_too_long():
    async def program():
        loop = asyncio.get_running_loop()
        loop.after(nanoseconds(100.0), lambda: None)  # as long as this is to come it may go on
        while True:
            await asyncio.sleep(0.5)

    with pytest.raises(StuckError, match="at 110.000 s"):
        run(program, patience_s=10.0)


def test_a_timer_that_was_cancelled_does_not_happen():
    async def program():
        loop, happened = asyncio.get_running_loop(), []
        loop.at(nanoseconds(1.0), happened.append, 1).cancel()
        loop.at(nanoseconds(2.0), happened.append, 2)
        await asyncio.sleep(3.0)
        return happened, loop.num_timers

    assert run(program) == ([2], 2)


def test_what_the_world_raises_ends_the_simulation():
    async def program():
        asyncio.get_running_loop().at(SECOND_NS, int, "no number")
        await asyncio.sleep(5)

    with pytest.raises(ValueError, match="no number"), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(program())
