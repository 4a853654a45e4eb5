"""What the controller does about model state when something goes wrong; workers and nodes are pretended."""

import asyncio
import contextlib
import json
import random
from types import SimpleNamespace

import pytest

from dynarl import rundir
from dynarl.config.degrees import Degrees
from dynarl.config.schema import Cluster, Config, Model, Policy, Split, Training
from dynarl.controller import initial_model
from dynarl.controller.checkpoints import Checkpoints
from dynarl.controller.epochs import Weights
from dynarl.controller.iteration import Iteration
from dynarl.controller.job import Job
from dynarl.controller.nodes import assign_homes
from dynarl.controller.recut import ATTEMPTS
from dynarl.controller.replicas import Replica
from dynarl.controller.transitions import Transitions
from dynarl.controller.workers import Workers
from dynarl.transport.planning import Request, describe
from dynarl.vps.train_layout import TrainLayout
from dynarl.wire import CallError

NODES = ["n1", "n2", "n3", "n4"]


class Records(list):
    def append(self, type_, **data):
        super().append({"type": type_, **data})

    def of(self, type_):
        return [record for record in self if record["type"] == type_]


class Fleet:
    """`answers`: {method: what it returns, or the exception that it raises, or a function of node and arguments}."""

    def __init__(self, **answers):
        self.agents = {node: SimpleNamespace(rank=rank, staging="/shm", host=node, peer_address=f"tcp://{node}:1")
                       for rank, node in enumerate(NODES)}
        self.answers, self.calls, self.listener = answers, [], None

    async def call(self, node, method, /, timeout_s=None, **args):
        self.calls.append((node, method, args))
        answer = self.answers.get(method)
        answer = answer(node, args) if callable(answer) else answer
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def call_each(self, nodes, method, /, timeout_s=None, **args):
        return {node: await self.call(node, method, **args) for node in nodes}

    async def worker(self, node, role, device, method, /, timeout_s=None, **args):
        return await self.call(node, f"{role}.{method}", device=device, **args)

    def nodes(self, method):
        return [node for node, name, _ in self.calls if name == method]


def job(tmp_path, config, fleet=None):
    homes = assign_homes(config, NODES[: config.cluster.nodes])
    made = Job(config, tmp_path, 1, homes, fleet or Fleet(), Records(), SimpleNamespace(), None)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return made


def checkpoint(tmp_path, **progress):
    (tmp_path / "saved").mkdir(exist_ok=True)
    (tmp_path / "saved" / "progress.json").write_text(json.dumps(progress))
    return tmp_path / "saved"


# --- layouts


GROWING = Config(training=Training(layouts={"2": "nodes=2", "4": "nodes=1"}))


def test_a_layout_that_was_refused_before_a_restart_is_not_forced_after_it(tmp_path):
    restarted = job(tmp_path, GROWING)
    restarted._rewind(checkpoint(tmp_path, iteration=3, layout=""))  # the configuration has wanted another since 2
    assert restarted.trainer.layout == restarted.trainer.layout_of(Degrees())
    assert restarted.trainer.owner_nodes == ["n1"] and restarted.progress.iteration == 3


def test_a_restart_goes_on_in_the_layout_of_its_checkpoint_and_its_nodes_have_the_roles_of_that(tmp_path):
    restarted = job(tmp_path, GROWING)
    restarted._rewind(checkpoint(tmp_path, iteration=3, layout="tp=1,pp=1,nodes=2"))
    assert restarted.home == {"n1": "training", "n2": "inference", "n3": "training", "n4": "rollout"}
    assert restarted.trainer.owners == [("n1", 0), ("n3", 0)] and restarted.trainer.borrowed_nodes == ["n2", "n4"]


def test_a_restart_on_too_few_nodes_for_the_layout_of_its_checkpoint_begins_in_the_first(tmp_path):
    config = Config(cluster=Cluster(nodes=2), split=Split(rollout=1, inference=0), training=GROWING.training)
    restarted = job(tmp_path, config)
    restarted._rewind(checkpoint(tmp_path, iteration=3, layout="tp=1,pp=1,nodes=2"))
    assert restarted.trainer.owner_nodes == ["n1"]


