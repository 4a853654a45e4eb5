"""The trainer in this process, alone in its torch world. tests/integration has several of them share the work."""

import random
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron")

import torch.distributed as dist  # noqa: E402
from tiny_model import write_model  # noqa: E402

from dynarl import wire  # noqa: E402
from dynarl.config.schema import Algorithm, Config, Model, Training  # noqa: E402
from dynarl.roles.training import checkpoint, megatron_cpu  # noqa: E402
from dynarl.roles.training.torch_world import World, leave_world  # noqa: E402
from dynarl.roles.training.trainer import NotFiniteError, Trainer  # noqa: E402
from dynarl.transport.files import FileError  # noqa: E402
from dynarl.vps.train_layout import TrainLayout  # noqa: E402

WORLD: list[World] = []


@pytest.fixture(scope="module", autouse=True)
def world():
    WORLD.append(World(dist.HashStore(), "w", 0, torch.device("cpu"), 60.0))
    yield
    leave_world()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(str(tmp_path_factory.mktemp("model")))


def build(model_dir, owner=True, dtype="float32", algorithm=None, **training):
    return Trainer(
        Config(model=Model(dtype=dtype), training=Training(**training), algorithm=Algorithm(**(algorithm or {}))),
        model_dir,
        WORLD[0],
        TrainLayout(vocab_divisible_by=1),
        owner,
    )


def sample(name, length=20, advantage=1.0, weight=1.0, seed=0, logprob=-3.9):
    draw = random.Random(f"{name}{seed}")
    ids = lambda n: wire.pack_ids([draw.randrange(48) for _ in range(n)])  # noqa: E731
    logprobs = wire.pack_floats([logprob] * length)
    return dict(
        sample=name,
        prompt=ids(6),
        response=ids(length),
        rollout_logprobs=logprobs,
        old_logprobs=logprobs,
        advantage=advantage,
        weight=weight,
    )


def weights_of(trainer):
    return {name: value.detach().clone() for name, value in trainer.params.items()}


def gradients(trainer, samples, loss="grpo"):
    trainer.begin(loss)
    [stats] = trainer.train([samples])
    return trainer.gradient_buffers()[0].clone(), stats


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gradients_outlast_a_sleep_in_which_nothing_can_be_done(model_dir, device, monkeypatch):
    trainer = build(model_dir)
    sums, _ = gradients(trainer, [sample("a")])
    before = weights_of(trainer)
    if device == "cuda":  # its way through host memory, taken by tensors of the CPU
        monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        trainer.device = torch.device("cuda")
    trainer.sleep()
    assert (trainer.shard.buffers[0].grad_data.untyped_storage().nbytes() == 0) == (device == "cuda")
    for touch in (lambda: trainer.step(20, 1e-3), trainer.gradient_buffers, trainer.digests, trainer.scalars,
                  lambda: trainer.train([[sample("b")]])):
        with pytest.raises(RuntimeError, match="training rank 0 sleeps; its node has to enter the training role"):
            touch()
    trainer.wake()
    assert torch.equal(trainer.gradient_buffers()[0], sums)
    assert all(torch.equal(value, before[name]) for name, value in weights_of(trainer).items())
    trainer.sleep()
    trainer.begin("grpo")
    trainer.wake()
    assert not trainer.gradient_buffers()[0].any()


def test_a_masked_sample_leaves_no_trace_in_gradient_loss_or_token_count(model_dir):
    trainer = build(model_dir)
    plain, stats = gradients(trainer, [sample("a")])
    masked, masked_stats = gradients(trainer, [sample("a"), sample("b", 35, weight=0.0)])
    assert (masked - plain).norm() < 1e-5 * plain.norm()
    for key in ("tokens", "loss", "pg_clipfrac", "entropy", "rollout_probs_diff"):
        assert masked_stats[key] == pytest.approx(stats[key], rel=1e-5), key
    counted, _ = gradients(trainer, [sample("a"), sample("b", 35)])
    assert (counted - plain).norm() > 0.1 * plain.norm()


MASK = bytes([1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1])


