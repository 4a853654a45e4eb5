"""An optimizer step that is interrupted: what a checkpoint on the way out holds is a whole iteration, or none is written."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from pretend_cluster import VirtualTime

from dynarl.config.schema import Algorithm, Config
from dynarl.controller.checkpoints import Checkpoints
from dynarl.controller.rounds import Rounds
from dynarl.controller.telemetry import Monitor
from dynarl.wire import CallError


async def nothing(*_, **__):
    return None


class Iterating(Rounds):
    """Iterations of which only the steps are there. steps: what the trainer does in each."""

    def __init__(self, minibatches, step):
        config = Config(algorithm=Algorithm(minibatches=minibatches))
        self.records = []
        journal = SimpleNamespace(append=lambda kind, **data: self.records.append((kind, data)))
        writer = SimpleNamespace(trace=lambda line: None, log=lambda number, data: None)
        super().__init__(config, {"n1": "training"}, SimpleNamespace(call_each=nothing), journal, writer, Monitor(config))
        self.trainer = SimpleNamespace(begin=nothing, step=step, owner_nodes=["n1"])
        self.staging = SimpleNamespace(refresh_trainers=nothing, everywhere=nothing)
        self.epochs, self.workers = SimpleNamespace(roles={}), SimpleNamespace(down=set())
        self.enter, self.saved = nothing, []

    def _new_iteration(self, samples, **_):
        @asynccontextmanager
        async def going_on():
            try:
                yield
            finally:
                await asyncio.sleep(0.01)

        async def awake(*_):
            return []

        return SimpleNamespace(
            accumulate=nothing, awake=awake, going_on=going_on, weights=self.weights,
            results=SimpleNamespace(counted_tokens=lambda batch: 1, stats=lambda batch: {}), tally=SimpleNamespace(stage_ends=dict),
            ledger=SimpleNamespace(trained=lambda batch: samples), role_changes=SimpleNamespace())

    async def cut_in(self, after_s, iterating):
        """As the controller does for a cancellation: after a step, never between it and its record."""
        await asyncio.sleep(after_s)
        async with self.critical:
            iterating.cancel()
        await asyncio.gather(iterating, return_exceptions=True)

    async def save(self):
        checkpoints = Checkpoints(SimpleNamespace(config=self.config, stage=self.stage, is_sound=self.is_sound))

        async def begin():
            self.saved.append(self.progress.iteration)

        checkpoints.begin = begin
        await checkpoints.save_interrupted()


async def steps(**_):
    await asyncio.sleep(1.0)
    return {"grad_norm": 1.0, "lr": 0.1}


def interrupted(minibatches, after_s):
    async def go():
        rounds = Iterating(minibatches, lambda *_: steps())
        await rounds.cut_in(after_s, asyncio.create_task(rounds.iterate(1, samples=["1:0:0"])))
        await rounds.save()
        return rounds

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(go())


def test_a_step_that_is_on_record_when_somebody_cuts_in_is_of_a_whole_iteration():
    rounds = interrupted(1, 0.5)
    assert [kind for kind, _ in rounds.records].count("step_committed") == rounds.progress.step == 1
    assert rounds.saved == [1], "the state is that after iteration 1, whatever the checkpoint is called"


def test_between_two_steps_of_one_iteration_nothing_is_saved():
    rounds = interrupted(2, 0.5)
    assert rounds.progress.step == 1 and rounds.progress.iteration == 0 and rounds.saved == []


def test_after_a_step_that_failed_half_way_nothing_is_saved():
    async def fails(*_):
        raise CallError("n1-training-0 died")

    async def go():
        rounds = Iterating(1, fails)
        with pytest.raises(CallError):
            await rounds.iterate(1, samples=["1:0:0"])
        await rounds.save()
        return rounds.saved

    assert asyncio.run(go()) == []
