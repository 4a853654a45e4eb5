"""The protocol of a change of roles, with agents that keep the same state as real ones but have no workers and no MPI."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import pytest
from pretend_cluster import VirtualTime

from dynarl.controller.epochs import Epochs, Weights
from dynarl.controller.fleet import Fleet, StepLost
from dynarl.hypergraph import journal
from dynarl.hypergraph.fold import fold
from dynarl.report.explain import entries
from dynarl.wire import CallError

HOME = {"n1": "rollout", "n2": "rollout", "n3": "inference", "n4": "training", "n5": "training"}
WEIGHTS = Weights(version=7, digest="c0ffee")
PHASES = ["prepare_ms", "vote_ms", "drain_ms", "transfer_ms", "verify_ms", "commit_ms"]


@dataclass
class Agent:
    """One node: its active role, the plan it has noted, what it would give up, and what its votes say ([] is yes)."""

    rank: int
    active: str
    plan: dict | None = None
    given_up: list = field(default_factory=list)
    unstarted: list = field(default_factory=list)
    refusal: str = ""
    votes: list[dict] = field(default_factory=list)
    stopped: bool = False


class Agents:
    """Stands for the fleet. `faults[node, method]` is raised instead of answering; `slow[method]` seconds pass before it answers."""

    call_each = Fleet.call_each

    def __init__(self):
        self.agents = {node: Agent(rank, role) for rank, (node, role) in enumerate(HOME.items())}
        self.calls: list[tuple[str, str]] = []
        self.faults: dict[tuple[str, str], Exception] = {}
        self.slow: dict[str, float] = {}

    async def call(self, node, method, /, timeout_s=None, **args):
        self.calls.append((method, node))
        await asyncio.sleep(self.slow.get(method, 0.0))
        if error := self.faults.get((node, method)):
            raise error
        return getattr(self, method)(node, self.agents[node], **args)

    def nodes(self, method: str) -> list[str]:
        return [node for name, node in self.calls if name == method]

    def prepare(self, node, agent, plan):
        agent.plan = plan
        return {"ready": not agent.refusal, "reason": agent.refusal}

    def vote(self, node, agent, epoch, limit_s):
        assert agent.plan["epoch"] == epoch
        return agent.votes.pop(0) if agent.votes else {"agreed": True, "ready": True, "same_digest": True}

    def quiesce(self, node, agent, epoch, limit_s):
        assert agent.plan["epoch"] == epoch
        agent.stopped = True
        return {"given_up": agent.given_up, "unstarted": agent.unstarted}

    def transfer(self, node, agent, epoch):
        assert agent.stopped, "weights before the old role had stopped"

    def commit(self, node, agent, epoch):
        agent.active, agent.plan, agent.stopped = agent.plan["moves"].get(node, agent.active), None, False

    def rollback(self, node, agent, epoch):
        agent.plan, agent.stopped = None, False


def on_epochs(tmp_path, scenario) -> list[dict]:
    """Run `scenario(epochs, agents)`; returns the journal's records of epochs."""

    async def go():
        epochs = Epochs(agents, log, HOME, vote_timeout_s=1.0, first_epoch=10)
        async with asyncio.timeout(10):
            await scenario(epochs, agents)

    agents, log = Agents(), journal.Journal(tmp_path / "journal.jsonl")
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(go())
    log.close()
    return [record for record in journal.read(tmp_path / "journal.jsonl") if record["type"].startswith("epoch_")]


def no(**answers) -> list[dict]:
    return [{"agreed": False, "ready": True, "same_digest": True} | answers]


YES = {"agreed": True, "ready": True, "same_digest": True}


