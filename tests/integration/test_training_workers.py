"""Training and inference workers as processes: between them, and when leases are taken back or a worker is gone."""

import signal
import time

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron")

import trainers  # noqa: E402
from machine import cpu_seconds  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_model import write_model  # noqa: E402
from worker_harness import Harness  # noqa: E402

from dynarl import wire  # noqa: E402
from dynarl.config.schema import Algorithm  # noqa: E402

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """Directory, model, scored batches, two training workers. The first test wants them fresh, the last kills one."""
    directory = tmp_path_factory.mktemp("workers")
    model_dir = write_model(str(directory / "v0"), vocab_size=trainers.VOCAB + 1)
    batches = trainers.recorded()[:2]
    with Harness(directory) as harness:
        trainers.score(harness, model_dir, batches)
        yield directory, model_dir, batches, [harness.start("training_worker", f"t{i}") for i in range(2)]


@pytest.fixture(autouse=True)
def no_events_of_earlier_tests(stage):
    for worker in stage[3]:
        worker.events()


def test_a_call_out_of_order_says_what_is_missing(stage):
    _, model_dir, batches, workers = stage
    with pytest.raises(wire.CallError, match="build has not been called"):
        workers[0].call("begin", step=0, loss="grpo")
    trainers.Fleet(workers[:1], 1, model_dir)
    with pytest.raises(wire.CallError, match="join_reduction has not been called"):
        workers[0].call("reduce", members=[[0]])
    with pytest.raises(wire.CallError, match="'12345' is not HOST:PORT"):
        workers[0].call("join_reduction", store="12345", name="r", rank=0, size=1)


def test_tensor_parallel_workers_agree_on_what_was_cancelled_though_they_hear_of_it_at_different_times(stage):
    directory, model_dir, batches, workers = stage
    trainers.Fleet(workers, 2, model_dir, tp=2)
    trainers.together(workers, "begin", step=0, loss="grpo")
    leader, follower = workers
    leases = {lease: batches[0][3 * lease : 3 * lease + 3] for lease in range(4)}
    # The leader has been told to give two back before the follower has seen any. It can be past the first lease no
    # earlier than the follower, so those two are always untouched.
    for lease, samples in leases.items():
        leader.post("train", lease=lease, samples=samples)
    cancelled, drained = leader.post("cancel", leases=[1, 3]), leader.post("drain")
    time.sleep(0.2)
    for lease, samples in leases.items():
        follower.post("train", lease=lease, samples=samples)
    # The follower drains before it hears of the cancellation: the leader's word holds.
    assert follower.call("drain") == [0, 2] == leader.reply(drained)
    assert leader.reply(cancelled) == [1, 3]
    follower.call("cancel", leases=[1, 3])
    assert [event["lease"] for event in leader.events("trained")] == [0, 2]
    total = sum(s["weight"] * len(s["response"]) / 4 for lease in (0, 2) for s in leases[lease])
    partial = trainers.together(workers, "step", global_tokens=total, lr=1e-3)[0]["grad_norm"]
    alone = trainers.Fleet(workers[:1], 1, model_dir).step(0, [(0, leases[0] + leases[2])], str(directory / "v1"))
    assert partial == pytest.approx(alone["grad_norm"], rel=1e-5)


def test_gradients_of_borrowed_workers_are_gone_after_the_reduction(stage):
    """Else a worker that lends itself twice in one iteration would add its first gradients a second time."""
    directory, model_dir, batches, workers = stage
    trainers.Fleet(workers, 1, model_dir)
    trainers.together(workers, "begin", step=0, loss="grpo")
    workers[1].call("train", lease=0, samples=batches[0])
    trainers.together(workers, "drain")
    tokens = workers[1].wait_event("trained")["stats"]["tokens"]
    trainers.together(workers, "reduce", members=[[0, 1]])
    trainers.together(workers, "reduce", members=[[0, 1]])
    once = workers[0].call("step", global_tokens=tokens, lr=1e-3)["grad_norm"]
    alone = trainers.Fleet(workers[:1], 1, model_dir).step(0, [(0, batches[0])], str(directory / "v1"))
    assert once == pytest.approx(alone["grad_norm"], rel=1e-5)


