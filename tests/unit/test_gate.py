from __future__ import annotations

import asyncio

import pytest

from dynarl.agent.gate import Gate
from dynarl.wire import CallError


def test_close_waits_for_hand_outs_inside_and_refuses_new_ones():
    async def story() -> list[str]:
        gate, seen, arrived = Gate(), [], asyncio.Event()

        async def slow() -> None:
            async with gate.passing("slow"):
                await arrived.wait()
                seen.append("handed out")

        task = asyncio.create_task(slow())
        await asyncio.sleep(0)
        closing = asyncio.create_task(gate.close())
        await asyncio.sleep(0.01)
        assert not closing.done()
        with pytest.raises(CallError, match="late came while this node changes its role"):
            async with gate.passing("late"):
                seen.append("late")
        arrived.set()
        await closing
        seen.append("closed")
        await task
        gate.open()
        async with gate.passing("next"):
            seen.append("next")
        return seen

    assert asyncio.run(story()) == ["handed out", "closed", "next"]


def test_a_hand_out_that_fails_does_not_hold_the_gate():
    async def story() -> None:
        gate = Gate()
        with pytest.raises(ValueError):
            async with gate.passing("x"):
                raise ValueError
        await asyncio.wait_for(gate.close(), 60)

    asyncio.run(story())


def test_a_gate_that_stays_occupied_says_so_in_time_and_stays_closed():
    async def story() -> None:
        gate, arrived = Gate(), asyncio.Event()

        async def stuck() -> None:
            async with gate.passing("stuck"):
                await arrived.wait()

        task = asyncio.create_task(stuck())
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await gate.close(0.02)
        with pytest.raises(CallError):
            async with gate.passing("late"):
                pass
        arrived.set()
        await task

    asyncio.run(story())