def test_workers_that_own_a_part_of_a_later_layout_and_lend_nothing_are_spare(tmp_path):
    static = Config(policy=Policy(name="static"), training=GROWING.training)
    started = job(tmp_path, static)
    started._rewind(None)
    assert started.trainer.spare == [("n3", 0)] and not started.trainer.borrowed
    started._rewind(checkpoint(tmp_path, layout="tp=1,pp=1,nodes=2"))
    assert started.trainer.spare == []


def test_a_layout_for_which_there_are_too_few_nodes_is_refused_once_and_the_job_goes_on(tmp_path):
    config = Config(cluster=Cluster(nodes=2), split=Split(rollout=1, inference=0), training=GROWING.training)
    started = job(tmp_path, config)
    started._rewind(None)
    for number in (1, 2, 3):
        asyncio.run(started.recut.before(number))
    cancelled = started.journal.of("layout_cancelled")
    assert [(r["iteration"], r["layout"]) for r in cancelled] == [(2, "tp=1,pp=1,nodes=2")]
    assert "nodes=2 for the trainer, but of 2 that train or generate 1 can" in cancelled[0]["reason"]


def test_a_layout_that_fails_is_tried_again_and_then_left(tmp_path):
    fleet = Fleet(**{"training.prepare_layout": CallError("no memory")})
    started = job(tmp_path, Config(training=Training(layouts={"2": "nodes=2"})), fleet)
    started._rewind(None)
    started.epochs = SimpleNamespace(home={}, roles=dict.fromkeys(NODES, "training"))
    for number in range(2, 9):
        asyncio.run(started.recut.before(number))
    assert len(started.journal.of("layout_cancelled")) == ATTEMPTS
    assert set(fleet.nodes("training.discard")) == {"n1", "n3"}, "also those that would have joined"


# --- transitions


def test_when_one_node_fails_all_drop_what_is_new_and_their_communicators(tmp_path):
    def run(node, args):
        return CallError("disk full") if node == "n2" else {"digests": {}}

    plan = {"digest": 1, "cached": True, "bytes_sent": 0}
    fleet = Fleet(prepare_transition=plan, run_transition=run)
    layout = describe(TrainLayout())
    request = Request({"preset": "x"}, layout, layout, ["param"], 2, 1)
    with pytest.raises(CallError, match="disk full"):
        asyncio.run(Transitions(fleet, NODES[:2]).carry_out(request))
    aborts = [(node, args["nodes"]) for node, method, args in fleet.calls if method == "abort_transition"]
    assert {node for node, _ in aborts} == {"n1", "n2"} and all(ranks == [0, 1] for _, ranks in aborts)


# --- checkpoints


class PretendTrainer:
    fails = True

    async def snapshot(self, directory):
        (directory / "state").mkdir()

    async def saved(self):
        if self.fails:
            raise CallError("OSError: [Errno 28] No space left on device")


def test_a_checkpoint_that_cannot_be_written_is_recorded_and_the_next_one_is_the_next_chance(tmp_path):
    saving = job(tmp_path, Config())
    saving.trainer, saving.progress.iteration = PretendTrainer(), 1
    saving.wake_owners = lambda: asyncio.sleep(0)

    async def run():
        checkpoints = Checkpoints(saving)
        await checkpoints.begin()
        await checkpoints.settle()
        assert rundir.newest_checkpoint(tmp_path) is None
        [failed] = saving.journal.of("checkpoint_failed")
        assert "No space left on device" in failed["reason"]
        saving.trainer.fails, saving.progress.iteration = False, 2
        await checkpoints.begin()
        await checkpoints.written()

    asyncio.run(run())
    assert rundir.newest_checkpoint(tmp_path) == rundir.checkpoint(tmp_path, 2)
    assert [r["iteration"] for r in saving.journal.of("checkpoint_saved")] == [2]
    assert (rundir.checkpoint(tmp_path, 2) / "model" / "config.json").exists()


# --- workers that are revived


