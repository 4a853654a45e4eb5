"""Answers with tool calls at agents: real environment workers, a pretended rollout worker, the test as its engine."""

import asyncio

import pytest

pytest.importorskip("mpi4py")
pytest.importorskip("tokenizers")

from test_agent import PLAN, TESTS, Desk, NoMPI, at_desk  # noqa: E402
from tool_task import Waiting  # noqa: E402

from dynarl import wire  # noqa: E402
from dynarl.agent.agent import Agent  # noqa: E402
from dynarl.agent.orphan import ControllerWatch  # noqa: E402
from dynarl.tasks import tokenizer  # noqa: E402

CODEC = tokenizer.build(Waiting({"log": ""}, 1).symbols())
S = "1:0:0"


class Scene:
    """One or two nodes of a job with the task Waiting. `log` has a line per call that was really made."""

    def __init__(self, desk: Desk, directory):
        self.desk, self.directory, self.agents = desk, directory, {"n1": desk.agent}
        self.log = directory / "calls"

    async def call(self, node, method, /, **args):
        return await self.desk.link.call(node, method, timeout_s=60, **args)

    async def open(self, node="n1", **settings):
        await self.call(
            node,
            "start_worker",
            role="environment",
            device=0,
            python=None,
            device_kind="cpu",
            limit_s=60.0,
            env={"PYTHONPATH": f"{TESTS.parents[1]}:{TESTS}"},
        )
        task = {
            "name": "tool_task:Waiting",
            "args": {"log": str(self.log)},
            "max_tool_calls": 3,
            "tool_timeout_s": 60.0,
            "tool_workers": 1,
        }
        await self.call(node, "open_environment", task=task | settings, seed=1, limit_s=60.0)
        await self.start_rollout(node)

    async def start_rollout(self, node):
        await self.call(
            node,
            "start_worker",
            role="rollout",
            device=0,
            python=str(self.desk.python),
            device_kind="cpu",
            limit_s=60.0,
            env={"PRETEND_ABORT": "[]"},
        )

    async def second_node(self):
        scratch = self.directory / "n2"
        scratch.mkdir()
        first = self.desk.agent
        agent = self.agents["n2"] = Agent(
            node="n2",
            home="rollout",
            rank=1,
            remapper=NoMPI(),
            controller=first._controller_address,
            watch=ControllerWatch(self.directory / "journal.jsonl"),
            key_dir=self.directory / "keys",
            log_dir=self.directory / "logs",
            scratch=scratch,
            staging=scratch / "staging",
            host="127.0.0.1",
            mpi_library="",
            world_size=2,
        )
        self.desk.here.clear()
        agent.start()
        self.second = asyncio.create_task(agent.run())
        await self.desk.here.wait()

    async def close(self):
        if agent := self.agents.pop("n2", None):
            agent.request_stop()
            await self.second
            agent.close()

    async def generate(self, node="n1", holder=None, sample=S, most=40):
        holders = {n: a.peer_address for n, a in self.agents.items()}
        await self.call(
            node,
            "generate",
            requests=[{"sample": sample, "holder": holder}],
            split="train",
            temperature=1.0,
            seed=1,
            max_response_tokens=most,
            holders=holders,
            order="arrival",
        )

    async def submitted(self, count, node="n1"):
        """The requests that the rollout worker has got, once there are so many."""
        while True:
            calls = await self.call(node, "worker", role="rollout", device=0, method="calls", args={})
            requests = [request for name, args in calls if name == "submit" for request in args["requests"]]
            if len(requests) >= count:
                return requests
            await asyncio.sleep(0.02)

    def engine_says(self, text, node="n1", sample=S, finish="stop"):
        """The engine goes on with what stands at the agent; returns the task that deals with it."""
        work = self.agents[node].work
        answer = work.requests[sample]["answer"]
        new = CODEC.encode(text)
        return asyncio.create_task(
            work.sample_finished(
                sample,
                answer.response + wire.pack_ids(new),
                answer.rollout_logprobs + wire.pack_floats([-1.0] * len(new)),
                finish,
                7,
            )
        )

    async def calls_made(self, count):
        while not self.log.exists() or len(self.log.read_text().splitlines()) < count:
            await asyncio.sleep(0.01)
        return self.log.read_text().splitlines()

    def let_go(self):
        """End the call that waits for that."""
        self.log.with_name("calls.go").touch()

    async def finished(self):
        while not self.desk.events:
            await asyncio.sleep(0.01)
        return self.desk.events[-1]


def on_scene(tmp_path, scenario):
    async def run(desk):
        scene = Scene(desk, tmp_path)
        try:
            await scenario(scene)
        finally:
            await scene.close()

    at_desk(tmp_path, run)


def text_of(data: bytes) -> str:
    return CODEC.decode(wire.unpack_ids(data))


