"""Roles of a node that take turns at its devices: the real agent and lock, workers that only pretend."""

import asyncio

import pytest
from test_agent import Desk, at_desk, held

from dynarl.wire import CallError

ORDER = ["rollout", "inference", "training"]
WEIGHTS = {role: {"version": 7, "digest": "c0ffee"} for role in ORDER}
LOADS = {"load": "{'digest': 'c0ffee'}", "cancel": "[]"}


class SharingDesk(Desk):
    def __init__(self, *args):
        super().__init__(*args)
        self.switched = []

    def event_switched(self, peer, source, target, phases):
        self.switched.append((source, target))
        assert set(phases) == {"sleep_ms", "load_ms"} and min(phases.values()) >= 0

    event_scored = Desk.event_finished

    async def share(self):
        await self.call("share", order=ORDER, weights=WEIGHTS)

    def hand_out(self, method, lease, sample):
        return asyncio.create_task(self.call(method, lease=lease, devices=[0], samples=held(self, sample), holders={}))


def shared(directory, scenario, home="inference"):
    at_desk(directory, scenario, home, SharingDesk)


def scored(desk, lease):
    """What the inference worker says when it is done."""
    desk.agent.work.lease_done("n1-inference-0", lease, "scored", {"logprobs": {s: b"1234" for s in ("1:0:0", "1:1:0")}})


def test_a_hand_out_waits_until_the_role_before_it_is_done_and_memory_is_released_first(tmp_path):
    async def scenario(desk):
        for role in ("inference", "training"):
            await desk.start(role, **LOADS)
        await desk.share()
        await desk.hand_out("score", 1, "1:0:0")
        train = desk.hand_out("train", 2, "1:1:0")
        await asyncio.sleep(0.1)
        assert not train.done() and desk.switched == [] and desk.agent.roles.active == "inference"
        scored(desk, 1)
        await train
        assert desk.switched == [("inference", "training")] and desk.agent.roles.active == "training"
        assert len(await desk.calls("inference", "sleep")) == len(await desk.calls("training", "wake")) == 1
        assert [args["version"] for args in await desk.calls("training", "load")] == [7]
        await desk.hand_out("train", 3, "1:1:0")  # no second switch

    shared(tmp_path, scenario)


def test_what_is_further_up_goes_first(tmp_path):
    async def scenario(desk):
        for role in ORDER:
            await desk.start(role, **LOADS)
        await desk.share()
        await desk.hand_out("score", 1, "1:0:0")
        train = desk.hand_out("train", 2, "1:1:0")
        await asyncio.sleep(0.05)
        score = desk.hand_out("score", 3, "1:1:0")
        await asyncio.sleep(0.05)
        assert not score.done(), "others wait, so it waits too"
        scored(desk, 1)
        await score
        assert not train.done()
        scored(desk, 3)
        await train
        assert desk.switched == [("inference", "training")]

    shared(tmp_path, scenario)


def test_a_worker_that_dies_frees_the_devices(tmp_path):
    async def scenario(desk):
        for role in ("inference", "training"):
            await desk.start(role, **LOADS)
        await desk.share()
        await desk.hand_out("score", 1, "1:0:0")
        train = desk.hand_out("train", 2, "1:1:0")
        await asyncio.sleep(0.05)
        with pytest.raises(CallError):
            await desk.worker("inference", "die")
        await train
        assert desk.switched == [("inference", "training")]

    shared(tmp_path, scenario)


@pytest.mark.parametrize("fault, message", [({"load": "{'digest': 'other'}"}, "has read other weights"), ({"wake": "1 / 0"}, "ZeroDivisionError")])
def test_a_switch_that_fails_leaves_the_devices_to_the_role_that_had_them(tmp_path, fault, message):
    async def scenario(desk):
        await desk.start("inference", **LOADS)
        await desk.start("training", **LOADS | fault)
        await desk.share()
        with pytest.raises(CallError, match=message):
            await desk.hand_out("train", 1, "1:0:0")
        assert desk.switched == [] and desk.agent.roles.active == "inference"
        assert len(await desk.calls("inference", "wake")) == len(await desk.calls("training", "sleep")) == 1
        await desk.hand_out("score", 2, "1:0:0")

    shared(tmp_path, scenario)