def test_models_that_differ_are_not_added_up(stage):
    directory, model_dir, batches, workers = stage
    other = write_model(str(directory / "other"), hidden_size=32, vocab_size=trainers.VOCAB + 1)
    settings = msgspec.to_builtins(trainers.config())
    store = workers[0].call("serve_store", host="127.0.0.1")
    for rank, path in enumerate([model_dir, other]):
        workers[rank].call(
            "build",
            config=settings,
            store=store,
            world=f"w{rank}",
            rank=0,
            size=1,
            owner=rank == 0,
            model_dir=path,
            version=0,
        )
    trainers.together(workers, "join_reduction", [dict(rank=0), dict(rank=1)], store=store, name="r", size=2)
    posted = [worker.post("reduce", members=[[0, 1]]) for worker in workers]
    for worker, call in zip(workers, posted):
        with pytest.raises(wire.CallError, match="laid out"):
            worker.reply(call)


def test_tensor_parallel_export_is_bitwise_what_was_loaded(stage):
    directory, model_dir, _, workers = stage
    fleet = trainers.Fleet(workers, 2, model_dir, tp=2)
    trainers.together(fleet.owners, "export", model_dir=str(directory / "copy"), version=0)
    before, after = load_file(f"{model_dir}/model.safetensors"), load_file(directory / "copy" / "model.safetensors")
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)


def test_an_idle_worker_uses_no_cpu(stage):
    _, model_dir, _, workers = stage
    trainers.Fleet(workers, 1, model_dir)
    time.sleep(0.3)
    before = cpu_seconds(workers[0].process.pid)
    time.sleep(5.0)
    assert cpu_seconds(workers[0].process.pid) - before < 0.5  # the threads of process groups wake now and then


def test_logprobs_of_two_tensor_parallel_inference_workers_equal_those_of_one(tmp_path):
    model_dir = write_model(str(tmp_path / "v0"), vocab_size=trainers.VOCAB + 1)
    batch = trainers.recorded()[0]
    settings = trainers.config(tp=2)
    settings.algorithm = Algorithm(temperature=0.7)
    results = []
    with Harness(tmp_path) as harness:
        workers = [harness.start("dynarl.roles.inference.worker", f"i{i}") for i in range(2)]
        store = workers[0].call("serve_store", host="127.0.0.1")
        for tp in (1, 2):
            settings.training.tp = tp
            config = msgspec.to_builtins(settings)
            some = workers[:tp]
            trainers.together(
                some,
                "build",
                [dict(rank=r) for r in range(tp)],
                config=config,
                store=store,
                world=f"w{tp}",
                size=tp,
                model_dir=model_dir,
                version=0,
            )
            trainers.together(some, "logprobs", lease=7, samples=batch)
            scored = [worker.wait_event("scored") for worker in some]
            assert all(answer["ref_logprobs"] is None and answer["lease"] == 7 for answer in scored)
            results.append([v for s in batch for v in wire.unpack_floats(scored[0]["logprobs"][s["sample"]])])
    assert len(results[0]) == sum(len(s["response"]) // 4 for s in batch)
    assert max(abs(a - b) for a, b in zip(*results)) < 1e-5


def test_a_worker_that_stands_still_in_a_collective_keeps_the_others_no_longer_than_the_configuration_says(stage):
    _, model_dir, _, workers = stage
    fleet = trainers.Fleet(workers, 2, model_dir, collective_s=2.0)
    trainers.together(fleet.owners, "begin", step=0, loss="grpo")
    workers[1].process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(wire.CallError):
            workers[0].call("step", global_tokens=1.0, lr=0.0)
        assert 1.5 < time.monotonic() - began < 60.0
    finally:
        workers[1].process.send_signal(signal.SIGCONT)


def test_a_reduction_with_a_dead_worker_fails_at_once_and_a_new_group_works(stage):
    directory, model_dir, batches, workers = stage
    fleet = trainers.Fleet(workers, 1, model_dir)
    fleet.step(0, [(0, batches[0][:6]), (1, batches[0][6:])], str(directory / "v1"))
    owner, borrowed = workers
    borrowed.process.kill()
    borrowed.process.wait()
    began = time.monotonic()
    with pytest.raises(wire.CallError):
        owner.call("reduce", members=[[0, 1]], timeout_s=120)
    assert time.monotonic() - began < 60
    store = owner.call("serve_store", host="127.0.0.1")
    owner.call("join_reduction", store=store, name="again", rank=0, size=1)
    owner.call("begin", step=1, loss="grpo")
    owner.call("train", lease=0, samples=batches[1])
    owner.call("drain")
    owner.call("reduce", members=[[0]])
    assert owner.call("step", global_tokens=owner.wait_event("trained")["stats"]["tokens"], lr=1e-3)["grad_norm"] > 0