def test_a_change_that_everybody_agrees_to_is_committed(tmp_path):
    async def scenario(epochs, agents):
        agents.slow = {"quiesce": 0.03, "transfer": 0.02}
        agents.agents["n1"].given_up = [{"sample": "1:0:0", "tokens": 3}]
        agents.agents["n3"].unstarted = [12]
        seen = []
        outcome = await epochs.change({"n1": "training", "n3": "training"}, WEIGHTS, "2 requests live", seen.append, lambda: 2)
        assert outcome.committed and outcome.epoch == epochs.epoch == 11
        assert epochs.roles == HOME | {"n1": "training", "n3": "training"}
        assert {node: agent.active for node, agent in agents.agents.items()} == epochs.roles
        assert seen == [outcome]
        assert outcome.given_up == {"n1": [{"sample": "1:0:0", "tokens": 3}], "n3": []}
        assert outcome.unstarted == {"n1": [], "n3": [12]}
        assert list(outcome.phases) == PHASES
        assert outcome.phases["drain_ms"] >= 30 and outcome.phases["transfer_ms"] >= 20
        # From the first stop on: what came before has stopped nothing.
        assert 50 <= outcome.pause_ms <= sum(outcome.phases[name] for name in PHASES[2:]) + 5

    records = on_epochs(tmp_path, scenario)
    assert [record["type"] for record in records] == ["epoch_proposed", "epoch_committed"]
    proposed, committed = records
    moves = [{"node": "n1", "source": "rollout", "target": "training"}, {"node": "n3", "source": "inference", "target": "training"}]
    assert (proposed["epoch"], proposed["moves"], proposed["reason"]) == (11, moves, "2 requests live")
    assert (committed["epoch"], committed["moves"]) == (11, moves)
    assert committed["roles"] == HOME | {"n1": "training", "n3": "training"}
    assert list(committed["phases"]) == PHASES
    assert committed["pause_ms"] >= 50
    assert (committed["given_up"], committed["live_requests"]) == (1, 2)


def test_moving_nodes_and_owners_take_part_and_nobody_else(tmp_path):
    async def scenario(epochs, agents):
        await epochs.change({"n1": "training"}, WEIGHTS, "")
        names = [method for method, _ in agents.calls]
        assert list(dict.fromkeys(names)) == ["prepare", "vote", "quiesce", "transfer", "commit"]
        everybody = ["n1", "n4", "n5"]
        assert agents.nodes("prepare") == agents.nodes("commit") == everybody
        assert agents.nodes("vote") == everybody * 2
        assert names.index("vote") < names.index("quiesce") < names.index("transfer") < len(names) - 1 - names[::-1].index("vote")
        assert agents.nodes("quiesce") == agents.nodes("transfer") == ["n1"]

    on_epochs(tmp_path, scenario)


def test_the_plan_names_ranks_moves_and_weights(tmp_path):
    async def scenario(epochs, agents):
        agents.commit = lambda node, agent, epoch: None
        await epochs.change({"n2": "training"}, WEIGHTS, "")
        assert agents.agents["n2"].plan == {"epoch": 11, "ranks": [1, 3, 4], "moves": {"n2": "training"}, "version": 7, "digest": "c0ffee"}
        assert agents.agents["n4"].plan == agents.agents["n2"].plan

    on_epochs(tmp_path, scenario)


def test_nodes_that_have_the_role_already_do_not_move(tmp_path):
    async def scenario(epochs, agents):
        outcome = await epochs.change({"n1": "rollout", "n4": "training"}, WEIGHTS, "")
        assert outcome.committed and agents.calls == [] and epochs.epoch == 10

    assert on_epochs(tmp_path, scenario) == []


CANCELLED = {
    "a refusal": ({"refusal": "n1 has no training worker"}, None, "n1 has no training worker"),
    "one that is not ready": ({"votes": no(ready=False)}, None, "a member was not ready before the move"),
    "another plan": ({"votes": no(same_digest=False)}, None, "members disagree on the plan before the move"),
    "a call that fails": ({}, ("prepare", CallError("n1: the step has ended")), "the step has ended"),
    "a vote that nobody came to": ({}, ("vote", TimeoutError("n1: no answer to vote within 3 s")), "no answer to vote"),
}


