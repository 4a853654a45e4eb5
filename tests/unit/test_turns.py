"""What the controller gives nodes whose roles take turns by themselves."""

import asyncio
from types import SimpleNamespace

import pytest

from dynarl.controller import turns as turns_module
from dynarl.controller.epochs import Weights
from dynarl.controller.replicas import Replica
from dynarl.controller.turns import Turns
from dynarl.dataflow.ledger import Ledger
from dynarl.wire import CallError


class Fleet:
    def __init__(self):
        self.calls, self.answers = [], {}

    async def call(self, node, method, /, timeout_s=None, **args):
        self.calls.append((node, method, args))
        if (answer := self.answers.get(method)) == "silence":
            async with asyncio.timeout(timeout_s):
                await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def call_each(self, nodes, method, /, **args):
        return {node: await self.call(node, method, **args) for node in nodes}


def turns(**roles):
    """And the ledger and leases that it looks at."""
    ledger, leases = Ledger(["1:0:0", "1:1:0"]), SimpleNamespace(at={})
    return Turns(Fleet(), SimpleNamespace(roles=roles), ledger, leases, ["rollout", "inference", "training"]), ledger, leases


def test_while_the_weights_change_a_node_in_another_role_gets_no_work():
    made, *_ = turns(n1="rollout", n2="inference")
    made.give({"n1": "inference"})
    assert made.take_work("inference") == ["n1", "n2"] and made.take_work("rollout") == []
    before = made.num_changes
    made.hold_still()
    assert made.take_work("inference") == ["n2"] and made.num_changes > before, "what was found before does not hold"
    asyncio.run(made.begin({"inference": Weights(3, "d")}))
    assert made.take_work("inference") == ["n1", "n2"]
    assert made._fleet.calls[0] == ("n1", "share", {
        "order": ["rollout", "inference", "training"], "weights": {"inference": {"version": 3, "digest": "d"}}})


def test_a_node_with_a_request_or_a_lease_is_not_free():
    made, ledger, leases = turns(n1="rollout", n2="inference", n3="training")
    ledger.dispatch("n1", ["1:0:0"])
    leases.at[1] = ("inference", Replica((("n2", 0),)))
    assert made.free() == ["n3"] and made.are_settled()
    assert made.only_free({"n1": "training", "n3": "training"}) == {"n3": "training"}


@pytest.mark.parametrize("role", ["rollout", "inference"])
def test_a_node_that_was_given_work_of_another_role_than_it_is_in_is_about_to_switch(role):
    made, ledger, leases = turns(n1="training")
    if role == "rollout":
        ledger.dispatch("n1", ["1:0:0"])
    else:
        leases.at[1] = (role, Replica((("n1", 0),)))
    assert not made.are_settled()


def test_the_end_is_told_to_everybody_also_where_an_agent_is_gone():
    made, *_ = turns(n1="rollout", n2="rollout")
    made._fleet.answers["unshare"] = CallError("n1 is gone")
    asyncio.run(made.end())
    assert [node for node, method, _ in made._fleet.calls if method == "unshare"] == ["n1", "n2"]
    made._fleet.answers["unshare"] = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(made.end())


def test_the_end_does_not_wait_for_an_agent_that_is_silent_for_ever(monkeypatch):
    """Its node is lost; who ends the turns is about to start the step again."""
    monkeypatch.setattr(turns_module, "END_S", 0.01)
    made, *_ = turns(n1="rollout", n2="rollout")
    made._fleet.answers["unshare"] = "silence"

    async def end():
        async with asyncio.timeout(60):
            await made.end()

    asyncio.run(end())