def one_token_each(whole, wanted):
    """The tokens of `wanted` as samples of their own: what stands before a token is its prompt, so no mask is needed."""
    for at, is_wanted in enumerate(wanted):
        if is_wanted:
            of_token = {name: whole[name][4 * at : 4 * at + 4] for name in ("response", "rollout_logprobs", "old_logprobs")}
            yield dict(whole, sample=f"0:9:{at}", prompt=whole["prompt"] + whole["response"][: 4 * at], mask=b"", **of_token)


@pytest.mark.parametrize("loss", ["grpo", "sft"])
def test_the_gradient_is_the_sum_of_those_of_the_sampled_tokens_each_alone(model_dir, loss):
    trainer = build(model_dir)
    logprobs = wire.pack_floats([0.0 if m == 0 else -3.0 - 0.1 * at for at, m in enumerate(MASK)])
    whole = dict(sample("0:0:0", length=len(MASK)), rollout_logprobs=logprobs, old_logprobs=logprobs, mask=MASK, weight=0.5)
    by_hand, hand_stats = gradients(trainer, list(one_token_each(whole, MASK)), loss)
    masked, stats = gradients(trainer, [whole], loss)
    assert (masked - by_hand).norm() < 1e-5 * by_hand.norm()
    assert stats["tokens"] == hand_stats["tokens"] == 0.5 * sum(MASK)
    for name in set(stats) - {"samples", "padded_tokens"}:
        assert stats[name] == pytest.approx(hand_stats[name], rel=1e-4, abs=1e-5), name
    for wrong in (MASK[1:] + b"\1", b"\1" + MASK[:-1], b""):  # shifted by one, or not heeded
        other, _ = gradients(trainer, [dict(whole, mask=wrong)], loss)
        assert (other - by_hand).norm() > 1e-2 * by_hand.norm()


def test_padding_beside_a_longer_sample_changes_nothing(model_dir):
    trainer = build(model_dir)
    together, _ = gradients(trainer, [sample("a", 3), sample("b", 80)])
    trainer.begin("grpo")
    for one in (sample("a", 3), sample("b", 80)):
        trainer.train([[one]])
    assert (trainer.gradient_buffers()[0] - together).norm() < 1e-5 * together.norm()


def test_an_infinite_gradient_is_refused_and_the_weights_stay(model_dir):
    trainer = build(model_dir)
    before = weights_of(trainer)
    trainer.begin("grpo")
    trainer.train([[sample("a", advantage=float("inf"))]])
    with pytest.raises(NotFiniteError, match="not taken"):
        trainer.step(20, 1e-3)
    assert all(torch.equal(before[name], value) for name, value in weights_of(trainer).items())


def test_a_step_needs_tokens_and_an_owner(model_dir):
    with pytest.raises(ValueError, match="0 tokens"):
        build(model_dir).step(0, 1e-3)
    borrowed = build(model_dir, owner=False)
    with pytest.raises(RuntimeError, match="no optimizer"):
        borrowed.step(10, 1e-3)
    with pytest.raises(ValueError, match="'ppo'"):
        borrowed.begin("ppo")


def test_the_gradient_norm_is_that_of_the_mean_over_all_tokens_and_is_clipped(model_dir):
    trainer = build(model_dir, clip_grad=1e-6)
    flat, _ = gradients(trainer, [sample("a")])
    before = weights_of(trainer)
    assert trainer.step(50, 1e-3) == pytest.approx(flat.norm().item() / 50, rel=1e-4)
    # Adam's first step is the same for any scale of the gradient until it drowns in eps: 1e-6 over 65000 numbers does.
    moved = max((value - before[name]).abs().max().item() for name, value in weights_of(trainer).items())
    unclipped = build(model_dir, clip_grad=0.0)
    gradients(unclipped, [sample("a")])
    unclipped.step(50, 1e-3)
    assert (
        moved
        < 0.95e-3
        < max((value - before[name]).abs().max().item() for name, value in weights_of(unclipped).items())
    )


def test_supervised_steps_lower_the_loss(model_dir):
    trainer = build(model_dir)
    losses = []
    for _ in range(8):
        trainer.begin("sft")
        [stats] = trainer.train([[sample("a"), sample("b", 40)]])
        losses.append(stats["loss"] / stats["tokens"])
        trainer.step(stats["tokens"], 3e-3)
    assert losses[-1] < 0.7 * losses[0]