@pytest.mark.parametrize("state, fault, reason", CANCELLED.values(), ids=CANCELLED)
def test_before_the_vote_is_through_nothing_is_touched(tmp_path, state, fault, reason):
    async def scenario(epochs, agents):
        for name, value in state.items():
            setattr(agents.agents["n1"], name, value)
        if fault:
            agents.faults["n1", fault[0]] = fault[1]
        seen = []
        outcome = await epochs.change({"n1": "training"}, WEIGHTS, "", seen.append)
        assert not outcome.committed and reason in outcome.reason
        assert epochs.roles == HOME and seen == []
        assert not agents.nodes("quiesce") and not agents.nodes("transfer") and not agents.nodes("commit")
        assert agents.nodes("rollback") == ["n1", "n4", "n5"]
        assert all(agent.plan is None for agent in agents.agents.values())
        # And the next one is free to go.
        agents.agents["n1"].refusal, agents.faults = "", {}
        assert (await epochs.change({"n1": "training"}, WEIGHTS, "")).committed

    records = on_epochs(tmp_path, scenario)
    assert [record["type"] for record in records] == ["epoch_proposed", "epoch_cancelled", "epoch_proposed", "epoch_committed"]
    assert [record["epoch"] for record in records] == [11, 11, 12, 12]
    assert reason in records[1]["reason"] and records[1]["rolled_back"] is False


ROLLED_BACK = {
    "a transfer that fails": ({}, ("transfer", CallError("ValueError: no such file")), "no such file"),
    "weights that differ": ({"votes": [YES, *no(ready=False)]}, None, "a member was not ready after the transfer"),
    "another plan": ({"votes": [YES, *no(same_digest=False)]}, None, "members disagree on the plan after the transfer"),
    "a transfer without an end": ({}, ("transfer", TimeoutError("n1: no answer to transfer within 3 s")), "no answer to transfer"),
}


@pytest.mark.parametrize("state, fault, reason", ROLLED_BACK.values(), ids=ROLLED_BACK)
def test_after_the_stop_a_failure_rolls_back_and_what_was_given_up_is_returned(tmp_path, state, fault, reason):
    async def scenario(epochs, agents):
        agents.agents["n1"].given_up = [{"sample": "1:0:0", "tokens": 3}, {"sample": "1:0:1", "tokens": 0}]
        for name, value in state.items():
            setattr(agents.agents["n1"], name, value)
        if fault:
            agents.faults["n1", fault[0]] = fault[1]
        returned = []
        outcome = await epochs.change({"n1": "training"}, WEIGHTS, "", lambda o: returned.extend(o.given_up["n1"]))
        assert not outcome.committed and reason in outcome.reason
        assert epochs.roles == HOME
        assert {node: agent.active for node, agent in agents.agents.items()} == HOME
        assert [partial["sample"] for partial in returned] == ["1:0:0", "1:0:1"]
        assert agents.nodes("rollback") == ["n1", "n4", "n5"] and not agents.nodes("commit")

    records = on_epochs(tmp_path, scenario)
    assert [record["type"] for record in records] == ["epoch_proposed", "epoch_cancelled"]
    assert reason in records[1]["reason"] and records[1]["rolled_back"] is True


def test_what_others_gave_up_is_returned_when_one_node_cannot_stop(tmp_path):
    async def scenario(epochs, agents):
        agents.agents["n1"].given_up = [{"sample": "1:0:0", "tokens": 3}]
        agents.agents["n3"].unstarted = [12]
        agents.faults["n2", "quiesce"] = CallError("n2-rollout-0 died: killed by SIGKILL")
        seen = []
        outcome = await epochs.change(dict.fromkeys(("n1", "n2", "n3"), "training"), WEIGHTS, "", seen.append)
        assert not outcome.committed and "n2-rollout-0 died" in outcome.reason
        assert seen == [outcome]
        assert outcome.given_up == {"n1": [{"sample": "1:0:0", "tokens": 3}], "n3": []}
        assert outcome.unstarted == {"n1": [], "n3": [12]}
        assert not agents.nodes("transfer")

    assert on_epochs(tmp_path, scenario)[-1]["rolled_back"] is True