@pytest.mark.parametrize("role, method", [("training", "sleep"), ("inference", "wake")])
def test_a_worker_that_fails_as_a_switch_is_undone_is_ended_and_the_first_error_is_told(role, method, tmp_path):
    """What it holds of the device nobody could say; the controller starts another one."""

    async def scenario(desk):
        faults = {role: {method: "1 / 0"}}
        await desk.start("inference", **LOADS | faults.get("inference", {}))
        await desk.start("training", **LOADS | {"load": "{}['weights']"} | faults.get("training", {}))
        await desk.share()
        with pytest.raises(CallError, match="KeyError: 'weights'"):
            await desk.hand_out("train", 1, "1:0:0")
        death = await desk.death()
        assert death["role"] == role and f"it could not {method} when a change of roles was undone" in death["reason"]
        assert "ZeroDivisionError" in death["reason"]
        assert desk.switched == [] and desk.agent.roles.active == "inference"
        if role == "training":
            assert len(await desk.calls("inference", "wake")) == 1
        else:
            await desk.start("inference", **LOADS)
        await desk.hand_out("score", 2, "1:0:0")

    shared(tmp_path, scenario)


def test_a_hand_out_that_fails_after_the_rest_is_done_keeps_nobody_from_the_devices(tmp_path):
    async def scenario(desk):
        await desk.start("inference", **LOADS, logprobs="time.sleep(0.3) or 1 / 0 if args['lease'] == 2 else None")
        await desk.start("training", **LOADS)
        await desk.share()
        await desk.hand_out("score", 1, "1:0:0")
        failing = desk.hand_out("score", 2, "1:1:0")
        await asyncio.sleep(0.1)
        scored(desk, 1)
        with pytest.raises(CallError, match="ZeroDivisionError"):
            await failing
        async with asyncio.timeout(5):
            await desk.hand_out("train", 3, "1:1:0")

    shared(tmp_path, scenario)


def test_when_roles_take_no_turns_any_more_those_that_wait_are_refused_and_what_was_begun_goes_on(tmp_path):
    async def scenario(desk):
        for role in ("inference", "training"):
            await desk.start(role, **LOADS)
        await desk.share()
        await desk.hand_out("score", 1, "1:0:0")
        train = desk.hand_out("train", 2, "1:1:0")
        await asyncio.sleep(0.05)
        assert await desk.call("unshare") == "inference"
        with pytest.raises(CallError, match="do not take turns"):
            await train
        scored(desk, 1)
        await asyncio.sleep(0.05)
        assert [event["lease"] for event in desk.events] == [1] and desk.switched == []
        await desk.share()
        await desk.call("take", role="training")
        assert desk.switched == [("inference", "training")]

    shared(tmp_path, scenario)


@pytest.mark.parametrize("back", [True, False], ids=["and is back", "and is not back"])
def test_a_hand_out_whose_worker_dies_while_it_waits_does_not_reach_the_next_one(back, tmp_path):
    """The controller has offered it to others: its gradient would count twice."""

    async def scenario(desk):
        for role in ("inference", "training"):
            await desk.start(role, **LOADS)
        await desk.share()
        await desk.hand_out("score", 1, "1:0:0")
        train = desk.hand_out("train", 2, "1:1:0")
        await asyncio.sleep(0.1)
        with pytest.raises(CallError):
            await desk.worker("training", "die")
        if not back:
            while "n1-training-0" in desk.agent.supervisor.workers:
                await asyncio.sleep(0.01)
            late = desk.hand_out("train", 3, "1:1:0")
            await asyncio.sleep(0.1)
        await desk.start("training", **LOADS)
        scored(desk, 1)
        with pytest.raises(CallError, match="died while its work was on the way"):
            await train
        if not back:
            with pytest.raises(CallError, match="n1-training-0 not running"):
                await late
        assert await desk.calls("training", "train") == [] and desk.switched == []
        await desk.hand_out("train", 4, "1:1:0")
        assert [args["lease"] for args in await desk.calls("training", "train")] == [4]

    shared(tmp_path, scenario)