def test_the_ratio_is_taken_at_the_sampling_temperature(model_dir):
    plain, warm = ({}, {"temperature": 2.0})
    ratios = []
    for algorithm in (plain, warm):
        _, stats = gradients(build(model_dir, algorithm=algorithm), [sample("a")])
        ratios.append((stats["ratio"], stats["entropy"]))
    assert ratios[1][1] > ratios[0][1] + 1  # flatter
    assert ratios[0] != ratios[1]


def test_bfloat16_weights_are_stepped_in_float32(model_dir):
    """Steps that are each too small for bfloat16 must add up."""
    trainer = build(model_dir, dtype="bfloat16")
    before = weights_of(trainer)["decoder.final_layernorm.weight"]
    for _ in range(30):
        trainer.begin("grpo")
        trainer.train([[sample("a")]])
        trainer.step(20, 1e-3)
    after = trainer.params["decoder.final_layernorm.weight"]
    assert after.dtype == torch.bfloat16
    # One step moves a weight near 1 by 1e-3, where bfloat16 numbers are 4e-3 to 8e-3 apart: alone it would round away.
    assert (after - before).abs().max() > 8e-3
    trainer.load(model_dir)
    trainer.begin("grpo")
    trainer.train([[sample("a")]])
    trainer.step(20, 0.0)
    assert torch.equal(trainer.params["decoder.final_layernorm.weight"], before)


def wait_for(saver):
    while not saver.saved():
        time.sleep(0.01)


def test_a_checkpoint_restores_weights_and_optimizer_bitwise(model_dir, tmp_path):
    trainer = build(model_dir)

    def steps(trainer, seeds):
        for seed in seeds:
            trainer.begin("grpo")
            trainer.train([[sample("a", seed=seed)]])
            trainer.step(20, 1e-3)
        return weights_of(trainer)

    steps(trainer, range(3))
    saver = checkpoint.Saver(trainer.shard)
    saver.save(str(tmp_path))
    expected = steps(trainer, range(3, 6))  # goes on while the state of before is being written
    wait_for(saver)
    saver.close()
    other = build(model_dir)
    checkpoint.restore(other.shard, str(tmp_path))
    got = steps(other, range(3, 6))
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    without_moments = build(model_dir)  # the weights without the optimizer's state are not enough
    checkpoint.restore(without_moments.shard, str(tmp_path))
    for adam in (each.optimizer for each in without_moments.shard.optimizers):
        for state in adam.state.values():
            state["exp_avg"].zero_()
    assert not all(torch.equal(expected[name], value) for name, value in steps(without_moments, range(3, 6)).items())


def test_a_checkpoint_that_lacks_a_part_is_refused(model_dir, tmp_path):
    trainer = build(model_dir)
    saver = checkpoint.Saver(trainer.shard)
    saver.save(str(tmp_path))
    wait_for(saver)
    saver.close()
    description = tmp_path / "state" / "rank-00000.json"
    description.write_text(description.read_text().replace('"ranks":[0]', '"ranks":[0,1]'))
    with pytest.raises(FileError, match="lacks the part of rank 1"):
        checkpoint.restore(trainer.shard, str(tmp_path))
    description.unlink()
    with pytest.raises(FileError, match="holds no checkpoint"):
        checkpoint.restore(trainer.shard, str(tmp_path))


def test_counters_that_ranks_disagree_on_are_refused():
    with pytest.raises(checkpoint.CheckpointError, match="rank 1 has made 3 steps, others 4"):
        checkpoint.merged({0: {"steps": {"dense": 4}, "lr": 1.0}, 1: {"steps": {"dense": 3}, "lr": 1.0}})


def test_the_host_answers_for_cuda_only_while_asked_to():
    with megatron_cpu.host_tensors():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(2).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


def test_what_is_left_out_of_megatron_cannot_be_used_by_accident():
    from megatron.core.distributed.fsdp import Anything

    with pytest.raises(RuntimeError, match="left out on machines without CUDA"):
        Anything()
