"""The state of a rank as logical pieces, in one process: views of live storage, digests, counters, a move."""

import gc
import os
import random
import weakref

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron")

import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402
from tiny_model import write_model  # noqa: E402

from dynarl import wire  # noqa: E402
from dynarl.config.schema import Config, Model  # noqa: E402
from dynarl.roles.training.shard import Shard  # noqa: E402
from dynarl.roles.training.state import Bound, State, _inside, digest_on_device, digest_view  # noqa: E402
from dynarl.roles.training.torch_world import World, leave_world  # noqa: E402
from dynarl.roles.training.trainer import Trainer  # noqa: E402
from dynarl.transport.memory import pieces, read  # noqa: E402
from dynarl.vps.box import volume  # noqa: E402
from dynarl.vps.digest import digest_box  # noqa: E402
from dynarl.vps.plan import plan_transition  # noqa: E402
from dynarl.vps.train_layout import TrainLayout  # noqa: E402

ALONE = TrainLayout(vocab_divisible_by=1)
KINDS = ("param", "master", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def world():
    yield World(dist.HashStore(), "w", 0, torch.device("cpu"), 60.0)
    leave_world()


@pytest.fixture(scope="module", params=["Qwen2ForCausalLM", "Qwen3MoeForCausalLM"])
def model_dir(request, tmp_path_factory):
    return write_model(str(tmp_path_factory.mktemp("model")), family=request.param, vocab_size=49)


def build(model_dir, world, dtype="float32"):
    return Trainer(Config(model=Model(dtype=dtype)), model_dir, world, ALONE, owner=True)


def train(trainer, num_steps, seed=0):
    draw = random.Random(seed)
    for _ in range(num_steps):
        sample = {
            "sample": "a",
            "prompt": wire.pack_ids([draw.randrange(48) for _ in range(4)]),
            "response": wire.pack_ids([draw.randrange(48) for _ in range(20)]),
        }
        trainer.begin("sft")
        trainer.train([[sample]])
        trainer.step(20, 1e-2)


def contents(bound):
    """Copies of everything, by kind and place."""
    return {
        (kind, tensor, box): view.clone() for kind in bound.kinds for tensor, box, view, _ in bound.pieces(kind)
    }


def prepared(trainer, name):
    trainer.connect(name, ALONE, ALONE)
    trainer.prepare(10.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_next_shard_has_no_memory_until_it_is_to_be_filled_and_then_trains_on_bitwise(model_dir, world, dtype):
    trainer = build(model_dir, world, dtype)
    train(trainer, 2)
    prepared(trainer, f"a-{dtype}-{model_dir}")
    assert all(buffer.param_data.untyped_storage().nbytes() == 0 for buffer in trainer.next.buffers)
    trainer.allocate(trainer.scalars())
    state, plan = trainer.state(), plan_transition(trainer.arch.spec, ALONE, ALONE, kinds=KINDS)
    state.copy_local(plan.local(0))
    digests = trainer.digests()
    assert digests["source"] == digests["target"] and digests["source"]["step"]
    before = contents(state.source)
    trainer.adopt()
    after = contents(Bound(trainer.shard))
    assert set(before) == set(after) and all(torch.equal(before[key], after[key]) for key in before)
    other = build(model_dir, world, dtype)
    for each in (trainer, other):
        train(each, 2, seed=1 if each is trainer else 0)
    train(other, 2, seed=1)
    assert all(torch.equal(trainer.params[name], value) for name, value in other.params.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_left_of_what_the_memory_of_the_next_shard_held_before(model_dir, world, dtype, monkeypatch):
    allocate = Shard.allocate

    def reused(shard):
        allocate(shard)
        for tensor in [*shard._large(), *(moment for each in shard.optimizers for moment in moments_of(each))]:
            tensor.fill_(float("nan"))

    monkeypatch.setattr(Shard, "allocate", reused)
    padded = TrainLayout(vocab_divisible_by=32)
    trainer = Trainer(Config(model=Model(dtype=dtype)), model_dir, world, padded, owner=True)
    train(trainer, 2)
    before = {name: value.clone() for name, value in trainer.params.items()}
    trainer.connect(f"d-{dtype}-{model_dir}", padded, padded)
    trainer.prepare(10.0)
    trainer.allocate(trainer.scalars())
    plan = plan_transition(trainer.arch.spec, padded, padded, kinds=KINDS)
    trainer.state().copy_local(plan.local(0))
    trainer.adopt()
    assert trainer.params["embedding.word_embeddings.weight"].shape[0] == 64 > trainer.arch.spec.vocab
    assert all(torch.equal(trainer.params[name], value) for name, value in before.items())
    moments = [moment for each in trainer.shard.optimizers for moment in moments_of(each)]
    assert moments and all(moment.isfinite().all() for moment in moments)
    assert not any(sums.any() for sums in trainer.gradient_buffers())
    train(trainer, 1)


@pytest.mark.parametrize("adopted", [True, False])
def test_memory_of_the_shard_that_is_left_is_free_at_once_and_not_when_python_looks_for_circles(model_dir, world, adopted):
    trainer = build(model_dir, world, "bfloat16")
    train(trainer, 1)
    prepared(trainer, f"b-{adopted}-{model_dir}")
    trainer.allocate(trainer.scalars())
    trainer.state().copy_local(plan_transition(trainer.arch.spec, ALONE, ALONE, kinds=KINDS).local(0))
    left = trainer.shard if adopted else trainer.next
    gc.disable()
    try:
        moments = [weakref.ref(view) for each in left.optimizers for view in moments_of(each)]
        trainer.adopt() if adopted else trainer.discard()
        assert moments and not any(moment() is not None for moment in moments)
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in left._large())
    finally:
        gc.enable()
    train(trainer, 1, seed=1)


def moments_of(optimizer):
    return [value for state in optimizer.optimizer.state.values() for name, value in state.items() if name != "step"]


def test_a_message_is_its_fragments_row_by_row_at_whatever_address(model_dir, world):
    trainer = build(model_dir, world, "bfloat16")
    train(trainer, 1)
    bound, state = Bound(trainer.shard), State(trainer.shard, trainer.shard)
    index = trainer.arch.spec.index
    norm, down = index["model.norm.weight"], index["model.layers.1.self_attn.o_proj.weight"]
    # An odd number of two-byte values first: what follows begins in the middle of a four-byte word.
    fragments = [("param", norm, ((3, 6),)), ("exp_avg", down, ((2, 7), (1, 30))), ("master", norm, ((0, 1),))]
    sizes = [3 * 2, 5 * 29 * 4, 4]
    out = bytearray(sum(sizes) + 1)
    state.pack(fragments, memoryview(out)[1:])
    [(_, view)] = bound.covering(*fragments[1])
    assert bytes(out[1 + 6 : 1 + 6 + sizes[1]]) == view.contiguous().numpy().tobytes()
    expected = {fragment[0]: bound.covering(*fragment)[0][1].clone() for fragment in fragments}
    for fragment in fragments:
        bound.covering(*fragment)[0][1].zero_()
    state.unpack(fragments, memoryview(bytes(out))[1:])
    assert all(torch.equal(bound.covering(*fragment)[0][1], expected[fragment[0]]) for fragment in fragments)
    with pytest.raises(KeyError, match="neither held"):
        state.pack([("param", norm, ((60, 65),))], memoryview(bytearray(10)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_neighbour_reads_in_place_is_what_would_have_been_packed(model_dir, world, dtype):
    trainer = build(model_dir, world, dtype)
    train(trainer, 1)
    state, spec = State(trainer.shard, trainer.shard), trainer.arch.spec
    for kind in KINDS:
        for tensor, logical in enumerate(spec.tensors):
            rows, *columns = logical.shape
            box = ((rows // 3, rows), *((1, size) for size in columns))
            fragment = (kind, tensor, box)
            packed = bytearray(volume(box) * spec.itemsize(kind))
            state.pack([fragment], memoryview(packed))
            out = np.zeros(len(packed), np.uint8)
            for arriving in (False, True):
                out[:] = 0
                spans = state.spans([fragment], arriving)
                read(os.getpid(), pieces(spans), np.array([[out.ctypes.data, len(out)]]))
                assert out.tobytes() == bytes(packed)


def test_every_parameter_counts_its_steps_in_a_tensor_of_its_own(model_dir, world):
    """One tensor for all, which Megatron's optimizer has after it has loaded a checkpoint, is counted up by each."""
    trainer = build(model_dir, world)
    train(trainer, 1)
    Bound(trainer.shard).set_scalars({"steps": {"dense": 5, "expert": 5}, "lr": 0.25})
    train(trainer, 1)
    states = [state for each in trainer.shard.optimizers for state in each.optimizer.state.values()]
    assert len({state["step"].data_ptr() for state in states}) == len(states) > 10
    assert {float(state["step"]) for state in states} == {6.0}
    assert set(Bound(trainer.shard).scalars()["steps"].values()) == {6}


def test_counters_that_disagree_are_refused_and_change_the_digest(model_dir, world):
    trainer = build(model_dir, world)
    train(trainer, 2)
    bound = Bound(trainer.shard)
    before = bound.digests()
    next(iter(trainer.shard.optimizers[0].optimizer.state.values()))["step"].zero_()
    assert {key for key, value in bound.digests().items() if value != before[key]} == {"step"}
    with pytest.raises(ValueError, match="steps"):
        bound.scalars()


def test_looking_at_the_state_before_the_first_step_changes_nothing(model_dir, world):
    """Adam has no moments then. They are made as zeros, which is what it would have made."""
    looked_at, untouched = build(model_dir, world), build(model_dir, world)
    bound = Bound(looked_at.shard)
    assert set(bound.scalars()["steps"].values()) == {0}
    assert not any(view.any() for kind in ("exp_avg", "exp_avg_sq") for _, _, view, _ in bound.pieces(kind))
    for trainer in (looked_at, untouched):
        train(trainer, 2)
    assert all(torch.equal(looked_at.params[name], value) for name, value in untouched.params.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_is_the_same_whatever_the_cuts_and_wherever_it_is_computed(dtype):
    draw = random.Random(0)
    values = torch.randn(23, 17, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = digest_view("w", "master", ((0, 23), (0, 17)), values)
    for _ in range(20):
        row, column = draw.randrange(1, 23), draw.randrange(1, 17)
        boxes = [((a, b), (c, d)) for a, b in ((0, row), (row, 23)) for c, d in ((0, column), (column, 17))]
        parts = [digest_view("w", "master", box, values[slice(*box[0]), slice(*box[1])]) for box in boxes]
        assert sum(parts) % 2**64 == whole
        a, b = (tuple(map(int, np.unravel_index(draw.randrange(23 * 17), (23, 17)))) for _ in range(2))
        swapped = values.clone()
        swapped[a], swapped[b] = values[b], values[a]
        assert (digest_view("w", "master", ((0, 23), (0, 17)), swapped) == whole) == (values[a] == values[b]).item()
    bits = values.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).numpy()
    box = ((0, 23), (0, 17))
    assert digest_box("w", "master", box, bits) == whole != digest_box("v", "master", box, bits)
    assert digest_on_device("w", "master", box, torch.from_numpy(bits)) == whole
    row = digest_view("w", "master", ((4, 21),), values[4:21, 0])
    assert digest_on_device("w", "master", ((4, 21),), torch.from_numpy(bits[4:21, 0])) == row


def test_the_cells_of_a_box_in_an_interval_are_found_by_rectangles():
    draw = random.Random(0)
    for _ in range(300):
        columns = draw.randint(1, 6)
        top, left, start = draw.randint(0, 4), draw.randrange(columns), draw.randint(0, 30)
        bottom, right, stop = draw.randint(top + 1, 8), draw.randint(left + 1, columns), draw.randint(start + 1, 40)
        expected = {
            (r, c)
            for r in range(top, bottom)
            for c in range(left, right)
            if start <= r * columns + c < stop
        }  # fmt: skip
        found = [
            (r, c)
            for r0, r1, c0, c1 in _inside(top, bottom, left, right, columns, start, stop)
            for r in range(r0, r1)
            for c in range(c0, c1)
        ]
        assert len(found) == len(set(found)) and set(found) == expected
