"""Training does not depend on the layout, and goes on in another one as if nothing had happened.

Real worker processes on this machine, gloo between them. A run of one rank is compared with runs that move between
layouts in the middle: masters, moments and counters are the same bit by bit at the switch, losses and gradient norms
afterwards up to the order of additions. And the digests notice a state that is not the same.
"""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron")

import trainers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_model import write_model  # noqa: E402
from trainers import layout  # noqa: E402
from worker_harness import Harness  # noqa: E402

from dynarl import wire  # noqa: E402
from dynarl.roles.training import checkpoint  # noqa: E402
from dynarl.transport.files import CheckpointReader  # noqa: E402
from dynarl.transport.hf import read_spec  # noqa: E402
from dynarl.transport.messages import Fragment  # noqa: E402
from dynarl.vps.box import volume  # noqa: E402

pytestmark = pytest.mark.integration
TOLERANCE = 1e-5
NUM_STEPS, HALF = 4, 2
MODELS = {
    "dense": dict(family="Qwen2ForCausalLM", layers=4, vocab_size=trainers.VOCAB + 1),
    # As in SmolLM2: heads that two ranks cannot share.
    "nine heads": dict(family="LlamaForCausalLM", heads=9, kv_heads=3, hidden_size=72, vocab_size=trainers.VOCAB + 1),
    "experts": dict(family="Qwen3MoeForCausalLM", tied=False, layers=4, vocab_size=trainers.VOCAB + 1),
}


class Stage:
    def __init__(self, directory, harness):
        self.directory, self.harness = directory, harness
        self.workers = [harness.start("training_worker", f"t{i}") for i in range(4)]
        self._references = {}

    def reference(self, model, dtype="float32"):
        """(model directory, batches, statistics of each step) of a run on one rank."""
        if (model, dtype) not in self._references:
            name = f"{model}-{dtype}".replace(" ", "-")
            model_dir = write_model(str(self.directory / name), **MODELS[model])
            batches = trainers.recorded()[:NUM_STEPS]
            trainers.score(self.harness, model_dir, batches)
            fleet = trainers.Fleet(self.workers[:1], 1, model_dir, cut=layout(), dtype=dtype)
            run = fleet.run(batches, lambda step, batch: deal(fleet, step, batch), self.directory / f"{name}-alone")
            self._references[model, dtype] = model_dir, batches, run
        return self._references[model, dtype]

    def saved(self, fleet, name):
        """The optimizer's state, as logical tensors: {KIND:TENSOR: tensor}, and the counters."""
        directory = self.directory / name
        trainers.save(fleet.owners, str(directory))
        spec = read_spec(Path(fleet.model_dir), fleet.config.model.dtype)
        reader, whole = CheckpointReader(directory / "state", spec), {}
        for number, tensor in enumerate(spec.tensors):
            box = tuple((0, size) for size in tensor.shape)
            for kind in checkpoint.KINDS:
                data = bytearray(4 * volume(box))
                reader.pack([Fragment(kind, number, box)], memoryview(data))
                whole[f"{kind}:{tensor.name}"] = torch.frombuffer(data, dtype=torch.float32).reshape(tensor.shape)
        return whole, fleet.owners[0].call("scalars")


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    directory = tmp_path_factory.mktemp("layouts")
    with Harness(directory) as harness:
        yield Stage(directory, harness)