def test_a_borrowed_worker_is_not_built_from_weights_that_come_and_go_meanwhile(tmp_path):
    fleet = Fleet(kill_workers=1, start_worker={"attempt": 2})
    running = job(tmp_path, Config(), fleet)
    running._rewind(None)
    running.epochs = SimpleNamespace(home={}, roles=running.trainer.home)
    running.staging.versions = dict.fromkeys(NODES, 7)
    running.trainer.join = lambda without: asyncio.sleep(0)
    workers = Workers(running)
    workers.down.add(("n3", "training"))

    async def run():
        async with running.staging.lock:
            revival = asyncio.ensure_future(workers._revive("n3", "training"))
            while "start_worker" not in [name for _, name, _ in fleet.calls]:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert not fleet.nodes("training.build"), "versions are dropped now"
            running.staging.versions["n3"] = 8
        await revival

    asyncio.run(run())
    [built] = [args for node, name, args in fleet.calls if name == "training.build"]
    assert built["version"] == 8 and built["model_dir"].endswith("v8")
    assert not workers.down


# --- leases of a replica on several nodes


def test_nodes_of_one_replica_get_its_leases_in_one_order():
    arrived = {"n1": [], "n2": []}
    draw = random.Random(3)

    async def train(node, args):
        await asyncio.sleep(draw.random() * 0.01)  # fetching the samples takes as long as it takes
        arrived[node].append(args["lease"])

    async def run():
        epochs = SimpleNamespace(home={}, roles={"n1": "training", "n2": "training"})
        replica = Replica((("n1", 0), ("n2", 0)))
        iteration = Iteration(
            Config(), Fleet(train=train), epochs, Weights(1, ""), {}, set(), ["1:0:0", "1:0:1"],
            replicas={"training": [replica], "inference": []},
        )  # fmt: skip
        await asyncio.gather(*(iteration.leases.send("train", lease, replica, []) for lease in range(12)))

    asyncio.run(run())
    assert arrived["n1"] == arrived["n2"] and sorted(arrived["n1"]) == list(range(12))


# --- the model that a run begins with


def given_model(directory):
    directory.mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (directory / name).write_text(name)
    return directory


def test_a_model_directory_that_was_left_half_written_is_written_again(tmp_path, monkeypatch):
    config = Config(model=Model(path=str(given_model(tmp_path / "given"))))
    (tmp_path / "run").mkdir()
    starting = SimpleNamespace(config=config, model_dir=tmp_path / "run" / "model")
    copy = initial_model.shutil.copyfile

    def dies(source, target):
        if source.name == "tokenizer.json":
            raise OSError("killed")
        copy(source, target)

    monkeypatch.setattr(initial_model.shutil, "copyfile", dies)
    with contextlib.suppress(OSError):
        asyncio.run(initial_model.write(starting))
    assert not starting.model_dir.exists()
    monkeypatch.setattr(initial_model.shutil, "copyfile", copy)
    asyncio.run(initial_model.write(starting))
    assert sorted(p.name for p in starting.model_dir.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert not (tmp_path / "run" / "model.part").exists()


# --- a step


@pytest.mark.parametrize("dies", ["before the step", "while owners step"])
def test_a_borrowed_worker_that_dies_beside_a_step_costs_no_sample(dies, tmp_path):
    """Before, its gradients are not in the step; meanwhile, they are."""

    def lose(node="n4", args=None):
        run.worker_lost("n4", "training")
        return {"grad_norm": 1.0, "lr": 0.1}

    async def scenario():
        nonlocal run
        started = job(tmp_path, Config(), Fleet(**{"training.step": lose}))
        started.epochs = SimpleNamespace(home={}, roles=dict.fromkeys(NODES, "training"))
        started._rewind(None)
        started.trainer.joined = started.trainer.everyone
        run = Iteration(started.config, started.fleet, started.epochs, Weights(1, ""), started.may, set(), ["1:0:0"],
                        scored_by_inference=False)
        run.ledger.dispatch("n3", ["1:0:0"])
        run.event_finished("n3", sample="1:0:0", reward=1.0, correct=True, timed_out=False, tokens=3, prompt_tokens=2,
                           finish="stop", version=1)
        (group,) = run.ledger.groups.values()
        run.ledger.accumulated(run.ledger.lease(group, "n4"))
        run.results.trained(group, {"loss": 0.0})
        if dies == "before the step":
            lose()
        await started._step(1, run, [group], last=True)
        return started.journal.of("step_committed")

    run = None
    if dies == "before the step":
        with pytest.raises(CallError, match="its gradient is not in this step"):  # from the newest checkpoint again
            asyncio.run(scenario())
    else:
        assert [record["samples"] for record in asyncio.run(scenario())] == [["1:0:0"]]