def test_the_engine_goes_on_behind_what_the_tool_answered(tmp_path):
    async def scenario(scene):
        await scene.open()
        await scene.generate()
        await scene.engine_says("<call>wait 0</call>")
        second = (await scene.submitted(2))[1]
        assert text_of(second["response"]) == "<call>wait 0</call><result>ok 1</result>"
        assert wire.unpack_floats(second["logprobs"]) == [-1.0] * 4 + [0.0] * 4
        assert second["masked_tokens"] == 4, "the engine reports lengths without them"
        assert (second["tool_calls"], second["order"]) == (1, "arrival") and second["stop_ids"] == CODEC.encode("</call>")
        await scene.engine_says("<call>wait 0.0</call>")
        third = (await scene.submitted(3))[2]
        assert text_of(third["response"]).endswith("<call>wait 0.0</call><result>ok 2</result>"), (
            "the tool's memory went along"
        )
        await scene.engine_says("end")
        event = await scene.finished()
        assert (event["tokens"], event["masked_tokens"], event["tool_calls"], event["finish"]) == (19, 8, 2, "stop")
        assert event["correct"] and event["tool_seconds"] > 0
        (answer,) = scene.desk.agent.work.store.get([S])
        assert answer.mask == bytes([1] * 4 + [0] * 4 + [1] * 6 + [0] * 4 + [1]) and answer.turns == 3

    on_scene(tmp_path, scenario)


def test_a_call_in_flight_when_its_node_leaves_is_made_once_and_its_result_goes_to_the_next_owner(tmp_path):
    async def scenario(scene):
        await scene.open()
        await scene.second_node()
        await scene.open("n2")
        await scene.generate()
        scene.engine_says("<call>wait go</call>")
        await scene.calls_made(1)
        await scene.call("n1", "prepare", plan=PLAN | {"moves": {"n1": "training"}})
        quiet = await scene.call("n1", "quiesce", epoch=1, limit_s=60.0)  # does not wait for the tool
        assert quiet["given_up"] == [{"sample": S, "tokens": 4, "masked_tokens": 0}]
        await scene.generate("n2", holder="n1")
        scene.let_go()
        (request,) = await scene.submitted(1, "n2")
        assert text_of(request["response"]) == "<call>wait go</call><result>ok 1</result>"
        assert await scene.calls_made(1) == ["go"] and not scene.desk.agent.work.requests
        await scene.engine_says("end", "n2")
        assert (await scene.finished())["tool_calls"] == 1
        assert (
            scene.agents["n2"].work.store.call(S, 0, wire.pack_ids(CODEC.encode("<call>wait go</call>"))) is not None
        )

    on_scene(tmp_path, scenario)


def test_an_answer_whose_tool_ends_in_a_move_that_is_cancelled_goes_on(tmp_path):
    """The node could give back nothing, and stays in rollout."""

    async def scenario(scene):
        await scene.open()
        await scene.generate()
        scene.engine_says("<call>wait go</call>")
        await scene.calls_made(1)
        await scene.call("n1", "prepare", plan=PLAN | {"moves": {"n1": "training"}})
        gate = scene.desk.agent.roles._gate
        await gate.close()
        scene.let_go()
        while not scene.desk.agent.work.requests[S]["answer"].tool_calls:
            await asyncio.sleep(0.01)
        assert scene.desk.agent.work.requests[S]["at_tool"]
        await scene.call("n1", "rollback", epoch=1)
        request = (await scene.submitted(2))[1]
        assert text_of(request["response"]) == "<call>wait go</call><result>ok 1</result>"

    on_scene(tmp_path, scenario)


def test_a_call_that_two_nodes_gave_back_in_turn_is_still_made_once(tmp_path):
    async def scenario(scene):
        await scene.open()
        await scene.second_node()
        await scene.open("n2")
        await scene.generate()
        scene.engine_says("<call>wait go</call>")
        await scene.calls_made(1)
        await scene.call("n1", "abort")
        await scene.generate("n2", holder="n1")
        await scene.call("n2", "abort")
        await scene.generate("n1", holder="n2")  # asks n2, which asks n1, where it is in flight
        scene.let_go()
        assert text_of((await scene.submitted(2))[1]["response"]).endswith("<result>ok 1</result>")
        assert await scene.calls_made(1) == ["go"]

    on_scene(tmp_path, scenario)


def test_what_came_of_a_call_is_given_back_with_the_answer(tmp_path):
    async def scenario(scene):
        await scene.open()
        await scene.generate()
        await scene.desk.agent.roles._gate.close()  # the role is about to change as the tool comes back
        says = scene.engine_says("<call>wait 0</call>")
        while not scene.desk.agent.work.requests[S]["answer"].tool_calls:
            await asyncio.sleep(0.01)
        assert len(await scene.submitted(1)) == 1, "nothing reaches the engine any more"
        assert await scene.call("n1", "abort") == [{"sample": S, "tokens": 8, "masked_tokens": 4}]
        scene.desk.agent.roles._gate.open()
        await says
        await scene.generate(holder="n1")
        again = (await scene.submitted(2))[1]
        assert text_of(again["response"]) == "<call>wait 0</call><result>ok 1</result>" and again["tool_calls"] == 1
        assert await scene.calls_made(1) == ["0"]

    on_scene(tmp_path, scenario)