def test_a_member_that_cannot_even_roll_back_does_not_keep_the_others(tmp_path):
    async def scenario(epochs, agents):
        agents.faults = {("n4", "prepare"): CallError("n4 is gone"), ("n4", "rollback"): CallError("n4 is gone")}
        assert not (await epochs.change({"n1": "training"}, WEIGHTS, "")).committed
        assert agents.agents["n1"].plan is agents.agents["n5"].plan is None

    assert [record["type"] for record in on_epochs(tmp_path, scenario)] == ["epoch_proposed", "epoch_cancelled"]


def test_a_commit_that_reaches_only_some_ends_the_step(tmp_path):
    async def scenario(epochs, agents):
        agents.faults["n5", "commit"] = TimeoutError("n5: no answer to commit within 3 s")
        with pytest.raises(StepLost, match="epoch 11 was agreed on, but not everybody heard of it: n5: no answer"):
            await epochs.change({"n1": "training"}, WEIGHTS, "")
        assert not agents.nodes("rollback")

    assert [record["type"] for record in on_epochs(tmp_path, scenario)] == ["epoch_proposed"]


def test_changes_take_turns(tmp_path):
    async def scenario(epochs, agents):
        agents.slow = dict.fromkeys(("prepare", "vote", "quiesce", "transfer", "commit"), 0.005)
        outcomes = await asyncio.gather(*(epochs.change({node: "training"}, WEIGHTS, "") for node in ("n1", "n2", "n1")))
        assert [outcome.epoch for outcome in outcomes] == [11, 12, 12]  # the third had nothing left to do
        assert Counter(method for method, _ in agents.calls)["prepare"] == 6
        order = [method for method, _ in agents.calls]
        assert order.index("commit") < len(order) - 1 - order[::-1].index("prepare")
        assert [method for method in order if method in ("prepare", "commit")] == ["prepare"] * 3 + ["commit"] * 3 + ["prepare"] * 3 + ["commit"] * 3

    records = on_epochs(tmp_path, scenario)
    assert [(record["type"], record["epoch"]) for record in records] == [
        ("epoch_proposed", 11), ("epoch_committed", 11), ("epoch_proposed", 12), ("epoch_committed", 12)]


def test_a_move_that_is_asked_for_while_weights_are_on_their_way_is_refused(tmp_path):
    async def scenario(epochs, agents):
        async with epochs.weights_in_transit():
            outcome = await epochs.change({"n1": "training"}, WEIGHTS, "")
            assert not outcome.committed and outcome.reason == "weights are on their way to the nodes"
            assert agents.calls == []
        assert (await epochs.change({"n1": "training"}, WEIGHTS, "")).committed

    assert [record["type"] for record in on_epochs(tmp_path, scenario)] == ["epoch_proposed", "epoch_committed"]


def test_weights_wait_for_a_change_that_is_under_way(tmp_path):
    async def scenario(epochs, agents):
        agents.slow = {"transfer": 0.02}
        change = asyncio.create_task(epochs.change({"n1": "training"}, WEIGHTS, ""))
        await asyncio.sleep(0.005)
        async with epochs.weights_in_transit():
            assert change.done() and epochs.roles["n1"] == "training"

    on_epochs(tmp_path, scenario)


def test_a_node_counts_in_its_new_role_only_after_everybody_has_committed(tmp_path):
    async def scenario(epochs, agents):
        agents.slow = dict.fromkeys(("quiesce", "transfer", "commit"), 0.01)
        change = asyncio.create_task(epochs.change({"n1": "training"}, WEIGHTS, ""))
        while not change.done():
            assert epochs.roles == HOME or len(agents.nodes("commit")) == 3
            before = dict(epochs.roles)
            await asyncio.sleep(0.001)
        assert before == HOME, "it was a trainer before the commit was answered"

    on_epochs(tmp_path, scenario)


