"""A whole agent, with CURVE sockets and worker processes, but no MPI: what it does when its workers come and go."""

import asyncio
import sys
import time
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

mpi4py = pytest.importorskip("mpi4py")
mpi4py.rc.initialize = False  # imported for the agent, not used

from dynarl import keys  # noqa: E402
from dynarl.agent.agent import Agent  # noqa: E402
from dynarl.rpc import Link  # noqa: E402
from dynarl.wire import CallError, Trajectory  # noqa: E402

TESTS = Path(__file__).parent
PLAN = {"epoch": 1, "ranks": [0], "version": 7, "digest": "c0ffee"}


class NoMPI:
    async def vote(self, *_):
        return {"agreed": True, "ready": True, "same_digest": True, "built": False}

    def forget(self, ranks):
        pass

    async def keep_going(self):
        await asyncio.Event().wait()


class Desk:
    """The controller's end. `deaths`: what the agent reported of its workers."""

    def __init__(self, directory: Path, home: str):
        (directory / "logs").mkdir()
        keys.create(directory / "keys")
        self.context = zmq.asyncio.Context()
        socket = self.context.socket(zmq.ROUTER)
        keys.as_server(socket, keys.load(directory / "keys", "controller"))
        self.authenticator = keys.admit(self.context, keys.load(directory / "keys", "agent"))
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        self.link = Link(socket, self, routed=True, lasting=True)
        self.server = asyncio.create_task(self.link.serve())
        self.here, self.deaths, self.events = asyncio.Event(), [], []
        self.python = directory / "python"
        self.python.write_text(f'#!/bin/sh\nexec {sys.executable} {TESTS}/pretend_worker.py "$@"\n')
        self.python.chmod(0o755)
        self.agent = Agent(node="n1", home=home, rank=0, remapper=NoMPI(), controller=f"tcp://127.0.0.1:{port}", key_dir=directory / "keys",
                           log_dir=directory / "logs", scratch=directory, staging=directory / "staging", host="127.0.0.1", mpi_library="",
                           world_size=1)
        self.agent.start()
        self.running = asyncio.create_task(self.agent.run())

    def event_hello(self, peer, **_):
        self.here.set()

    def event_worker_died(self, peer, **death):
        self.deaths.append(death)

    def event_finished(self, peer, **data):
        self.events.append(data)

    event_trained = event_finished

    async def call(self, method, /, **args):
        return await self.link.call("n1", method, timeout_s=10, **args)

    async def start(self, role: str, device: int = 0, **answers: str) -> None:
        env = {f"PRETEND_{method.upper()}": answer for method, answer in answers.items()}
        await self.call("start_worker", role=role, device=device, python=str(self.python), env=env, device_kind="cpu", limit_s=10.0)

    async def worker(self, role: str, method: str, device: int = 0, **args):
        return await self.call("worker", role=role, device=device, method=method, args=args)

    async def calls(self, role: str, method: str, device: int = 0) -> list[dict]:
        return [args for name, args in await self.worker(role, "calls", device) if name == method]

    async def close(self) -> None:
        self.agent.request_stop()
        await self.running
        self.agent.close()
        self.server.cancel()
        self.authenticator.stop()
        self.context.destroy(linger=0)


def at_desk(directory: Path, scenario, home: str = "rollout") -> None:
    async def go():
        desk = Desk(directory, home)
        try:
            async with asyncio.timeout(30):
                await desk.here.wait()
                await scenario(desk)
        finally:
            await desk.close()

    asyncio.run(go())


def held(desk: Desk, *samples: str) -> list[dict]:
    """Put finished answers into the node's store; returns them as a hand-out names them."""
    for sample in samples:
        desk.agent.work.store.put(Trajectory(sample, b"", b"1234", b"1234", old_logprobs=b"1234", finish="stop", version=7))
    return [{"sample": sample, "holder": "n1", "advantage": 1.0, "weight": 1.0} for sample in samples]


def test_a_call_to_a_worker_that_still_starts_waits_for_it(tmp_path):
    async def scenario(desk):
        starting = asyncio.create_task(desk.start("training"))
        while "n1-training-0" not in desk.agent.supervisor.workers:
            await asyncio.sleep(0.001)
        assert await desk.worker("training", "ping") == "n1-training-0"
        await starting

    at_desk(tmp_path, scenario)


def test_a_call_to_no_worker_and_an_open_call_to_one_that_dies_fail(tmp_path):
    async def scenario(desk):
        with pytest.raises(CallError, match="n1-training-0 is not running"):
            await desk.worker("training", "ping")
        await desk.start("training")
        with pytest.raises(CallError, match="n1-training-0 died: exit status 9"):
            await desk.worker("training", "die")
        while not desk.deaths:
            await asyncio.sleep(0.01)
        assert {key: desk.deaths[0][key] for key in ("role", "device", "attempt", "status")} == {
            "role": "training", "device": 0, "attempt": 1, "status": "exit status 9"}

    at_desk(tmp_path, scenario)


