"""Pipelines op by op, optimizer steps, and what roles take of a device's memory."""

import itertools
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.errors import ConfigError
from dynarl.perf.device import Efficiency, load_device
from dynarl.perf.memory import inference_memory, rollout_memory, training_memory
from dynarl.perf.model import ModelCost
from dynarl.perf.parallel import Link, Parallel
from dynarl.perf.training import (
    inference_seconds,
    iteration_seconds,
    microbatch_seconds,
    pipeline_makespan,
    reduction_tail,
)

H100 = load_device("h100")
PEAK = msgspec.structs.replace(H100, efficiency=Efficiency(matmul=1, attention=1, training=1, memory=1, network=1))
QWEN_7B = ModelCost.of("qwen2.5-7b")

counts = st.integers(1, 9)
times = st.integers(1, 50).map(float)


# ---- pipelines


@settings(deadline=None)
@given(counts, counts, times, times)
def test_even_stages_take_m_plus_p_minus_1_slots(stages, microbatches, forward, backward):
    slots = microbatches + stages - 1
    assert pipeline_makespan("1f1b", stages, microbatches, forward, backward) == slots * (forward + backward)


@settings(deadline=None)
@given(counts, st.integers(1, 4), st.integers(2, 4), times, times)
def test_virtual_stages_divide_the_bubble(stages, lots, vpp, forward, backward):
    microbatches = stages * lots
    work = microbatches * (forward + backward)
    seconds = pipeline_makespan("interleaved", stages, microbatches, forward, backward, vpp=vpp)
    assert (seconds - work) / work == pytest.approx((stages - 1) / (vpp * microbatches))


def test_a_micro_batch_on_its_way_costs_a_hop_at_every_stage_there_and_back():
    assert pipeline_makespan("1f1b", 4, 1, 1.0, 2.0, p2p_s=0.5) == 4 * 3 + 2 * 3 * 0.5


@settings(deadline=None)
@given(counts, st.lists(times, min_size=1, max_size=9), times)
def test_uneven_micro_batches_take_no_less_than_any_stage_and_no_more_than_all_in_turn(stages, forward, p2p):
    backward = [2 * one for one in forward]
    seconds = pipeline_makespan("1f1b", stages, len(forward), forward, backward, p2p)
    work, longest = 3 * sum(forward), 3 * max(forward)
    assert work + (stages - 1) * min(3 * one for one in forward) <= seconds + 1e-9
    assert seconds <= stages * work + 2 * (stages - 1) * p2p * len(forward)
    if stages == 1:
        assert seconds == work
    assert seconds >= longest * stages


def test_one_long_micro_batch_holds_the_others_up():
    even, uneven = ([3.0] * 6, [1.0] * 5 + [13.0])
    assert sum(even) == sum(uneven)
    assert pipeline_makespan("1f1b", 3, 6, uneven, uneven) > pipeline_makespan("1f1b", 3, 6, even, even)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("1f1b", 2, 4, 1.0, 1.0, 0.0, 2), "1f1b has one virtual stage"),
        (("interleaved", 4, 6, 1.0, 1.0, 0.0, 2), "6 micro-batches are no multiple of 4 stages"),
        (("1f1b", 2, 4, [1.0, 2.0], 1.0), "2 times are given for 4 micro-batches"),
        (("1f1b", 2, 2, [1.0, -2.0], 1.0), "not negative"),
    ],
)
def test_a_schedule_that_does_not_exist_is_refused(arguments, text):
    with pytest.raises(ConfigError, match=text):
        pipeline_makespan(*arguments)


# ---- micro-batches and steps


def test_a_micro_batch_alone_on_a_device_is_its_operations_at_peak():
    forward, backward = microbatch_seconds(PEAK, QWEN_7B, 4096, 2047.5, recompute=False)
    assert forward == pytest.approx(4096 * QWEN_7B.flops_per_token(2047.5) / H100.flops)
    assert backward == pytest.approx(2 * forward)
    again = microbatch_seconds(PEAK, QWEN_7B, 4096, 2047.5, recompute=True)
    assert again.backward_s == pytest.approx(3 * forward)
    assert inference_seconds(PEAK, QWEN_7B, 4096, 2047.5) == pytest.approx(forward)


