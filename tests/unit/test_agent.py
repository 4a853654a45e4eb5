"""A whole agent, with CURVE sockets and worker processes, but no MPI: what it does when its workers come and go."""

import asyncio
import os
import signal
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
from dynarl.agent.orphan import ControllerWatch  # noqa: E402
from dynarl.rpc import Link  # noqa: E402
from dynarl.wire import CallError, Trajectory  # noqa: E402

TESTS = Path(__file__).parent
PLAN = {"epoch": 1, "ranks": [0], "version": 7, "digest": "c0ffee"}


class NoMPI:
    async def vote(self, *_):
        return {"agreed": True, "ready": True, "same_digest": True}

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
        self.agent = Agent(node="n1", home=home, rank=0, remapper=NoMPI(), controller=f"tcp://127.0.0.1:{port}",
                           watch=ControllerWatch(directory / "journal.jsonl"), key_dir=directory / "keys", log_dir=directory / "logs",
                           scratch=directory, staging=directory / "staging", host="127.0.0.1", mpi_library="", world_size=1)
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
        return await self.link.call("n1", method, timeout_s=60, **args)

    async def start(self, role: str, device: int = 0, hang_s: float = 0.0, **answers: str) -> None:
        env = {f"PRETEND_{method.upper()}": answer for method, answer in answers.items()}
        await self.call("start_worker", role=role, device=device, python=str(self.python), env=env, device_kind="cpu", limit_s=60.0,
                        hang_s=hang_s)

    def pid(self, role: str, device: int = 0) -> int:
        return self.agent.supervisor.workers[f"n1-{role}-{device}"].process.pid

    async def death(self) -> dict:
        """The first that was reported."""
        while not self.deaths:
            await asyncio.sleep(0.01)
        return self.deaths[0]

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


def at_desk(directory: Path, scenario, home: str = "rollout", kind: type | None = None) -> None:
    async def go():
        desk = (kind or Desk)(directory, home)
        try:
            async with asyncio.timeout(150):
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
        assert await desk.call("quiesce", epoch=1, limit_s=60.0) == {"given_up": [], "unstarted": [2]}
        assert len(await desk.calls("training", "drain", 1)) == 1

    at_desk(tmp_path, scenario, "training")


def test_a_roll_back_in_which_a_worker_fails_ends_that_worker_and_lets_work_in(tmp_path):
    async def scenario(desk):
        await desk.start("training", cancel="[]")
        await desk.start("inference", sleep="1 / 0")
        await desk.call("prepare", plan=PLAN | {"moves": {"n1": "inference"}})
        await desk.call("quiesce", epoch=1, limit_s=60.0)
        with pytest.raises(CallError, match="came while this node changes its role"):
            await desk.call("train", lease=1, devices=[0], samples=held(desk, "1:0:0"), holders={})
        await desk.call("rollback", epoch=1)
        death = await desk.death()
        assert death["role"] == "inference" and "it could not sleep" in death["reason"] and "ZeroDivisionError" in death["reason"]
        assert len(await desk.calls("training", "wake")) == 1
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
        assert time.monotonic() - began < 50.0
        starting.cancel()

    at_desk(tmp_path, scenario, "training")


def test_prompts_are_written_in_the_vocabulary_that_the_job_names(tmp_path):
    from dynarl.tasks import tokenizer

    tokenizer.build(["other", "vocabulary", "1", "+", " ", "="]).save(tmp_path / "model")

    async def scenario(desk):
        await desk.call("start_worker", role="environment", device=0, python=None, env={}, device_kind="cpu", limit_s=60.0)
        prompts = []
        for directory in (None, str(tmp_path / "model")):
            await desk.call("open_environment", task={"name": "arithmetic"}, seed=1, limit_s=60.0, tokenizer_dir=directory)
            prompts.append(await desk.agent.work._call_environment(0, "prompts", split="train", indices=[0]))
        assert prompts[0] != prompts[1]

    at_desk(tmp_path, scenario)