def test_work_that_was_on_its_way_to_a_worker_that_died_does_not_reach_the_next(tmp_path):
    async def scenario(desk):
        samples, arrived = held(desk, "1:0:0", "1:0:1"), asyncio.Event()
        gather = desk.agent.work._gather

        async def slow(*args):
            await arrived.wait()
            return await gather(*args)

        desk.agent.work._gather = slow
        await desk.start("training")
        late = asyncio.create_task(desk.call("train", lease=1, devices=[0], samples=samples, holders={}))
        await asyncio.sleep(0.05)
        with pytest.raises(CallError):
            await desk.worker("training", "die")
        await desk.start("training")
        arrived.set()
        with pytest.raises(CallError, match="n1-training-0 died while its work was on the way"):
            await late
        assert await desk.calls("training", "train") == []
        await desk.call("train", lease=2, devices=[0], samples=samples, holders={})
        assert [call["lease"] for call in await desk.calls("training", "train")] == [2]

    at_desk(tmp_path, scenario, "training")


def test_the_first_worker_of_a_replica_says_which_leases_were_not_started(tmp_path):
    async def scenario(desk):
        await desk.start("training", 0, cancel="[2]")
        await desk.start("training", 1, cancel="[1, 2]")
        for lease, sample in ((1, "1:0:0"), (2, "1:1:0")):
            await desk.call("train", lease=lease, devices=[0, 1], samples=held(desk, sample), holders={})
        await desk.call("prepare", plan=PLAN | {"moves": {"n1": "rollout"}})
        assert await desk.call("quiesce", epoch=1) == {"given_up": [], "unstarted": [2]}
        assert len(await desk.calls("training", "drain", 1)) == 1

    at_desk(tmp_path, scenario, "training")


def test_a_roll_back_that_fails_still_lets_work_in(tmp_path):
    async def scenario(desk):
        await desk.start("training", cancel="[]")
        await desk.start("inference", sleep="1 / 0")
        await desk.call("prepare", plan=PLAN | {"moves": {"n1": "inference"}})
        await desk.call("quiesce", epoch=1)
        with pytest.raises(CallError, match="came while this node changes its role"):
            await desk.call("train", lease=1, devices=[0], samples=held(desk, "1:0:0"), holders={})
        with pytest.raises(CallError, match="ZeroDivisionError"):
            await desk.call("rollback", epoch=1)
        await desk.call("train", lease=2, devices=[0], samples=held(desk, "1:0:0"), holders={})

    at_desk(tmp_path, scenario, "training")


def test_a_halt_does_not_wait_for_workers_that_still_start(tmp_path):
    async def scenario(desk):
        await desk.start("training")
        slow = tmp_path / "slow"
        slow.write_text("#!/bin/sh\nsleep 60\n")
        slow.chmod(0o755)
        starting = asyncio.create_task(desk.call(
            "start_worker", role="rollout", device=0, python=str(slow), env={}, device_kind="cpu", limit_s=60.0))
        while "n1-rollout-0" not in desk.agent.supervisor.workers:
            await asyncio.sleep(0.001)
        began = time.monotonic()
        await desk.call("halt", role="training")
        assert time.monotonic() - began < 2.0
        starting.cancel()

    at_desk(tmp_path, scenario, "training")


def test_prompts_are_written_in_the_vocabulary_that_the_job_names(tmp_path):
    from dynarl.tasks import tokenizer

    tokenizer.build(["other", "vocabulary", "1", "+", " ", "="]).save(tmp_path / "model")

    async def scenario(desk):
        await desk.call("start_worker", role="environment", device=0, python=None, env={}, device_kind="cpu", limit_s=20.0)
        prompts = []
        for directory in (None, str(tmp_path / "model")):
            await desk.call("open_environment", task={"name": "arithmetic"}, seed=1, limit_s=5.0, tokenizer_dir=directory)
            prompts.append(await desk.agent.work._call_environment("prompts", split="train", indices=[0]))
        assert prompts[0] != prompts[1]

    at_desk(tmp_path, scenario)


def test_an_environment_that_dies_is_there_again_for_the_next_answer(tmp_path):
    async def scenario(desk):
        await desk.call("start_worker", role="environment", device=0, python=None, env={"PYTHONPATH": f"{TESTS.parents[1]}:{TESTS}"},
                        device_kind="cpu", limit_s=10.0)
        await desk.call("open_environment", task={"name": "troubled_task:Troubled", "args": {"marker": str(tmp_path / "died")}}, seed=1,
                        limit_s=5.0)
        for index in (3, 0):  # the process dies of the first, once
            desk.agent.work.requests[f"1:{index}:0"] = {"worker": "n1-rollout-0", "split": "train", "prompt": b""}
        await asyncio.gather(*(desk.agent.work.sample_finished(f"1:{index}:0", b"", b"", "stop", 7) for index in (3, 0)))
        while len(desk.events) < 2:
            await asyncio.sleep(0.01)
        assert [(e["sample"], e["correct"], e["timed_out"]) for e in desk.events] == [("1:3:0", True, False), ("1:0:0", True, False)]
        assert [death["role"] for death in desk.deaths] == ["environment"]
        assert desk.agent.supervisor.workers["n1-environment-0"].attempt == 2

    at_desk(tmp_path, scenario)