def deal(fleet, step, batch):
    """Groups of four samples to the replicas in turn, other ones at each step."""
    return [((step + i) % len(fleet.replicas), batch[4 * i : 4 * i + 4]) for i in range(len(batch) // 4)]


def distance(mine, other):
    """Largest relative difference of losses and gradient norms."""
    pairs = [(a[key] / a["tokens"], b[key] / b["tokens"]) for a, b in zip(mine, other) for key in ("loss", "grad_norm")]
    return max(abs(a - b) / abs(a) for a, b in pairs)


def steps(stage, fleet, batches, first, last, name):
    return [
        fleet.step(i, deal(fleet, i, batches[i]), str(stage.directory / name / f"v{i + 1}")) for i in range(first, last)
    ]


def assert_equal_digests(moved):
    keys = set(moved["source"]) | set(moved["target"])
    assert keys >= {"param", "master", "exp_avg", "exp_avg_sq", "step"}
    assert differing(moved["source"], moved["target"]) == set()
    assert all(moved["target"][key] == 0 for key in keys if key.endswith("/replicas"))
    assert all(moved["target"][key] != 0 for key in keys if not key.endswith("/replicas"))


def differing(source, target):
    return {key for key in source | target if source.get(key, 0) != target.get(key, 0)}


TRANSITIONS = {
    "tp": ("dense", layout(dp=2), layout(tp=2)),
    "pp": ("dense", layout(), layout(pp=2)),
    "dp": ("dense", layout(), layout(dp=3)),
    "fewer": ("dense", layout(dp=4), layout(ranks=(2,))),
    "elsewhere": ("dense", layout(tp=2), layout(pp=2, ranks=(2, 3))),
    "all at once": ("dense", layout(tp=2, pp=2), layout(pp=2, dp=2, pp_layers=(3, 1), ranks=(3, 1, 0, 2))),
    "three heads each": ("nine heads", layout(), layout(tp=3)),
    "ep": ("experts", layout(dp=2), layout(dp=2, ep=2)),
    "ep and the rest": ("experts", layout(tp=2, ep=2, etp=1), layout(pp=2, dp=2, ep=2, ranks=(1, 0, 3, 2))),
}


@pytest.mark.parametrize("name", TRANSITIONS)
def test_a_run_goes_on_in_another_layout_as_if_nothing_had_happened(stage, name):
    model, before, after = TRANSITIONS[name]
    model_dir, batches, alone = stage.reference(model)
    fleet = trainers.Fleet(stage.workers, 1, model_dir, cut=before)
    run = steps(stage, fleet, batches, 0, HALF, name)
    old, old_scalars = stage.saved(fleet, f"{name}-old")
    moved = fleet.recut(after)
    assert_equal_digests(moved)
    new, new_scalars = stage.saved(fleet, f"{name}-new")
    assert set(old) == set(new) and all(torch.equal(old[key], new[key]) for key in old)
    assert old_scalars == new_scalars and set(new_scalars["steps"].values()) == {HALF}
    run += steps(stage, fleet, batches, HALF, NUM_STEPS, name)
    print(f"{name}: {distance(alone, run):.1e}; bytes {moved['bytes']}")
    assert distance(alone, run) < TOLERANCE


def test_bfloat16_parameters_are_cast_from_masters_that_move_bit_by_bit(stage):
    model_dir, batches, _ = stage.reference("dense", "bfloat16")
    fleet = trainers.Fleet(stage.workers, 1, model_dir, cut=layout(dp=2), dtype="bfloat16")
    steps(stage, fleet, batches, 0, 1, "bf16")
    old, _ = stage.saved(fleet, "bf16-old")
    before, after = (str(stage.directory / f"bf16-{when}-weights") for when in ("before", "after"))
    trainers.together(fleet.owners, "export", model_dir=before, version=1)
    assert_equal_digests(fleet.recut(layout(tp=2, pp=2)))
    new, _ = stage.saved(fleet, "bf16-new")
    assert all(torch.equal(old[key], new[key]) for key in old)
    trainers.together(fleet.owners, "export", model_dir=after, version=1)
    for directory in (before, after):
        weights = load_file(f"{directory}/model.safetensors")
        assert all(torch.equal(value, old[f"master:{name}"].bfloat16()) for name, value in weights.items())


def test_a_run_may_move_before_its_first_step(stage):
    """Adam has no state then; what it starts from elsewhere is what it would have started from."""
    model_dir, batches, alone = stage.reference("dense")
    fleet = trainers.Fleet(stage.workers, 1, model_dir, cut=layout(dp=2))
    moved = fleet.recut(layout(pp=2, dp=2))
    assert differing(moved["source"], moved["target"]) == set()
    assert moved["target"]["step"] == 0
    assert distance(alone, steps(stage, fleet, batches, 0, HALF, "fresh")) < TOLERANCE


@pytest.mark.parametrize(
    "fault, kinds",
    [
        ("permuted", {"exp_avg"}),
        ("halves", {"param/replicas", "master"}),  # masters are a part of float32 parameters
        ("step", {"step"}),
        ("replica", {"param/replicas"}),
    ],
)
def test_digests_notice_a_spoilt_state_and_the_old_layout_goes_on(stage, fault, kinds):
    model_dir, batches, alone = stage.reference("dense")
    fleet = trainers.Fleet(stage.workers, 1, model_dir, cut=layout(tp=2))
    run = steps(stage, fleet, batches, 0, HALF, fault)
    with pytest.raises(trainers.Differs) as error:
        fleet.recut(layout(dp=2), before_digests=lambda: stage.workers[1].call("spoil", fault=fault))
    assert error.value.kinds == kinds
    run += steps(stage, fleet, batches, HALF, NUM_STEPS, fault)
    assert distance(alone, run) < TOLERANCE
    fleet.recut(layout(dp=2))


def test_training_goes_on_while_others_come_to_the_next_groups_or_never_do(stage):
    model_dir, batches, alone = stage.reference("dense")
    fleet = trainers.Fleet(stage.workers, 1, model_dir, cut=layout(tp=2))
    told = dict(source=trainers.fields(fleet.cut), layout=trainers.fields(layout(tp=2, dp=2)))
    trainers.together(stage.workers[:3], "prepare_layout", name="without the last", **told)
    run = steps(stage, fleet, batches, 0, 1, "meanwhile")
    with pytest.raises(wire.CallError, match="not up after"):
        stage.workers[0].call("prepared", limit_s=0.2)
    trainers.together(stage.workers, "discard")
    stage.workers[3].call("prepare_layout", name="without the last", **told)
    stage.workers[0].call("prepare_layout", name="without the last", **told)
    with pytest.raises(wire.CallError, match="used before"):
        stage.workers[0].call("prepared", limit_s=60.0)
    trainers.together(stage.workers, "discard")
    fleet.recut(layout(tp=2, dp=2))
    run += steps(stage, fleet, batches, 1, 2, "meanwhile")
    assert distance(alone, run) < TOLERANCE


def test_a_rank_that_is_in_no_layout_says_so(stage):
    model_dir, _, _ = stage.reference("dense")
    trainers.Fleet(stage.workers, 1, model_dir, cut=layout())
    with pytest.raises(wire.CallError, match="rank 3 is in no layout"):
        stage.workers[3].call("step", global_tokens=1.0, lr=1e-3)
    with pytest.raises(wire.CallError, match="nothing to adopt"):
        stage.workers[3].call("adopt")


def test_a_rank_that_has_left_and_begun_anew_joins_again(stage):
    model_dir, batches, alone = stage.reference("dense")
    fleet = trainers.Fleet(stage.workers, 1, model_dir, cut=layout())
    run = steps(stage, fleet, batches, 0, 1, "again")
    fleet.recut(layout(dp=2))
    run += steps(stage, fleet, batches, 1, 2, "again")
    fleet.recut(layout())
    fleet.enter([1], "left")
    fleet.recut(layout(dp=2))
    run += steps(stage, fleet, batches, 2, 3, "again")
    assert distance(alone, run) < TOLERANCE


def test_a_borrowed_worker_joins_the_owners(stage):
    """Its shard holds parameters too, but is no part of the state that moves."""
    model_dir, batches, alone = stage.reference("dense")
    fleet = trainers.Fleet(stage.workers[:2], 1, model_dir)
    run = steps(stage, fleet, batches, 0, 1, "lent")
    fleet.borrowed = []
    assert_equal_digests(fleet.recut(layout(dp=2)))
    run += steps(stage, fleet, batches, 1, 2, "lent")
    assert distance(alone, run) < TOLERANCE


def test_a_joiner_that_dies_on_the_way_leaves_the_old_layout_as_it_was(stage):
    """Last: one worker is gone afterwards."""
    model_dir, batches, alone = stage.reference("dense")
    fleet = trainers.Fleet(stage.workers, 1, model_dir, cut=layout(tp=2))
    run = steps(stage, fleet, batches, 0, 1, "joiner")

    def kill():
        stage.workers[3].process.kill()
        stage.workers[3].process.wait()

    with pytest.raises(wire.CallError):
        fleet.recut(layout(tp=2, dp=2), before_transfer=kill)
    trainers.together(stage.workers[:3], "discard")
    run += steps(stage, fleet, batches, 1, 2, "joiner")
    fleet.recut(layout(dp=3))
    run += steps(stage, fleet, batches, 2, 3, "joiner")
    assert distance(alone, run) < TOLERANCE