def test_giving_back_has_a_deadline(tmp_path):
    async def scenario(epochs, agents):
        seen = []
        quiesce = agents.quiesce
        agents.quiesce = lambda node, agent, epoch, limit_s: seen.append(limit_s) or quiesce(node, agent, epoch, limit_s)
        assert (await epochs.change({"n1": "training"}, WEIGHTS, "")).committed
        assert seen == [60.0]

    on_epochs(tmp_path, scenario)


def test_going_home_is_on_record(tmp_path):
    async def scenario(epochs, agents):
        agents.slow = {"transfer": 0.02}
        change = asyncio.create_task(epochs.change({"n1": "training"}, WEIGHTS, ""))
        await asyncio.sleep(0.005)
        await epochs.go_home()
        assert (await change).committed  # it was under way, and came before
        assert epochs.roles == HOME

    assert on_epochs(tmp_path, scenario)[-1]["roles"] == HOME


def test_moves_that_would_break_a_rule_are_refused_before_anybody_is_asked(tmp_path):
    async def scenario(epochs, agents):
        epochs._journal.append("step_launched", step=0, nodes=list(HOME))
        for node, home in HOME.items():
            epochs._journal.append("agent_up", node=node, rank=0, home=home)
            for role in (home, "training"):
                epochs._journal.append("worker_up", node=node, role=role, device=0)
        both = {"n1": "training", "n2": "training"}
        for _ in range(3):
            outcome = await epochs.change(both, WEIGHTS, "few are left", live=lambda: 4)
            assert not outcome.committed and outcome.reason == "4 requests are live, but no node has the role rollout"
        assert agents.calls == [] and epochs.roles == HOME and epochs.epoch == 10
        assert (await epochs.change(both, WEIGHTS, "none are left", live=lambda: 0)).committed

    refused, proposed, committed = on_epochs(tmp_path, scenario)  # one record of the refusal, though it was asked thrice
    assert (refused["type"], refused["reason"]) == ("epoch_refused", "few are left")
    assert refused["broken"] == ["4 requests are live, but no node has the role rollout"]
    assert [move["node"] for move in refused["moves"]] == ["n1", "n2"]
    assert (proposed["epoch"], committed["epoch"]) == (11, 11)


def test_a_node_that_switches_by_itself_is_on_record_in_a_line_whose_length_is_that_of_one_node(tmp_path):
    """Every node writes several in every iteration, of jobs with a thousand nodes."""
    lengths = []
    for number in (2, 1000):
        home = {f"n{index:04d}": "rollout" for index in range(number)}
        log = journal.Journal(tmp_path / f"{number}.jsonl")
        for node, role in home.items():
            log.append("agent_up", node=node, home=role)
        epochs = Epochs(Agents(), log, dict(home), 1.0)
        before = log.path.stat().st_size
        outcome = epochs.switched("n0001", "training", {"sleep_ms": 1.23456, "load_ms": 2.0})
        lengths.append(log.path.stat().st_size - before)
        assert outcome.committed and outcome.pause_ms == pytest.approx(3.23456)
        assert log.graph.roles == epochs.roles == home | {"n0001": "training"} and log.graph.faults == []
        log.close()
    assert lengths[1] <= lengths[0] + 8 < 300  # its own number is longer


def test_the_writer_of_a_long_journal_keeps_the_newest_change_only(tmp_path):
    log = journal.Journal(tmp_path / "journal.jsonl")
    log.append("agent_up", node="n1", home="rollout")
    epochs = Epochs(Agents(), log, {"n1": "rollout"}, 1.0)
    for number in range(50):
        epochs.switched("n1", "training" if number % 2 == 0 else "rollout", {"load_ms": 1.0})
    assert [epoch.number for epoch in log.graph.epochs] == [50] and len(log.graph.spans["n1"]) == 1
    log.close()
    whole = fold(journal.read(log.path))
    assert len(whole.committed) == 50 and len(whole.spans["n1"]) == 51 and whole.faults == []
    assert (whole.roles, whole.epoch, whole.last_number) == ({"n1": "rollout"}, 50, 50)
    assert [(entry.kind, entry.result()) for entry in entries(journal.read(log.path))][-1][0] == "roles"
