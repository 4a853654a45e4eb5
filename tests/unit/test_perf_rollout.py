"""Costs of models per token, of decode steps and prefills, and KV memory."""

import msgspec
import pytest

from dynarl.errors import ConfigError
from dynarl.perf.device import Efficiency, device_names, load_device
from dynarl.perf.model import ModelCost
from dynarl.perf.rollout import StepModel, kv_capacity_tokens
from dynarl.vps.presets import PRESETS
from dynarl.vps.spec import Latent, ModelSpec

H100 = load_device("h100")
PEAK = Efficiency(matmul=1, attention=1, training=1, memory=1, network=1)
QWEN_7B = ModelCost.of("qwen2.5-7b")


# ---- devices


def test_every_shipped_device_loads_and_is_named_as_its_file():
    assert {"a100", "a800", "h100", "h800", "h200"} <= set(device_names())
    assert all(load_device(name).name == name for name in device_names())


def test_a_device_of_ones_own_is_given_by_its_path(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nflops: 1e12\nmemory_bytes: 8e9\nmemory_bytes_per_s: 1e11\nintra_bytes_per_s: 1e10\n"
        "inter_bytes_per_s: 1e9\nintra_latency_s: 1e-6\ninter_latency_s: 1e-5\nhost_bytes_per_s: 1e10\n"
    )
    assert load_device(str(path)).flops == 1e12


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("inter_bytes_per_s: 0", "inter_bytes_per_s = 0 must be above 0"),
        ("efficiency: {memory: 1.2}", "memory = 1.2 is a share"),
        ("speed: 1", "unknown key speed"),
        ("flops: fast", "float"),
    ],
)
def test_a_device_file_with_a_fault_is_refused_with_the_fault(tmp_path, line, text):
    values = msgspec.structs.asdict(H100)
    for name in ("efficiency", line.partition(":")[0]):
        values.pop(name, None)
    path = tmp_path / "mine.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in values.items()) + line)
    with pytest.raises(ConfigError, match=text):
        load_device(str(path))


def test_an_unknown_device_is_told_with_those_there_are():
    with pytest.raises(ConfigError, match="'b200': there are a100, a800, cpu-core, h100, h200, h800"):
        load_device("b200")


# ---- models


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith(("qwen", "llama", "smol"))])
def test_keys_and_values_are_two_numbers_per_layer_head_and_dimension(name):
    sizes = PRESETS[name]
    assert ModelCost.of(name).kv_bytes_per_token == 2 * sizes["layers"] * sizes["groups"] * sizes["head_dim"] * 2


def test_a_token_takes_two_operations_per_active_parameter_and_four_per_width_and_earlier_token():
    cost = ModelCost.of("qwen2.5-1.5b")
    # Tied: the table is the output layer too, so all parameters are gone through.
    assert cost.active_params == cost.num_params
    assert cost.flops_per_token(0) == 2 * cost.num_params
    assert cost.flops_per_token(1000) - cost.flops_per_token(0) == 4 * 28 * 12 * 128 * 1000
    # Not tied: the look-up takes no operations.
    assert QWEN_7B.num_params - QWEN_7B.active_params == 152064 * 3584


@pytest.mark.parametrize(("name", "active"), [("qwen3-30b-a3b", 3.0e9), ("qwen3-235b-a22b", 21.6e9)])
def test_of_a_model_with_experts_only_the_chosen_ones_are_active(name, active):
    """Published as 3.3 and 22 billion with the look-up table."""
    assert ModelCost.of(name).active_params == pytest.approx(active, rel=0.02)


def test_experts_of_an_unknown_model_must_be_told():
    spec = ModelSpec("mine", 2, 64, 4, 2, 16, 128, 1000, experts=8, expert_ffn=32, moe_layers=frozenset({1}))
    with pytest.raises(ConfigError, match="mine has 8 experts: say how many"):
        ModelCost.of(spec)
    assert ModelCost.of(spec, 2).num_params - ModelCost.of(spec, 2).active_params == 1000 * 64 + 6 * 3 * 32 * 64