def test_tensor_parallelism_divides_the_operations_and_adds_reductions():
    alone = microbatch_seconds(PEAK, QWEN_7B, 4096, 0, Parallel()).forward_s
    split = microbatch_seconds(PEAK, QWEN_7B, 4096, 0, Parallel(tp=4)).forward_s
    nbytes = 4096 * 3584 * 2
    reductions_s = 28 * 2 * 2 * (3 * H100.intra_latency_s + 3 / 4 * nbytes / H100.intra_bytes_per_s)
    assert split == pytest.approx(alone / 4 + reductions_s)


def test_experts_on_other_nodes_are_dearer_than_on_the_same_node():
    moe = ModelCost.of("qwen3-30b-a3b")
    near, far = (microbatch_seconds(PEAK, moe, 4096, 0, Parallel(tp=2, dp=8, ep=ep)).forward_s for ep in (4, 8))
    none = microbatch_seconds(PEAK, moe, 4096, 0, Parallel(tp=2, dp=8)).forward_s
    assert none < near < far / 2
    # Each of the two tensor-parallel ranks sends 8 copies of half of the tokens, there and back, in each of 48 layers.
    nbytes = 4096 / 2 * 8 * 2048 * 2
    exchange_s = 2 * 48 * (3 * PEAK.intra_latency_s + 3 / 4 * nbytes / PEAK.intra_bytes_per_s)
    assert near - none == pytest.approx(exchange_s)


def test_gradients_are_waited_for_only_as_far_as_they_were_not_ready_earlier():
    assert reduction_tail(1.0, 0.0, 8) == 0
    assert reduction_tail(1.0, 0.5, 8) == pytest.approx(0.5 / 8)  # the last bucket
    assert reduction_tail(1.0, 2.0, 8) == pytest.approx(1.0 / 8 + 2.0 - 1.0)  # from the first bucket on without a pause
    assert reduction_tail(1.0, 0.5, 1) == 0.5


def test_a_step_is_its_parts():
    parallel = Parallel(tp=2, pp=2, dp=8)
    step = iteration_seconds(PEAK, QWEN_7B, parallel, 16, 8192, 4096)
    forward, backward = microbatch_seconds(PEAK, QWEN_7B, 8192, 4096, parallel)
    hop = H100.inter_latency_s + 8192 * 3584 * 2 / 2 / H100.inter_bytes_per_s
    slots = 17 * (forward + backward)
    assert slots < step.pipeline_s <= slots + 2 * 17 * hop
    params = QWEN_7B.num_params / 4
    assert step.update_s == pytest.approx(params / 8 * 30 / H100.memory_bytes_per_s)
    link = Link.among(PEAK, 16)
    assert step.gather_s == pytest.approx(7 * link.latency_s + 7 / 8 * 2 * params / link.bytes_per_s)
    assert step.total_s == sum(step)


def test_more_replicas_make_a_step_of_the_same_batch_shorter():
    steps = [iteration_seconds(PEAK, QWEN_7B, Parallel(tp=4, dp=dp), 128 // dp, 8192, 4096) for dp in (4, 8, 16)]
    seconds = [step.total_s for step in steps]
    assert seconds[0] > 1.8 * seconds[1] > 1.8 * 1.8 * seconds[2]


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        (Parallel(tp=16), "tp=16 does not cut 32 heads and 4"),
        (Parallel(pp=5), "pp x vpp = 5 does not divide 48 layers"),
        (Parallel(pp=8, vpp=4), "pp x vpp = 32 does not divide 48 layers"),
        (Parallel(dp=4, ep=8), "ep=8 does not divide dp=4"),
        (Parallel(dp=3, ep=3), "ep=3 does not divide 128 experts"),
    ],
)
def test_degrees_that_do_not_divide_are_refused(parallel, text):
    model = ModelCost.of("qwen3-30b-a3b")
    if parallel.tp == 16:
        text = "tp=16 is more than the 8 devices of a node"
    with pytest.raises(ConfigError, match=text):
        parallel.check(model, H100)


def test_a_dense_model_has_no_experts_to_cut():
    with pytest.raises(ConfigError, match="ep=2, but the model has no experts"):
        Parallel(dp=2, ep=2).check(QWEN_7B, H100)


# ---- memory


