"""Logical tensors: published models have their published sizes, and configs the tensors that transformers saves."""

from __future__ import annotations

import json
import math

import pytest

from dynarl.vps.presets import PRESETS, preset
from dynarl.vps.spec import ModelSpec, SpecError

# Totals as their authors or the Hugging Face hub state them; those of GPT-3 follow from its table of sizes.
PARAMETERS = {
    "gpt3-1.3b": 1_315_723_264,
    "gpt3-2.7b": 2_651_553_280,
    "gpt3-6.7b": 6_658_404_352,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "smollm2-135m": 134_515_008,
}
DEEPSEEK_V3 = dict(
    model_type="deepseek_v3",
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
    intermediate_size=18432,
    vocab_size=129280,
    first_k_dense_replace=3,
    n_routed_experts=256,
    n_shared_experts=1,
    moe_intermediate_size=2048,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)

SMALL = dict(
    num_attention_heads=6,
    num_key_value_heads=3,
    hidden_size=24,
    head_dim=4,
    num_hidden_layers=3,
    intermediate_size=36,
    vocab_size=101,
    moe_intermediate_size=20,
    num_experts=6,
    num_local_experts=6,
    n_routed_experts=6,
)
LATENT = dict(
    num_key_value_heads=6,
    n_shared_experts=2,
    first_k_dense_replace=1,
    q_lora_rank=12,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=6,
    n_group=2,
    topk_group=1,
)


def test_every_preset_has_a_published_total():
    assert PARAMETERS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_published_models_have_their_published_number_of_parameters(name):
    spec = preset(name)
    assert spec.parameters == PARAMETERS[name]
    assert spec.parameters == sum(math.prod(tensor.shape) for tensor in spec.tensors)


def test_deepseek_v3_without_the_layer_that_only_predicts_further():
    assert ModelSpec.from_hf(DEEPSEEK_V3).parameters == 671_026_419_200


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "qwen3-30b-a3b", "gpt3-1.3b"])
def test_index_arithmetic_agrees_with_the_list_of_tensors(name):
    spec = preset(name)
    assert [(*tensor.shape, 1)[:2] for tensor in spec.tensors] == list(map(tuple, spec.shapes.tolist()))
    for layer in (0, 1, spec.layers - 1):
        start = int(spec.layer_starts[layer])
        for suffix, offset in spec.layer_offsets[layer in spec.moe_layers].items():
            assert spec.tensors[start + offset].name == f"model.layers.{layer}.{suffix}"
    assert spec.tensors[int(spec.layer_starts[-1])].name == "model.norm.weight"
    assert [spec.index[tensor.name] for tensor in spec.tensors] == list(range(len(spec.tensors)))


@pytest.mark.parametrize(
    "family, settings",
    [
        ("Llama", dict(attention_bias=True, mlp_bias=True)),
        ("Llama", dict(tie_word_embeddings=True)),
        ("Qwen2", {}),
        ("Qwen3", dict(attention_bias=True)),
        ("Mixtral", {}),
        ("Qwen3Moe", dict(mlp_only_layers=[1])),
        ("Qwen3Moe", dict(decoder_sparse_step=2)),
        ("DeepseekV3", LATENT),
        ("DeepseekV2", LATENT | dict(q_lora_rank=None)),
    ],
)
def test_tensors_are_those_that_transformers_saves(tmp_path, family, settings):
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors")
    config = getattr(transformers, f"{family}Config")(**(SMALL | settings))
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    spec = ModelSpec.from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert {tensor.name: tensor.shape for tensor in spec.tensors} == saved


def test_the_selection_bias_of_a_router_is_a_buffer():
    spec = ModelSpec.from_hf(DEEPSEEK_V3)
    assert {t.name.split(".", 3)[3] for t in spec.tensors if t.buffer} == {"mlp.gate.e_score_correction_bias"}
    assert sum(t.buffer for t in spec.tensors) == 58


def test_kinds_have_sizes_and_more_of_them_can_be_registered():
    spec = preset("llama2-7b")
    assert [spec.itemsize(kind) for kind in ("param", "master", "exp_avg", "exp_avg_sq")] == [2, 4, 4, 4]
    more = spec.with_kind("ema", "float32").with_kind("teacher", "bfloat16", sharded_as="param")
    assert (more.itemsize("ema"), more.itemsize("teacher")) == (4, 2)
    assert more != spec and hash(more) != hash(spec)
    with pytest.raises(ValueError, match="'ema' is not one of param, master, exp_avg, exp_avg_sq; register it"):
        spec.kind("ema")
    with pytest.raises(ValueError, match="'master' is registered already"):
        spec.with_kind("master", "float32")


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(model_type="mamba"), "model_type 'mamba' is not one of deepseek_v2, deepseek_v3, llama, mixtral"),
        (dict(num_key_value_heads=4), "llama: 4 key/value heads do not divide 6 attention heads"),
        (dict(torch_dtype="int8"), "llama: dtype 'int8' is not one of float32, bfloat16, float16"),
        (LATENT | dict(model_type="deepseek_v3", attention_bias=True), "attention_bias is not supported with latent"),
    ],
)
def test_configs_whose_tensors_are_not_known_are_refused(change, message):
    with pytest.raises(SpecError, match=message):
        ModelSpec.from_hf(SMALL | dict(model_type="llama") | change)


def test_a_config_that_lacks_a_size_is_refused_by_its_name():
    config = {key: value for key, value in SMALL.items() if key != "vocab_size"} | dict(model_type="qwen3")
    with pytest.raises(SpecError, match="the config of a qwen3 model must have vocab_size"):
        ModelSpec.from_hf(config)


def test_an_unknown_preset_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="'llama2-8b' is not one of gpt3-1.3b, .*smollm2-135m"):
        preset("llama2-8b")