async def submitted(desk: Desk) -> dict[int, list[str]]:
    """Samples that each rollout worker was given since the last call, by device."""
    before, desk.seen = getattr(desk, "seen", {}), {d: await desk.calls("rollout", "submit", d) for d in (0, 1)}
    return {d: sorted(r["sample"] for call in calls[len(before.get(d, [])):] for r in call["requests"]) for d, calls in desk.seen.items()}


def test_devices_get_even_numbers_whole_groups_and_what_they_had_before(tmp_path):
    class Prompts:
        async def prompts(self, split, indices):
            return dict.fromkeys(indices, b"1234")

        def forget_prompts(self):
            pass

    async def generate(desk, samples, holder=None):
        await desk.call("generate", requests=[{"sample": s, "holder": holder} for s in samples], split="train", temperature=1.0, seed=1,
                        max_response_tokens=8, holders={})

    async def scenario(desk):
        partial = "{'sample': s, 'response': b'1234', 'logprobs': b'1234', 'version': 7}"
        there = "[r['sample'] for n, a in calls if n == 'submit' for r in a['requests']]"
        for device in (0, 1):
            await desk.start("rollout", device, abort=f"[{partial} for s in {there} if args['samples'] is None or s in args['samples']]")
        desk.agent.work.verifier = Prompts()
        groups = [[f"1:{g}:{m}" for m in range(3)] for g in range(2)]
        await generate(desk, [sample for group in groups for sample in group])
        assert await submitted(desk) == {0: groups[0], 1: groups[1]}
        await generate(desk, ["1:2:0", "1:3:0"])
        assert await submitted(desk) == {0: ["1:2:0"], 1: ["1:3:0"]}

        given_up = await desk.call("abort", samples=["1:1:0", "1:1:2", "1:9:0"])
        assert sorted((p["sample"], p["tokens"]) for p in given_up) == [("1:1:0", 1), ("1:1:2", 1)]
        assert desk.agent.work.requests.keys() == {*groups[0], "1:1:1", "1:2:0", "1:3:0"}
        await generate(desk, ["1:1:0", "1:1:2"], holder="n1")
        assert await submitted(desk) == {0: [], 1: ["1:1:0", "1:1:2"]}

    at_desk(tmp_path, scenario)


def test_an_environment_that_dies_is_there_again_for_the_next_answer(tmp_path):
    async def scenario(desk):
        await desk.call("start_worker", role="environment", device=0, python=None, env={"PYTHONPATH": f"{TESTS.parents[1]}:{TESTS}"},
                        device_kind="cpu", limit_s=60.0)
        await desk.call("open_environment", task={"name": "troubled_task:Troubled", "args": {"marker": str(tmp_path / "died")}}, seed=1,
                        limit_s=60.0)
        for index in (3, 0):  # the process dies of the first, once
            desk.agent.work.requests[f"1:{index}:0"] = {
                "worker": "n1-rollout-0", "split": "train", "prompt": b"", "at_tool": False, "answer": Trajectory(f"1:{index}:0", b"", b"", b"")}
        await asyncio.gather(*(desk.agent.work.sample_finished(f"1:{index}:0", b"", b"", "stop", 7) for index in (3, 0)))
        while len(desk.events) < 2:
            await asyncio.sleep(0.01)
        assert [(e["sample"], e["correct"], e["timed_out"]) for e in desk.events] == [("1:3:0", True, False), ("1:0:0", True, False)]
        assert [death["role"] for death in desk.deaths] == ["environment"]
        assert desk.agent.supervisor.workers["n1-environment-0"].attempt == 2

    at_desk(tmp_path, scenario)


# --- workers that hang

PART = "[{'sample': '1:0:0', 'start': 0, 'response': b'12345678', 'logprobs': b'12345678', 'version': 7}]"


class Prompts:
    """Stands for the environment."""

    async def prompts(self, split, indices):
        return dict.fromkeys(indices, b"2222")


async def generate(desk: Desk, *samples: str) -> None:
    desk.agent.work.verifier = Prompts()
    await desk.call("generate", requests=[{"sample": sample, "holder": None} for sample in samples], split="train", temperature=1.0,
                    seed=1, max_response_tokens=8, holders={})