def test_training_takes_18_bytes_a_parameter_and_zero_1_cuts_twelve_of_them():
    alone = training_memory(load_device("h200"), ModelCost.of("qwen2.5-1.5b"), Parallel(), 1024)
    params = ModelCost.of("qwen2.5-1.5b").num_params
    assert (alone.weights, alone.gradients, alone.optimizer) == (2 * params, 4 * params, 12 * params)
    eight = training_memory(H100, ModelCost.of("qwen2.5-1.5b"), Parallel(dp=8), 1024)
    assert (eight.weights, eight.optimizer) == (alone.weights, alone.optimizer / 8)
    assert alone.total == sum(alone.parts.values())


def test_experts_are_cut_by_expert_parallelism_and_their_optimizer_over_their_copies():
    model = ModelCost.of("qwen3-30b-a3b")
    memory = training_memory(H100, model, Parallel(tp=2, dp=16, ep=8), 4096)
    dense, expert = (model.num_params - model.expert_params) / 2, model.expert_params / 2 / 8
    assert memory.weights == 2 * (dense + expert)
    assert memory.optimizer == 12 * (dense / 16 + expert / 2)


def test_computing_activations_again_keeps_one_layer_and_the_inputs_of_the_others():
    kept = training_memory(H100, QWEN_7B, Parallel(tp=4, dp=4), 4096, recompute=False).activations
    again = training_memory(H100, QWEN_7B, Parallel(tp=4, dp=4), 4096).activations
    assert kept == 4096 * 28 * QWEN_7B.activation_numbers * 2 / 4
    assert again == 4096 * (28 * 3584 + QWEN_7B.activation_numbers) * 2 / 4


def test_the_first_stage_keeps_a_micro_batch_for_every_stage():
    few, many = (
        training_memory(H100, QWEN_7B, Parallel(tp=4, pp=4), 4096, microbatches, recompute=False).activations
        for microbatches in (1, 16)
    )
    assert many == 4 * few
    again = training_memory(H100, QWEN_7B, Parallel(tp=4, pp=4), 4096, 16).activations
    assert again == 4096 * (4 * 7 * 3584 + QWEN_7B.activation_numbers) * 2 / 4
    virtual = training_memory(H100, QWEN_7B, Parallel(tp=4, pp=4, vpp=7), 4096, 16, recompute=False).activations
    assert virtual == pytest.approx(many * (1 + 3 / 28))


def test_what_does_not_fit_is_refused_with_the_arithmetic():
    parts = "weights 69.0 + gradients 138.0 + optimizer 103.5 + activations 3.2 + logits 0.5 + reserved 2.5 = 316.7 GB"
    text = f"training of llama2-70b at tp=2 pp=1 dp=4 on h100: {parts} per device > 85.5 GB"
    with pytest.raises(ConfigError, match=re.escape(text)):
        training_memory(H100, ModelCost.of("llama2-70b"), Parallel(tp=2, dp=4), 4096)
    with pytest.raises(ConfigError, match=r"rollout of llama2-70b on h100 at tp=2: weights 138.0 GB / 2"):
        rollout_memory(H100, ModelCost.of("llama2-70b"), 2, 0.8)
    with pytest.raises(ConfigError, match=r"with 1 of the memory on h100: weights .* = 88.0 GB"):
        rollout_memory(H100, QWEN_7B, 1, 1.0)
    with pytest.raises(ConfigError, match=r"inference of llama2-70b at tp=1 pp=1 dp=1 on h100: weights 138.0"):
        inference_memory(H100, ModelCost.of("llama2-70b"), Parallel(), 4096)


def test_an_engine_takes_its_share_of_the_memory():
    memory = rollout_memory(H100, QWEN_7B, 2, 0.55)
    assert memory.total - H100.reserved_bytes == pytest.approx(0.55 * H100.memory_bytes, rel=1e-6)


def test_more_devices_never_take_more_of_each():
    model = ModelCost.of("qwen2.5-14b")
    for tp, dp in itertools.product((4, 8), (4, 8)):
        total = training_memory(H100, model, Parallel(tp, 1, dp), 2048).total
        assert training_memory(H100, model, Parallel(tp, 1, 2 * dp), 2048).total < total
        assert training_memory(H100, model, Parallel(tp, 2, dp), 2048).total < total
