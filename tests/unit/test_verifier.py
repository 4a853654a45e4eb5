"""The verifier on a real environment worker, kept as an agent keeps it."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from troubled_task import DIES, DIES_ONCE, GOOD, HANGS, NO_NUMBER, OTHER_NUMBER, RAISES

from dynarl import wire
from dynarl.agent.supervisor import Supervisor
from dynarl.agent.tools import ToolSeat
from dynarl.agent.verifier import NO_VERDICT, Verdict, Verifier
from dynarl.rpc import Link

ROOT = Path(__file__).parents[2]
NAME = "n1-environment-0"


class Node:
    """The part of an agent that has to do with its environment worker. `seen`: attempts of the workers that were started."""

    def __init__(self, directory: Path, timeout_s: float):
        self.context = zmq.asyncio.Context()
        socket = self.context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        address = f"ipc://{directory}/agent.sock"
        socket.bind(address)
        self.link = Link(socket, self, routed=True)
        self.server = asyncio.create_task(self.link.serve())
        self.supervisor = Supervisor("n1", address, directory, self.worker_died)
        self.verifier = Verifier(self.call, self.restart, timeout_s)
        self.task = {"name": "troubled_task:Troubled", "args": {"marker": str(directory / "died")}}
        self.seen = []

    def event_up(self, peer, role, pid):
        self.supervisor.workers[peer].up.set_result(None)

    def worker_died(self, worker, status, tail):
        self.verifier.process_died()
        self.link.peer_gone(worker.name, f"{worker.name} died: {status}")
        self.link.spawn(self.verifier.revive())

    async def call(self, method, /, timeout_s=None, **args):
        if NAME not in self.supervisor.workers:
            raise wire.CallError(f"{NAME} is not running")
        return await self.link.call(NAME, method, timeout_s=timeout_s, **args)

    async def restart(self):
        if worker := self.supervisor.workers.get(NAME):
            worker.expected_to_end = True
            self.supervisor.kill(NAME)
        while NAME in self.supervisor.workers:
            await asyncio.sleep(0.01)
        env = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/unit"}
        worker = self.supervisor.start("environment", 0, python=None, env=env, device_kind="cpu")
        self.seen.append(worker.attempt)
        await worker.up
        await self.call("open", task=self.task, seed=1)

    async def score(self, index):
        return await self.verifier.score(f"1:{index}:0", "train", index, wire.pack_ids([]))

    async def close(self):
        await self.supervisor.stop_all(grace_s=0.0)
        self.server.cancel()
        self.context.destroy(linger=0)


def on_node(directory: Path, scenario, timeout_s: float = 60.0) -> None:
    async def go():
        node = Node(directory, timeout_s)
        try:
            async with asyncio.timeout(150):
                await node.restart()
                await scenario(node)
        finally:
            await node.close()

    asyncio.run(go())


RIGHT = Verdict(1.0, True)


def test_a_verifier_that_hangs_scores_nothing_and_is_replaced_for_the_next(tmp_path):
    async def scenario(node):
        verdicts = await asyncio.gather(*(node.score(index) for index in (GOOD, HANGS, GOOD)))
        assert verdicts == [RIGHT, NO_VERDICT, RIGHT]
        assert NO_VERDICT == Verdict(0.0, False, timed_out=True)
        assert node.seen == [1, 2, 3]  # it hangs in a batch, and then alone
        assert len(node.supervisor.workers) == 1

    on_node(tmp_path, scenario, timeout_s=2.5)


def test_trouble_with_one_answer_costs_no_other_of_its_batch(tmp_path):
    async def scenario(node):
        indices = [GOOD] * 9 + [RAISES, GOOD, DIES, GOOD, HANGS, GOOD]
        verdicts = await asyncio.gather(*(node.score(index) for index in indices))
        assert verdicts == [RIGHT if index == GOOD else NO_VERDICT for index in indices]
        assert len(node.supervisor.workers) == 1

    on_node(tmp_path, scenario, timeout_s=2.5)


def test_an_answer_on_which_it_dies_twice_scores_nothing_and_the_next_is_scored(tmp_path):
    async def scenario(node):
        assert await node.score(DIES) == NO_VERDICT
        assert await node.score(GOOD) == RIGHT
        assert node.seen == [1, 2, 3]

    on_node(tmp_path, scenario)


def test_an_answer_that_was_with_a_process_that_died_is_asked_again(tmp_path):
    async def scenario(node):
        assert await asyncio.gather(*(node.score(index) for index in (DIES_ONCE, GOOD))) == [RIGHT, RIGHT]
        assert node.seen == [1, 2]

    on_node(tmp_path, scenario)


def test_a_process_that_dies_idle_costs_no_answer(tmp_path):
    async def scenario(node):
        os.kill(node.supervisor.workers[NAME].process.pid, signal.SIGKILL)
        while node.seen == [1]:
            await asyncio.sleep(0.005)
        assert await asyncio.gather(*(node.score(GOOD) for _ in range(3))) == [RIGHT] * 3
        assert list(await node.verifier.prompts("train", [GOOD])) == [GOOD]
        assert node.seen == [1, 2]

    on_node(tmp_path, scenario)


def test_a_verifier_that_raises_scores_nothing_and_stays(tmp_path, caplog):
    async def scenario(node):
        assert await asyncio.gather(*(node.score(index) for index in (RAISES, GOOD))) == [NO_VERDICT, RIGHT]
        assert node.seen == [1]

    on_node(tmp_path, scenario)
    assert "no verdict on 1:4:0: ValueError: not a number" in caplog.text


def test_a_reward_that_is_no_number_costs_no_other_answer_of_its_batch(tmp_path):
    async def scenario(node):
        indices = [GOOD, GOOD, NO_NUMBER, GOOD, OTHER_NUMBER, GOOD]
        verdicts = await asyncio.gather(*(node.score(index) for index in indices))
        assert verdicts == [RIGHT, RIGHT, NO_VERDICT, RIGHT, Verdict(0.5, True), RIGHT]
        assert node.seen == [1]

    on_node(tmp_path, scenario)


# --- without a process


def all_right(answers: list[dict]) -> list[dict]:
    return [{"sample": answer["sample"], "reward": 1.0, "correct": True} for answer in answers]


def scripted(answers: dict, restarts: list | None = None) -> tuple[Verifier, list]:
    """A verifier whose process gives `answers` by method. Returns it and the calls it made."""
    calls = []

    async def call(method, timeout_s=None, **args):
        calls.append((method, args))
        await asyncio.sleep(0)
        return answers[method](**args) if callable(answers[method]) else answers[method]

    async def restart():
        if restarts and (error := restarts.pop(0)):
            raise error

    return Verifier(call, restart, 1.0), calls


def test_prompts_are_asked_for_once():
    verifier, calls = scripted({"prompts": lambda split, indices: [{"index": i, "prompt": b"%d" % i} for i in indices]})

    async def scenario():
        assert await verifier.prompts("train", [3, 1, 3]) == {3: b"3", 1: b"1"}
        assert await verifier.prompts("train", [1, 2]) == {1: b"1", 2: b"2"}
        assert await verifier.prompts("eval", [1]) == {1: b"1"}
        verifier.forget_prompts()
        assert await verifier.prompts("train", [1]) == {1: b"1"}

    asyncio.run(scenario())
    assert [args for _, args in calls] == [
        {"split": "train", "indices": [1, 3]}, {"split": "train", "indices": [2]}, {"split": "eval", "indices": [1]},
        {"split": "train", "indices": [1]}]


def test_answers_that_wait_are_judged_together_and_in_order():
    verifier, calls = scripted({"score": all_right})

    async def scenario():
        await asyncio.gather(*(verifier.score(f"1:{index}:0", "train", index, b"") for index in range(200)))

    asyncio.run(scenario())
    batches = [[answer["index"] for answer in args["answers"]] for _, args in calls]
    assert [len(batch) for batch in batches] == [1, 2, 4, 8, 16, 32, 64, 64, 9]
    assert sum(batches, []) == list(range(200))


def slow(monkeypatch) -> tuple[Verifier, list]:
    """As `scripted`: every verdict takes 0.2 of the limit, on a clock of its own."""
    clock = [0.0]
    monkeypatch.setattr("dynarl.agent.verifier.time.monotonic", lambda: clock[0])

    def judge(answers):
        clock[0] += 0.2 * len(answers)
        return all_right(answers)

    return scripted({"score": judge})


def test_batches_of_slow_verdicts_stay_within_one_answers_limit(monkeypatch):
    """A verdict takes 0.2 of the limit: two together take more than is thought quick, and no batch comes near the limit."""
    verifier, calls = slow(monkeypatch)

    async def scenario():
        await asyncio.gather(*(verifier.score(f"1:{index}:0", "train", index, b"") for index in range(8)))

    asyncio.run(scenario())
    assert [len(args["answers"]) for _, args in calls] == [1, 2, 1, 2, 1, 1]


def test_verdicts_that_came_one_at_a_time_say_nothing_of_many_together(monkeypatch):
    verifier, calls = slow(monkeypatch)

    async def scenario():
        for index in range(8):
            await verifier.score(f"1:{index}:0", "train", index, b"")
        await asyncio.gather(*(verifier.score(f"1:{index}:1", "train", index, b"") for index in range(8)))

    asyncio.run(scenario())
    assert max(len(args["answers"]) for _, args in calls) == 2


def test_a_call_that_fails_with_many_answers_is_made_with_each_of_them():
    def fails(answers):
        if any(answer["index"] == 5 for answer in answers):
            raise wire.CallError("no such answer")
        return all_right(answers)

    verifier, _ = scripted({"score": fails})

    async def scenario():
        return await asyncio.gather(*(verifier.score(f"1:{index}:0", "train", index, b"") for index in range(8)))

    assert asyncio.run(scenario()) == [NO_VERDICT if index == 5 else RIGHT for index in range(8)]


def test_an_answer_behind_one_whose_asker_is_just_going_away_gets_its_verdict():
    answers = {"score": all_right}
    verifier, _ = scripted(answers)

    async def scenario():
        def prompts(**_):
            going.cancel()
            return [{"index": 1, "prompt": b""}]

        async def next_one():
            await verifier.prompts("train", [1])
            return await verifier.score("1:1:0", "train", 1, b"")

        answers["prompts"] = prompts
        asked = asyncio.create_task(next_one())
        going = asyncio.create_task(verifier.score("1:0:0", "train", 0, b""))
        return await asked

    assert asyncio.run(scenario()) == RIGHT


def test_an_answer_whose_asker_goes_away_holds_nobody_up():
    verifier, calls = scripted({"score": all_right})

    async def scenario():
        asked = [asyncio.create_task(verifier.score(f"1:{index}:0", "train", index, b"")) for index in range(4)]
        await asyncio.sleep(0)
        for index in (0, 2):
            asked[index].cancel()
        assert await asyncio.gather(asked[1], asked[3]) == [RIGHT, RIGHT]
        assert await verifier.score("1:4:0", "train", 4, b"") == RIGHT

    asyncio.run(scenario())
    assert [answer["index"] for _, args in calls for answer in args["answers"]][-1] == 4


@pytest.mark.parametrize("fails, verdict", [(1, RIGHT), (2, NO_VERDICT)])
def test_a_restart_that_fails_is_tried_again_and_every_answer_gets_a_verdict(fails, verdict):
    restarts = [RuntimeError("ended before it was ready")] * fails + [None]
    verifier, calls = scripted({"score": all_right}, restarts)

    async def scenario():
        verifier.process_died()
        assert await verifier.score("1:0:0", "train", 0, b"") == verdict
        assert await verifier.score("1:0:1", "train", 0, b"") == RIGHT
        assert restarts == []

    asyncio.run(scenario())


def test_after_an_answer_at_which_it_hangs_a_restart_that_fails_is_tried_again():
    def hang(**_):
        answers["score"] = all_right
        raise TimeoutError

    answers, restarts = {"score": hang}, [RuntimeError("ended before it was ready"), None]
    verifier, _ = scripted(answers, restarts)

    async def scenario():
        assert await verifier.score("1:0:0", "train", 0, b"") == NO_VERDICT
        assert await verifier.score("1:0:1", "train", 0, b"") == RIGHT
        assert restarts == []

    asyncio.run(scenario())


def test_a_tool_whose_process_does_not_come_up_gives_no_answer():
    async def restart():
        raise RuntimeError("ended before it was ready")

    seat = ToolSeat(None, restart, 1.0)
    seat.process_died()
    assert asyncio.run(seat.answer(b"", b"")) is None