def test_workers_that_stand_still_are_ended_with_a_reason(tmp_path):
    async def scenario(desk):
        roles = ["environment", "training"]
        for role in roles:
            await desk.start(role, hang_s=2.5)
        await asyncio.sleep(3.5)
        assert not desk.deaths, "one that sleeps does not hang"
        for role in roles:
            os.kill(desk.pid(role), signal.SIGSTOP)
        began = time.monotonic()
        while len(desk.deaths) < 2:
            await asyncio.sleep(0.01)
        assert 1.5 < time.monotonic() - began < 50.0
        assert sorted((death["role"], death["status"]) for death in desk.deaths) == [(role, "killed by SIGKILL") for role in roles]
        assert all(death["reason"].startswith("no sign of life for") for death in desk.deaths)

    at_desk(tmp_path, scenario)


def test_a_worker_that_is_ten_times_slower_is_left_alone(tmp_path):
    async def scenario(desk):
        await desk.start("rollout", hang_s=2.5)
        pid, until = desk.pid("rollout"), time.monotonic() + 5.0
        while time.monotonic() < until:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.27)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.03)
        assert not desk.deaths

    at_desk(tmp_path, scenario)


def test_a_worker_that_answers_and_gets_nothing_done_is_ended(tmp_path):
    async def scenario(desk):
        await desk.start("rollout", hang_s=2.0, submit="worker.emit('figures', tokens=3)")
        await generate(desk, "1:0:0")
        assert (await desk.death())["reason"].startswith("nothing of its work done for")

    at_desk(tmp_path, scenario)


def test_a_worker_that_builds_a_model_is_asked_only_to_use_the_processor(tmp_path):
    async def scenario(desk):
        busy = "sum(1 for _ in iter(lambda end=time.monotonic() + 3.0: time.monotonic() > end, True))"
        await desk.start("training", hang_s=1.5, build=busy, adopt="time.sleep(60)")
        await desk.worker("training", "build")
        assert not desk.deaths
        with pytest.raises(CallError, match="n1-training-0 died: killed by SIGKILL"):
            await desk.worker("training", "adopt")

    at_desk(tmp_path, scenario, "training")


def test_an_agent_that_stood_still_does_not_take_its_workers_for_hung(tmp_path):
    async def scenario(desk):
        await desk.start("rollout", hang_s=2.0)
        await asyncio.sleep(0.3)
        time.sleep(3.5)  # noqa: ASYNC251
        await asyncio.sleep(2.5)
        assert not desk.deaths

    at_desk(tmp_path, scenario)


def test_what_a_killed_worker_had_sampled_is_recorded_and_reported(tmp_path):
    async def scenario(desk):
        await desk.start("rollout", submit=f"worker.emit('parts', parts={PART})")
        await generate(desk, "1:0:0", "1:0:1")
        while not desk.agent.work.store.has_part("1:0:0"):
            await asyncio.sleep(0.01)
        os.kill(desk.pid("rollout"), signal.SIGKILL)
        assert (await desk.death())["held"] == ["1:0:0"]
        assert desk.agent.work.requests == {}
        held = desk.agent.work.store.get(["1:0:0"])[0]
        assert (held.prompt, held.response, held.version, held.finish) == (b"2222", b"12345678", 7, "abort")

    at_desk(tmp_path, scenario)


def test_a_part_of_a_request_that_is_gone_is_not_recorded(tmp_path):
    async def scenario(desk):
        await desk.start("rollout", abort=f"worker.emit('parts', parts={PART}) or []")
        await generate(desk, "1:0:0")
        desk.agent.work.requests.clear()  # it was offered to others
        await desk.worker("rollout", "abort")
        await desk.worker("rollout", "ping")
        assert len(desk.agent.work.store) == 0

    at_desk(tmp_path, scenario)


# --- giving back


