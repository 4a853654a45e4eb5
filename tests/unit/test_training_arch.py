import pytest

from dynarl.roles.training.arch import Arch, ModelError

QWEN2 = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 49,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
}
QWEN3_MOE = QWEN2 | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt2"},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"use_sliding_window": True},
        {"hidden_act": "gelu"},
        {"model_type": "llama", "attention_bias": True},
        {"model_type": "llama", "mlp_bias": True},
    ],
)
def test_what_cannot_be_built_is_refused_by_name(change):
    with pytest.raises(ModelError, match=f"{list(change)[-1]}|rope_type"):
        Arch.from_config(QWEN2 | change)


def test_rope_theta_is_read_from_both_generations_of_config():
    old = {key: value for key, value in QWEN2.items() if key != "rope_theta"}
    assert Arch.from_config(QWEN2).rope_theta == 1e6
    assert Arch.from_config(old | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}).rope_theta == 5e5


def test_the_way_of_weighing_experts_is_read():
    arch = Arch.from_config(QWEN3_MOE)
    assert arch.experts_per_token == 2 and arch.norm_topk and arch.spec.experts == 4
    assert not Arch.from_config(QWEN3_MOE | {"norm_topk_prob": False}).norm_topk
