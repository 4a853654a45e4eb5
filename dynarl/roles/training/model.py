"""The policy as a Megatron GPTModel, and its forward pass to per-token log-probabilities.

Both the trainer and the inference role run exactly this code, so their log-probabilities agree.
Shapes: B sequences, S positions, N picked positions, H hidden size, V vocabulary rows of this rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dynarl.roles.training.megatron import GPTModel, ProcessGroupCollection, TransformerConfig, get_gpt_layer_local_spec
from dynarl.vps.hf_megatron import Arch, vocab_range

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class CausalAttention(torch.nn.Module):
    """Megatron's core attention by torch's fused kernel.

    Rows are padded at their end only, so the causal mask alone keeps padding from real tokens.
    """

    def __init__(self, config: TransformerConfig, *args, **kwargs):
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args, **kwargs) -> Tensor:
        """query [S, B, heads, D], key and value [S, B, kv_heads, D] -> [S, B, heads * D]."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def build_model(arch: Arch, groups: ProcessGroupCollection, dtype: str) -> GPTModel:
    """The shard of this rank, on the current device, with weights not yet set."""
    tp = groups.tp.size()
    arch.check_tp(tp)
    config = TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # The loss is a sum over tokens, divided once by the global token count: data parallelism must not divide again.
        calculate_per_token_loss=True,
        # Weights always come from a checkpoint.
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=tp,
        bf16=dtype == "bfloat16",
        params_dtype=DTYPES[dtype],
        pipeline_dtype=DTYPES[dtype],
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=arch.qk_norm)
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    model = GPTModel(
        config,
        spec,
        vocab_size=arch.padded_vocab(tp),
        max_sequence_length=arch.max_position,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
        share_embeddings_and_output_weights=arch.tied,
        pg_collection=groups,
    )
    # torch's norms are made in float32 whatever params_dtype says.
    return model.to(DTYPES[dtype])


def picked_logits(model: GPTModel, tokens_BS: Tensor, picks_N: Tensor) -> Tensor:
    """Logits [N, V] in float32 at flat positions `picks_N` (position * B + sequence) of `tokens_BS`.

    Megatron's own forward projects every position. The prompt's logits are never used, so they are not made here.
    """
    positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    hidden_SBH = model.embedding(input_ids=tokens_BS, position_ids=positions)
    hidden_SBH = model.decoder(
        hidden_states=hidden_SBH, attention_mask=None, rotary_pos_emb=model.rotary_pos_emb(tokens_BS.shape[1])
    )
    hidden_N1H = hidden_SBH.flatten(0, 1).index_select(0, picks_N).unsqueeze(1)
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    return model.output_layer(hidden_N1H, weight=weight)[0].squeeze(1).float()


def vocab_of(arch: Arch, groups: ProcessGroupCollection) -> tuple[int, int]:
    """Token ids [first, end) whose logits this rank makes."""
    return vocab_range(arch, groups.tp.size(), groups.tp.rank())