@pytest.mark.parametrize("home, stuck", [("rollout", "abort"), ("training", "cancel"), ("training", "drain")])
def test_a_worker_that_keeps_its_work_is_ended_and_the_move_cancelled(tmp_path, home, stuck):
    async def scenario(desk):
        await desk.start(home, **{"cancel": "[]", stuck: "time.sleep(60)"})
        target = "training" if home == "rollout" else "rollout"
        await desk.call("prepare", plan=PLAN | {"moves": {"n1": target}})
        began = time.monotonic()
        with pytest.raises(CallError, match=f"n1-{home}-0: no answer to {stuck} within 1.5 s; it was ended"):
            await desk.call("quiesce", epoch=1, limit_s=1.5)
        assert time.monotonic() - began < 50.0
        death = await desk.death()
        assert death["reason"] == f"n1-{home}-0: no answer to {stuck} within 1.5 s"
        await desk.call("rollback", epoch=1)
        # The fresh worker gets work again.
        await desk.start(home)
        if home == "training":
            await desk.call("train", lease=2, devices=[0], samples=held(desk, "1:0:0"), holders={})
        else:
            await generate(desk, "1:0:0")

    at_desk(tmp_path, scenario, home)


def test_a_hand_out_that_does_not_end_does_not_keep_a_move_for_ever(tmp_path):
    async def scenario(desk):
        await desk.start("training", train="time.sleep(60)")
        stuck = asyncio.create_task(desk.call("train", lease=1, devices=[0], samples=held(desk, "1:0:0"), holders={}))
        await asyncio.sleep(0.1)
        await desk.call("prepare", plan=PLAN | {"moves": {"n1": "rollout"}})
        with pytest.raises(CallError, match="hand-outs did not end within 1.5 s; ended: n1-training-0"):
            await desk.call("quiesce", epoch=1, limit_s=1.5)
        assert (await desk.death())["reason"] == "a hand-out did not end within 1.5 s"
        with pytest.raises(CallError, match="n1-training-0 died"):
            await stuck

    at_desk(tmp_path, scenario, "training")


def test_a_late_roll_back_does_not_open_the_node_to_work_of_the_next_change(tmp_path):
    async def scenario(desk):
        await desk.start("training", cancel="[]")
        await desk.start("inference", sleep="time.sleep(0.5)")
        await desk.call("prepare", plan=PLAN | {"moves": {"n1": "inference"}})
        await desk.call("quiesce", epoch=1, limit_s=60.0)
        late = asyncio.create_task(desk.call("rollback", epoch=1))
        await asyncio.sleep(0.1)
        await desk.call("prepare", plan=PLAN | {"epoch": 2, "moves": {"n1": "inference"}})
        await desk.call("quiesce", epoch=2, limit_s=60.0)
        await late
        with pytest.raises(CallError, match="came while this node changes its role"):
            await desk.call("train", lease=1, devices=[0], samples=held(desk, "1:0:0"), holders={})

    at_desk(tmp_path, scenario, "training")


# --- lost messages


def test_events_that_the_network_swallowed_come_again_and_count_once(tmp_path):
    async def scenario(desk):
        await desk.link.beat("n1", "heartbeat")
        await asyncio.sleep(0.05)
        for index in range(3):
            desk.agent.work._leases[index] = {"leader": "w", "workers": {"w"}, "left": {"w"}, "found": {}}
        send, swallowed = desk.agent.controller._send_frames, []

        async def swallow(peer, *frames):
            swallowed.append(b"trained" in frames[-1])

        desk.agent.controller._send_frames = swallow
        desk.agent.work.lease_done("w", 0, "trained", {})
        desk.agent.work.lease_done("w", 1, "trained", {})
        while sum(swallowed) < 2:
            await asyncio.sleep(0.01)
        desk.agent.controller._send_frames = send
        desk.agent.work.lease_done("w", 2, "trained", {})
        while len(desk.events) < 3:
            await desk.link.beat("n1", "heartbeat")
            await asyncio.sleep(0.05)
        for _ in range(3):  # none comes twice
            await desk.link.beat("n1", "heartbeat")
            await asyncio.sleep(0.05)
        assert [event["lease"] for event in desk.events] == [0, 1, 2]

    at_desk(tmp_path, scenario, "training")