def test_a_request_that_comes_twice_makes_its_call_once(tmp_path):
    async def scenario(scene):
        await scene.open(tool_workers=2)
        await scene.generate()
        first = scene.engine_says("<call>wait go</call>")
        second = scene.engine_says("<call>wait go</call>")  # the event delivered again
        await scene.calls_made(1)
        await scene.generate(holder="n1")  # the request delivered again
        scene.let_go()
        await asyncio.gather(first, second)
        assert len(await scene.submitted(2)) == 2
        await asyncio.sleep(0.2)
        assert await scene.calls_made(1) == ["go"] and len(await scene.submitted(2)) == 2

    on_scene(tmp_path, scenario)


def test_a_rollout_worker_that_dies_during_a_call_costs_neither_the_turn_nor_the_call(tmp_path):
    async def scenario(scene):
        await scene.open()
        await scene.generate()
        scene.engine_says("<call>wait go</call>")
        await scene.calls_made(1)
        with pytest.raises(wire.CallError):
            await scene.call("n1", "worker", role="rollout", device=0, method="die", args={})
        while not scene.desk.deaths:
            await asyncio.sleep(0.01)
        assert scene.desk.deaths[0]["held"] == [S], "so the controller knows where the turn is kept"
        await scene.start_rollout("n1")
        await scene.generate(holder="n1")
        scene.let_go()
        (request,) = await scene.submitted(1)
        assert text_of(request["response"]) == "<call>wait go</call><result>ok 1</result>"
        assert await scene.calls_made(1) == ["go"]

    on_scene(tmp_path, scenario)


@pytest.mark.parametrize("arguments", ["30", "die"])
def test_a_tool_that_hangs_or_dies_is_not_tried_again_and_the_model_is_told(tmp_path, arguments):
    async def scenario(scene):
        await scene.open(tool_timeout_s=2.0)
        await scene.generate()
        await scene.engine_says(f"<call>wait {arguments}</call>")
        assert (
            text_of((await scene.submitted(2))[1]["response"])
            == f"<call>wait {arguments}</call><result>error: no answer</result>"
        )
        await scene.engine_says("<call>wait 0</call>")
        assert text_of((await scene.submitted(3))[2]["response"]).endswith("<call>wait 0</call><result>ok 1</result>")
        assert await scene.calls_made(2) == [arguments, "0"]
        workers = scene.desk.agent.supervisor.workers
        assert (workers["n1-environment-0"].attempt, workers["n1-environment-1"].attempt) == (1, 2)

    on_scene(tmp_path, scenario)


def test_a_slow_tool_holds_up_neither_verdicts_nor_calls_of_other_workers(tmp_path):
    async def scenario(scene):
        await scene.open(tool_workers=2)
        for sample in (S, "1:1:0", "1:2:0"):
            await scene.generate(sample=sample)
        slow = scene.engine_says("<call>wait 50</call>")
        await scene.calls_made(1)
        await scene.engine_says("<call>wait 0</call>", sample="1:1:0")
        await scene.engine_says("end", sample="1:2:0")
        assert (await scene.finished())["sample"] == "1:2:0" and not slow.done()
        slow.cancel()

    on_scene(tmp_path, scenario)


@pytest.mark.parametrize("most_calls, most_tokens", [(1, 40), (3, 9)])
def test_an_answer_that_asks_for_one_call_too_many_or_has_no_room_is_cut(tmp_path, most_calls, most_tokens):
    async def scenario(scene):
        await scene.open(max_tool_calls=most_calls)
        await scene.generate(most=most_tokens)
        await scene.engine_says("<call>wait 0</call>")
        await scene.submitted(2)
        await scene.engine_says("</call>")  # the ninth token
        event = await scene.finished()
        assert (event["finish"], event["tool_calls"], event["tokens"]) == ("length", 1, 9)
        assert await scene.calls_made(1) == ["0"]

    on_scene(tmp_path, scenario)


def test_in_demonstrations_the_real_tool_answers_and_is_masked(tmp_path):
    async def scenario(scene):
        await scene.open()
        (demonstration,) = await scene.call("n1", "demonstrations", start=0, count=1)
        ids = wire.unpack_ids(demonstration["response"])
        assert (
            CODEC.decode(ids) == "<call>wait 0</call><result>ok 1</result><call>wait 0.0</call><result>ok 2</result>end"
        )
        assert ids[-1] == CODEC.eos_id and demonstration["mask"] == bytes(
            [1] * 4 + [0] * 4 + [1] * 6 + [0] * 4 + [1, 1]
        )
        await scene.call(
            "n1",
            "start_worker",
            role="training",
            device=0,
            python=str(scene.desk.python),
            env={},
            device_kind="cpu",
            limit_s=60.0,
        )
        await scene.call("n1", "demonstrate", lease=1, devices=[0], samples=[demonstration])
        calls = await scene.call("n1", "worker", role="training", device=0, method="calls", args={})
        (trained,) = [args["samples"][0] for name, args in calls if name == "train"]
        assert trained["mask"] == demonstration["mask"] and len(trained["mask"]) == len(ids)

    on_scene(tmp_path, scenario)