def test_latent_attention_caches_one_vector_for_all_heads():
    latent = Latent(q_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    cost = ModelCost.of(ModelSpec("mine", 4, 256, 8, 8, 192, 512, 1000, latent=latent))
    assert cost.kv_bytes_per_token == 4 * (512 + 64) * 2 == cost.kv_bytes_per_token_per_device(8)


# ---- decode steps


def test_a_step_is_bound_by_reading_the_weights_while_the_batch_is_small():
    step = StepModel.of(H100, QWEN_7B, 1, PEAK)
    read_s = (QWEN_7B.num_params - 152064 * 3584) * 2 / H100.memory_bytes_per_s
    assert step.seconds(1, 0) - H100.step_overhead_s == pytest.approx(read_s)
    assert step.seconds(64, 0) == step.seconds(1, 0)


def test_a_step_is_bound_by_products_once_the_batch_is_large():
    step = StepModel.of(H100, QWEN_7B, 1, PEAK)
    # 2 operations and 2 bytes per parameter: level at flops / bytes_per_s = 295 requests.
    assert step.seconds(290, 0) == step.seconds(1, 0)
    assert step.seconds(1000, 0) - H100.step_overhead_s == pytest.approx(1000 * 2 * QWEN_7B.active_params / H100.flops)


def test_keys_and_values_are_read_whole_and_beyond_one_device_per_head_by_all():
    for tp, share in ((1, 1), (2, 2), (4, 4)):
        step = StepModel.of(H100, QWEN_7B, tp, PEAK)
        read_s = step.seconds(8, 100_000) - step.seconds(8, 0)
        assert read_s == pytest.approx(100_000 * QWEN_7B.kv_bytes_per_token / share / H100.memory_bytes_per_s)
    assert ModelCost.of("qwen2.5-1.5b").kv_bytes_per_token_per_device(4) == 28672 / 2


def test_more_devices_make_a_step_shorter_by_less_than_their_number():
    seconds = [StepModel.of(H100, QWEN_7B, tp).seconds(32, 100_000) for tp in (1, 2, 4)]
    assert seconds[0] > seconds[1] > seconds[2] > seconds[0] / 4


def test_a_step_reads_the_experts_that_some_token_chose():
    step = StepModel.of(H100, ModelCost.of("qwen3-30b-a3b"), 1, PEAK)
    assert step.seconds(2, 0) - step.seconds(1, 0) == pytest.approx(step.expert_read_s * (8 / 128) * (1 - 8 / 128))
    assert step.seconds(200, 0) - H100.step_overhead_s == pytest.approx(step.read_s + step.expert_read_s, rel=1e-4)


def test_a_batch_is_padded_to_the_next_captured_graph():
    step = StepModel(0.01, 0.001, 0.0, graph_buckets=(1, 2, 4, 8))
    assert [round(1000 * step.seconds(batch, 0)) for batch in (1, 3, 4, 5, 8, 9)] == [11, 14, 14, 18, 18, 19]


def test_a_prefill_is_linear_in_tokens_and_in_pairs_of_tokens():
    step = StepModel.of(H100, QWEN_7B, 1, PEAK)
    products_s = 4000 * 2 * QWEN_7B.active_params / H100.flops
    pairs_s = QWEN_7B.flops_per_pair * (4000 * 3999 / 2) / H100.flops
    alone_s = step.prefill_batch_seconds(4000, pairs=4000 * 3999 // 2)
    assert alone_s == pytest.approx(H100.step_overhead_s + products_s + pairs_s)
    behind_s = step.prefill_batch_seconds(4000, pairs=4000 * 3999 // 2 + 4000 * 1000) - alone_s
    assert behind_s == pytest.approx(QWEN_7B.flops_per_pair * 4000 * 1000 / H100.flops)


def test_a_scaled_engine_is_slower_by_the_same_factor_in_everything():
    step = StepModel.of(H100, ModelCost.of("qwen3-30b-a3b"), 2)
    slow = step.scaled(1.1)
    assert slow.seconds(7, 5000) == pytest.approx(1.1 * step.seconds(7, 5000))
    assert slow.prefill_batch_seconds(700, 10**6) == pytest.approx(1.1 * step.prefill_batch_seconds(700, 10**6))


# ---- KV memory


def test_kv_memory_is_what_weights_leave_of_the_share():
    tokens = kv_capacity_tokens(H100, QWEN_7B, 2, 0.55)
    assert tokens == int((2 * 0.55 * H100.memory_bytes - QWEN_7B.weight_bytes) / QWEN_7B.kv_bytes_per_token)


def test_an_engine_whose_weights_do_not_fit_is_refused_with_the_arithmetic():
    text = "llama2-70b on h100 at tp=1: weights 138.0 GB / 1 = 138.0 GB per device > 0.9 x 85.5 GB = 77.0 GB"
    with pytest.raises(ConfigError, match=text):
        kv_capacity_tokens(H100, ModelCost.of("llama2-70b"), 1, 0.9)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="qwen2.5-7b: tp=8 does not cut 28 heads"):
        StepModel.of(H100, QWEN_7B, 8)
