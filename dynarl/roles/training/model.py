"""The policy as a Megatron GPTModel, one pipeline stage of it per rank, and its forward pass to picked logits.

Both the trainer and the inference role run exactly this code, so their log-probabilities agree.
Shapes: B sequences, S positions, N picked positions, H hidden size, V vocabulary rows of this rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dynarl.roles.training.arch import Arch
from dynarl.roles.training.groups import Groups
from dynarl.roles.training.megatron import (
    GPTModel,
    PipelineParallelLayerLayout,
    TransformerBlockSubmodules,
    TransformerConfig,
    gather_from_sequence_parallel_region,
    get_gpt_decoder_block_spec,
)
from dynarl.vps.train_layout import TrainLayout

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


class Norm(torch.nn.Module):
    """RMSNorm that may see a part of the positions only: then its gradient is summed over the tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        if config.sequence_parallel:
            self.weight.sequence_parallel = True

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def splits_positions(arch: Arch, layout: TrainLayout) -> bool:
    """Whether tensor-parallel ranks share out the positions between attention layers.

    With experts they must: Megatron would otherwise send each token to its experts once per tensor-parallel rank.
    """
    return bool(arch.spec.experts) and layout.tp > 1


def build_model(arch: Arch, groups: Groups, dtype: str) -> GPTModel:
    """The stage and shard of this rank, on the current device, with weights not yet set."""
    layout, spec = groups.layout.checked(arch.spec), arch.spec
    stages = _Stages(layout.pp_layers, groups.pp.rank()) if layout.pp_layers and layout.pp > 1 else None
    config = TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_query_groups=spec.groups,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # The loss is a sum over tokens, divided once by the global token count: data parallelism must not divide again.
        calculate_per_token_loss=True,
        # Weights always come from a checkpoint or from another layout.
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_model_parallel_layout=stages,
        sequence_parallel=splits_positions(arch, layout),
        bf16=dtype == "bfloat16",
        params_dtype=DTYPES[dtype],
        pipeline_dtype=DTYPES[dtype],
        **(_experts(arch, layout) if spec.experts else {}),
    )
    model = GPTModel(
        config,
        _layers(config, groups),
        vocab_size=layout.padded_vocab(spec),
        max_sequence_length=arch.max_position,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
        share_embeddings_and_output_weights=spec.tied,
        pg_collection=groups.for_model,
    )
    if config.sequence_parallel and model.post_process:
        # It gets picked positions, of all of them (see picked_logits).
        model.output_layer.sequence_parallel, model.output_layer.allreduce_dgrad = False, True
    # torch's norms are made in float32 whatever params_dtype says.
    return model.to(DTYPES[dtype])


def _experts(arch: Arch, layout: TrainLayout) -> dict:
    spec = arch.spec
    return dict(
        num_moe_experts=spec.experts,
        moe_ffn_hidden_size=spec.expert_ffn,
        moe_layer_freq=[int(layer in spec.moe_layers) for layer in range(spec.layers)],
        moe_router_topk=arch.experts_per_token,
        # Softmax over the chosen experts is that over all of them, made to sum up to 1.
        moe_router_pre_softmax=not arch.norm_topk,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )


class _Stages(PipelineParallelLayerLayout):
    """As many layers on each stage as a layout says. Megatron asks for those of its global pipeline rank, unless
    told."""

    def __init__(self, counts: tuple[int, ...], stage: int):
        stages = [["decoder"] * count for count in counts]
        super().__init__([["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]], len(counts))
        self._stage = stage

    def get_num_layers_to_build(self, *args, **kwargs) -> int:
        return super().get_num_layers_to_build(**(kwargs | {"pp_rank": self._stage}))

    def get_layer_offset(self, *args, **kwargs) -> int:
        return super().get_layer_offset(**(kwargs | {"pp_rank": self._stage}))


def _layers(config: TransformerConfig, groups: Groups) -> TransformerBlockSubmodules:
    """Megatron's local modules of this stage, with our attention and norms."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", pp_rank=groups.pp.rank()
    )
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CausalAttention
        if config.sequence_parallel:
            block.layer_norm = layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
            if config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = Norm
    return block


def hidden_states(model: GPTModel, tokens_BS: Tensor, received_SBH: Tensor | None = None) -> Tensor:
    """What this stage makes of the stage before it (None: it is the first): [S, B, H], S / tp with split positions."""
    if model.pre_process:
        # Rotary positions need no embedding, and Megatron's module would ask for random numbers to drop out none.
        received_SBH = model.embedding.word_embeddings(tokens_BS)
        if not model.embedding.reduce_scatter_embeddings:
            received_SBH = received_SBH.transpose(0, 1).contiguous()
    else:
        model.set_input_tensor(received_SBH)
    return model.decoder(
        hidden_states=received_SBH, attention_mask=None, rotary_pos_emb=model.rotary_pos_emb(tokens_BS.shape[1])
    )


def picked_logits(model: GPTModel, hidden_SBH: Tensor, picks_N: Tensor) -> Tensor:
    """Logits [N, V] in float32 at flat positions `picks_N` (position * B + sequence) of the last stage's states.

    Megatron's own forward projects every position. The prompt's logits are never used, so they are not made here.
    """
    if model.config.sequence_parallel:
        hidden_SBH = gather_from_sequence_parallel_region(
            hidden_SBH, tensor_parallel_output_grad=False, group=model.pg_collection.tp
        )
    hidden_N1H = hidden_SBH.flatten(0, 1).index_select(0, picks_N).unsqueeze(1)
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    return model.output_layer(hidden_N1H, weight=weight)[0].squeeze(1).float()


def vocab_of(arch: Arch, groups: Groups) -> tuple[int, int]:
    """Token ids [first, end) whose logits this rank makes; padding rows behind them are not counted."""
    vocab, rows = arch.spec.vocab, groups.layout.padded_vocab(arch.spec) // groups.tp.size()
    first = groups.tp.rank() * rows
    return min(first, vocab), min(first + rows, vocab)
