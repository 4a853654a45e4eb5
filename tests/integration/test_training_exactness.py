"""Training on the same recorded trajectories gives the same losses and weights however the work is spread.

Real worker processes on this machine, gloo between them: one owner; two owners (data parallel); one owner and two
borrowed workers that get other leases at each step; two tensor-parallel owners, alone and with a borrowed pair. And the
comparison is sharp enough to notice if two samples swap their advantage or their answer, or if one is left out.
"""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron")

import trainers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_model import write_model  # noqa: E402
from worker_harness import Harness  # noqa: E402

pytestmark = pytest.mark.integration
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """Three training workers, the model, the scored trajectories and the run of a single owner to compare with."""
    directory = tmp_path_factory.mktemp("exact")
    # 49 does not divide by 2: with two tensor-parallel ranks one holds a row of padding.
    model_dir = write_model(str(directory / "v0"), vocab_size=trainers.VOCAB + 1)
    batches = trainers.recorded()
    with Harness(directory) as harness:
        trainers.score(harness, model_dir, batches)
        workers = [harness.start("training_worker", f"t{i}") for i in range(4)]
        alone = trainers.Fleet(workers[:1], 1, model_dir).run(batches, one_lease, directory / "alone")
        yield Stage(directory, model_dir, batches, workers, alone)


class Stage:
    def __init__(self, directory, model_dir, batches, workers, alone):
        self.directory, self.model_dir, self.batches, self.workers, self.alone = (
            directory,
            model_dir,
            batches,
            workers,
            alone,
        )

    def run(self, name, num_workers, owners, deal, batches=None, **options):
        fleet = trainers.Fleet(self.workers[:num_workers], owners, self.model_dir, **options)
        return fleet.run(batches or self.batches, deal, self.directory / name)

    def distances(self, name, run):
        """Largest relative difference to the single owner's run: of losses, of gradient norms, of any final tensor."""
        return (
            max(relative(a["loss"] / a["tokens"], b["loss"] / b["tokens"]) for a, b in zip(self.alone, run)),
            max(relative(a["grad_norm"], b["grad_norm"]) for a, b in zip(self.alone, run)),
            weight_distance(*(self.directory / which / f"v{trainers.NUM_STEPS}" for which in ("alone", name))),
        )


def weight_distance(a, b):
    mine, other = (load_file(directory / "model.safetensors") for directory in (a, b))
    assert set(mine) == set(other)
    return max((torch.linalg.vector_norm(mine[k] - other[k]) / torch.linalg.vector_norm(mine[k])).item() for k in mine)


def relative(a, b):
    return abs(a - b) / abs(a)


def one_lease(step, batch):
    return [(0, batch)]


def by_halves(step, batch):
    return [(0, batch[:5]), (1, batch[5:])]


def shuffled_over_three(step, batch):
    """Groups of four samples to a random replica in random order; at some steps a replica gets nothing."""
    draw = random.Random(step)
    groups = [batch[i : i + 4] for i in range(0, len(batch), 4)]
    draw.shuffle(groups)
    return [(draw.randrange(3), group) for group in groups]


def assert_equal(stage, name, run):
    loss, norm, weights = stage.distances(name, run)
    print(f"{name}: relative differences: loss {loss:.1e}, gradient norm {norm:.1e}, weights {weights:.1e}")
    assert max(loss, norm, weights) < TOLERANCE


def test_the_run_moves_the_weights_and_clips_some_tokens(stage):
    before = load_file(f"{stage.model_dir}/model.safetensors")
    after = load_file(stage.directory / "alone" / f"v{trainers.NUM_STEPS}" / "model.safetensors")
    moved = [((after[k] - before[k]).norm() / after[k].norm()).item() for k in before if not k.endswith("k_proj.bias")]
    assert min(moved) > 1e-3
    assert sum(step["pg_clipfrac"] for step in stage.alone) > 20


def test_the_first_step_starts_from_the_scored_log_probabilities(stage):
    first = stage.alone[0]
    assert first["ratio"] == pytest.approx(first["tokens"], rel=1e-6) and first["pg_clipfrac"] == 0
    assert abs(first["ppo_kl"]) / first["tokens"] < 1e-6


def test_two_owners_train_as_one(stage):
    assert_equal(stage, "dp2", stage.run("dp2", 2, 2, by_halves))


def test_borrowed_workers_change_nothing_whatever_they_are_given(stage):
    assert_equal(stage, "borrowed", stage.run("borrowed", 3, 1, shuffled_over_three))


