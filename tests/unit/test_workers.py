"""What the controller makes of workers that die: records, restarts, the end; on a fleet whose workers start as told."""

import asyncio
from types import SimpleNamespace

import pytest

from dynarl.config.schema import Config, Failure
from dynarl.controller import workers
from dynarl.controller.workers import JobFailed, OwnerLost, Workers
from dynarl.wire import CallError

HOME = {"n1": "rollout", "n2": "inference", "n3": "training"}
DEATH = {"device": 0, "attempt": 1, "status": "killed by SIGKILL", "tail": []}


class Fleet:
    """`failures`: what the next starts raise instead of starting."""

    def __init__(self):
        self.failures, self.calls = [], []

    async def call(self, node, method, /, timeout_s=None, **args):
        self.calls.append((node, method))
        await asyncio.sleep(0)
        if method == "start_worker" and self.failures:
            raise self.failures.pop(0)
        return {"attempt": 2}

    async def worker(self, node, role, device, method, /, timeout_s=None, **args):
        return await self.call(node, method)


class Journal(list):
    def append(self, type_, **fields):
        super().append({"type": type_, **fields})


def job(**failure) -> SimpleNamespace:
    lost = []
    stage = SimpleNamespace(lost=lost, worker_lost=lambda node, role, held: lost.append((node, role, list(held))))
    return SimpleNamespace(
        config=Config(failure=Failure(**failure)), progress=SimpleNamespace(iteration=0), fleet=Fleet(), journal=Journal(), home=HOME, stage=stage,
        staging=SimpleNamespace(lock=asyncio.Lock(), versions=dict.fromkeys(HOME, 3)), weights=SimpleNamespace(version=3), epochs=SimpleNamespace(roles=HOME),
        trainer=SimpleNamespace(staged=lambda node, version: f"/staging/v{version}"))


def story(scenario, **failure) -> SimpleNamespace:
    async def go():
        made = job(**failure)
        async with asyncio.timeout(60):
            await scenario(Workers(made), made)
        return made

    return asyncio.run(go())


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(workers, "RETRY_PAUSE_S", 0.0)


def test_a_worker_that_was_ended_is_on_record_with_the_reason_and_what_it_leaves_is_offered():
    async def scenario(workers, job):
        workers.died("n1", role="rollout", **DEATH, reason="no sign of life for 121 s", held=["1:0:0"])
        assert workers.down == {("n1", "rollout")}
        await workers.settled()
        assert workers.down == set() and workers.faults.empty()

    made = story(scenario)
    rebooted, died, up = made.journal
    assert rebooted == {"type": "worker_rebooted", "node": "n1", "role": "rollout", "device": 0, "attempt": 1,
                        "reason": "no sign of life for 121 s"}
    assert (died["type"], died["status"], up["type"]) == ("worker_died", "killed by SIGKILL", "worker_up")
    assert made.stage.lost == [("n1", "rollout", ["1:0:0"])]
    assert [method for _, method in made.fleet.calls] == ["kill_workers", "start_worker", "load", "loaded"]


def test_a_worker_that_dies_by_itself_was_not_rebooted():
    made = story(lambda workers, job: asyncio.sleep(0, workers.died("n1", role="rollout", **DEATH)))
    assert [record["type"] for record in made.journal][0] == "worker_died"


def test_a_start_that_fails_is_tried_again():
    async def scenario(workers, job):
        job.fleet.failures = [CallError("n1-rollout-0 ended before it was ready"), TimeoutError("not ready")]
        workers.died("n1", role="rollout", **DEATH)
        await workers.settled()
        assert workers.down == set() and workers.faults.empty()

    made = story(scenario)
    assert [method for _, method in made.fleet.calls].count("start_worker") == 3


def test_starts_that_fail_for_ever_end_the_job():
    async def scenario(workers, job):
        job.fleet.failures = [CallError("no such interpreter")] * 9
        workers.died("n1", role="rollout", **DEATH)
        with pytest.raises(JobFailed, match="rollout on n1 could not be started again: no such interpreter.*restart 4 of at most 3"):
            await workers.settled()
        assert isinstance(workers.faults.get_nowait(), JobFailed)

    story(scenario, max_restarts=3)


def test_a_death_while_it_is_started_again_counts_once():
    async def scenario(workers, job):
        def die():
            workers.died("n1", role="rollout", **DEATH)
            return CallError("n1-rollout-0 died")

        call = job.fleet.call

        async def dies_twice(node, method, /, timeout_s=None, **args):
            if method == "start_worker" and len(job.journal) < 3:
                raise die()
            return await call(node, method, timeout_s=timeout_s, **args)

        job.fleet.call = dies_twice
        workers.died("n1", role="rollout", **DEATH)
        await workers.settled()
        assert workers.down == set() and workers.faults.empty()

    story(scenario, max_restarts=3)


def test_an_owner_that_hangs_takes_the_trainer_back():
    async def scenario(workers, job):
        workers.died("n3", role="training", **DEATH, reason="no sign of life for 301 s")
        fault = workers.faults.get_nowait()
        assert isinstance(fault, OwnerLost) and "no sign of life for 301 s" in str(fault)

    story(scenario)


def test_restarts_are_forgotten_after_iterations_without_one():
    async def scenario(workers, job):
        for iteration in (1, 2, 3, 7, 12):  # four iterations do not make the first three forgotten, five do
            job.progress.iteration = iteration
            if iteration == 7:
                with pytest.raises(JobFailed, match="restart 4 of at most 3"):
                    workers.count_restart("died")
            else:
                workers.count_restart("died")
        job.progress.iteration = 11  # the trainer went back to a checkpoint
        workers.count_restart("died")
        workers.count_restart("died")
        with pytest.raises(JobFailed, match="restart 4 of at most 3"):
            workers.count_restart("died")

    story(scenario, max_restarts=3)
