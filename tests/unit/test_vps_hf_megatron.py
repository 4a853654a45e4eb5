from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynarl.vps.hf_megatron import Arch, ModelError, hf_shapes, is_replicated, shards, vocab_range

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


@st.composite
def layouts(draw):
    """An architecture and a tensor-parallel size that it divides by."""
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    kv_heads = tp * draw(st.integers(1, 2))
    family, (bias, norm) = draw(
        st.sampled_from([("qwen2", (True, False)), ("llama", (False, False)), ("qwen3", (False, True))])
    )
    arch = Arch(
        family,
        draw(st.integers(1, 2)),
        draw(st.integers(1, 9)),
        kv_heads * draw(st.integers(1, 3)),
        kv_heads,
        draw(st.integers(1, 4)),
        tp * draw(st.integers(1, 5)),
        draw(st.integers(1, 13)),
        draw(st.booleans()),
        1e4,
        1e-6,
        64,
        bias,
        norm,
    )
    return arch, tp


@given(layouts())
def test_over_all_ranks_every_row_and_column_is_held_once_and_norms_by_everyone(layout):
    arch, tp = layout
    held = {}
    for rank in range(tp):
        for shard in shards(arch, tp, rank):
            for piece in shard.slices:
                held.setdefault((piece.tensor, shard.axis), []).extend(range(piece.start, piece.stop))
    shapes = hf_shapes(arch)
    assert {name for name, _ in held} == set(shapes)
    for (name, axis), indices in held.items():
        copies = tp if name.endswith("norm.weight") else 1
        assert sorted(indices) == sorted(list(range(shapes[name][axis])) * copies), name


@given(layouts())
def test_the_slices_of_a_shard_fill_its_shape_but_for_padding_of_the_vocabulary(layout):
    arch, tp = layout
    for rank in range(tp):
        for shard in shards(arch, tp, rank):
            filled = sum(piece.stop - piece.start for piece in shard.slices)
            if "word_embeddings" in shard.name or "output_layer" in shard.name:
                low, high = vocab_range(arch, tp, rank)
                assert filled == high - low <= shard.shape[0]
            else:
                assert filled == shard.shape[shard.axis]


def test_only_norms_are_replicated():
    arch = Arch.from_config(QWEN2 | {"model_type": "qwen3"})
    names = {shard.name for shard in shards(arch, 2, 0) if is_replicated(shard)}
    assert {"decoder.final_layernorm.weight", "decoder.layers.1.self_attention.q_layernorm.weight"} <= names
    assert all("norm" in name for name in names)
    assert not any(is_replicated(s) for s in shards(Arch.from_config(QWEN2), 2, 0) if s.name.endswith("bias"))


def test_a_query_group_is_laid_out_as_its_queries_then_key_then_value():
    arch = Arch.from_config(QWEN2)
    qkv = next(s for s in shards(arch, 2, 1) if s.name == "decoder.layers.0.self_attention.linear_qkv.weight")
    assert [(s.tensor.split(".")[-2], s.start, s.stop) for s in qkv.slices] == [
        ("q_proj", 32, 64),
        ("k_proj", 16, 32),
        ("v_proj", 16, 32),
    ]
    assert qkv.shape == (64, 64)


def test_the_vocabulary_is_padded_up_on_the_last_rank():
    arch = Arch.from_config(QWEN2)
    assert [vocab_range(arch, 2, rank) for rank in (0, 1)] == [(0, 25), (25, 49)]
    assert shards(arch, 2, 1)[0].shape == (25, 64)
    # So small a vocabulary that the last rank has padding only.
    assert vocab_range(replace(arch, vocab=5), 4, 3) == (5, 5)


def test_sizes_that_do_not_divide_are_named():
    with pytest.raises(ModelError, match="2 key/value heads do not divide by tensor-parallel size 4"):
        shards(Arch.from_config(QWEN2), 4, 0)


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