def test_two_tensor_parallel_owners_train_as_one(stage):
    assert_equal(stage, "tp2", stage.run("tp2", 2, 2, one_lease, tp=2))


def test_a_borrowed_replica_may_be_tensor_parallel_too(stage):
    def deal(step, batch):
        return [(1, batch[:3]), (0, batch[3:10]), (1, batch[10:])] if step % 2 else [(1, batch)]

    assert_equal(stage, "tp2-borrowed", stage.run("tp2-borrowed", 4, 2, deal, tp=2))


def test_norms_of_heads_sum_their_gradient_over_tensor_parallel_ranks(stage):
    """Each rank sees its own heads only, so the gradient of the norms, which all ranks hold, is a sum over them."""
    model_dir = write_model(str(stage.directory / "qwen3"), family="Qwen3ForCausalLM", vocab_size=trainers.VOCAB + 1)
    for tp in (1, 2):
        fleet = trainers.Fleet(stage.workers[:tp], tp, model_dir, tp=tp)
        fleet.run(stage.batches[:2], one_lease, stage.directory / f"qwen3-tp{tp}")
    assert weight_distance(stage.directory / "qwen3-tp1" / "v2", stage.directory / "qwen3-tp2" / "v2") < TOLERANCE


def test_the_cut_into_micro_batches_changes_nothing(stage):
    assert_equal(stage, "small", stage.run("small", 1, 1, one_lease, max_tokens_per_micro_batch=1))


def swap(batches, field):
    """Two samples of one step exchange a field (and, for answers, what belongs to them)."""
    fields = {"advantage": ["advantage"], "response": ["response", "old_logprobs", "ref_logprobs", "rollout_logprobs"]}[
        field
    ]
    changed = [[dict(sample) for sample in batch] for batch in batches]
    a, b = changed[3][1], changed[3][2]
    for name in fields:
        a[name], b[name] = b[name], a[name]
    return changed


@pytest.mark.parametrize("fault", ["advantage", "response", "dropped", "doubled"])
def test_a_fault_in_one_step_out_of_ten_is_noticed(stage, fault):
    if fault == "dropped":
        batches = [batch[:-1] if step == 3 else batch for step, batch in enumerate(stage.batches)]
    elif fault == "doubled":
        batches = [batch + batch[:1] if step == 3 else batch for step, batch in enumerate(stage.batches)]
    else:
        batches = swap(stage.batches, fault)
    run = stage.run(fault, 3, 1, shuffled_over_three, batches)
    loss, norm, weights = stage.distances(fault, run)
    print(f"{fault}: relative differences: loss {loss:.1e}, gradient norm {norm:.1e}, weights {weights:.1e}")
    assert weights > 10 * TOLERANCE and norm > 10 * TOLERANCE


def test_a_checkpoint_written_by_two_owners_continues_on_one(stage):
    fleet = trainers.Fleet(stage.workers[:2], 2, stage.model_dir)
    half = trainers.NUM_STEPS // 2
    fleet.run(stage.batches[:half], by_halves, stage.directory / "resumed")
    checkpoint = str(stage.directory / "checkpoint")
    trainers.save(fleet.owners, checkpoint)
    fleet = trainers.Fleet(stage.workers[:1], 1, stage.model_dir)
    fleet.owners[0].call("restore", dir=checkpoint)
    rest = [
        fleet.step(i, one_lease(i, stage.batches[i]), str(stage.directory / "resumed" / f"v{i + 1}"))
        for i in range(half, trainers.NUM_STEPS)
    ]
    assert_equal(stage, "resumed", stage.alone[:half] + rest)


def test_a_checkpoint_continues_at_another_tensor_parallel_size(stage):
    fleet = trainers.Fleet(stage.workers[:1], 1, stage.model_dir)
    half = trainers.NUM_STEPS // 2
    fleet.run(stage.batches[:half], one_lease, stage.directory / "recut")
    trainers.save(fleet.owners, str(stage.directory / "tp1"))
    fleet = trainers.Fleet(stage.workers[:2], 2, stage.model_dir, tp=2)
    trainers.together(fleet.owners, "restore", dir=str(stage.directory / "tp1"))
    rest = [
        fleet.step(i, one_lease(i, stage.batches[i]), str(stage.directory / "recut" / f"v{i + 1}"))
        for i in range(half, trainers.NUM_STEPS)
    ]
    assert_equal(stage, "recut", stage.alone[:half] + rest)
