"""What ends the controller's work, whatever it is doing."""

import asyncio
from types import SimpleNamespace

import pytest
from pretend_cluster import VirtualTime

from dynarl.controller.__main__ import Controller
from dynarl.controller.fleet import Fleet, StepLost
from dynarl.controller.workers import OwnerLost
from dynarl.wire import CallError


def race(tmp_path, work, starting: bool, *, is_up=True, ended=False, unanswered=0):
    """`work` against a step of which n2 has not answered so many heartbeats, or which has `ended`."""

    async def go():
        loop = asyncio.get_running_loop()
        fleet = Fleet.__new__(Fleet)
        fleet.is_up, fleet.ended, fleet._unanswered = is_up, loop.create_future(), {"n1": 0, "n2": unanswered}
        if ended:
            fleet.ended.set_result(9)

        async def never():
            await loop.create_future()

        job = SimpleNamespace(fault=never, silence=never, fleet=fleet, critical=asyncio.Lock())
        controller = Controller.__new__(Controller)
        controller.cancel_file, controller.time_limit = tmp_path / "cancel", asyncio.Event()
        await controller._race(work(), job, starting)

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(go())


@pytest.mark.parametrize("error", [CallError("n1-training-0 died"), OwnerLost("it died"), TimeoutError("no answer")])
def test_a_worker_that_dies_while_a_step_is_set_up_again_costs_that_step_and_not_the_job(error, tmp_path):
    """The first time it is the job's own fault, and said at once."""

    class Failing:
        fault = silence = staticmethod(asyncio.Event().wait)
        critical, closed = asyncio.Lock(), 0

        def __init__(self, *_):
            self.fleet = SimpleNamespace(lost=self.fault)

        async def set_up(self):
            raise error

        async def close(self):
            Failing.closed += 1

    async def step(ready_t):
        controller = Controller.__new__(Controller)
        controller.cancel_file, controller.time_limit = tmp_path / "cancel", asyncio.Event()
        controller.config = controller.run_dir = controller.attempt = controller.fleet = controller.writer = None
        controller.job_class, controller.resume_from = Failing, None
        controller.journal = SimpleNamespace(graph=SimpleNamespace(ready_t=ready_t, last_number=0))
        return await controller._one_step({})

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        with pytest.raises(type(error)):
            runner.run(step(None))
        assert str(error) in str(runner.run(step(1.0)))
    assert Failing.closed == 2


async def a_call_without_an_answer():
    await asyncio.sleep(1e4)


async def a_call_that_fails():
    raise CallError("n2: the step has ended")


@pytest.mark.parametrize("starting", [True, False])
def test_a_node_that_falls_silent_ends_the_step_also_while_models_are_loaded(starting, tmp_path):
    with pytest.raises(StepLost, match="no sign of life from n2") as lost:
        race(tmp_path, a_call_without_an_answer, starting, unanswered=11)
    assert lost.value.nodes == {"n2"}


@pytest.mark.parametrize("starting", [True, False])
def test_calls_that_fail_because_the_step_has_ended_are_not_the_reason(starting, tmp_path):
    with pytest.raises(StepLost, match="status 9"):
        race(tmp_path, a_call_that_fails, starting, ended=True)


def test_before_its_agents_are_there_a_step_is_not_lost(tmp_path):
    """What `launch` says of it is more exact."""
    with pytest.raises(CallError):
        race(tmp_path, a_call_that_fails, True, is_up=False, ended=True)
