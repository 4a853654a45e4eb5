"""What Megatron itself builds on each rank of a layout, without starting the ranks. For tests; a program of its own:

    echo '[{"spec": {...}, "layout": {...}}, {"model_dir": "...", "tokens": [[...]]}]' | python tests/live_megatron.py

Megatron's process groups, models, DDP buffers and distributed optimizers are made for one rank after the other in this
process, over torch's "fake" process groups, which know their ranks but move nothing. The answer to a layout is a list
with an entry for each rank: parameters and buffers of each model chunk with their shapes, in the order of registration,
where each parameter lies in its flat buffer, and which elements of it this rank's optimizer owns. The answer to a model
directory is the logits of the model, filled from it by its placements on one rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.testing._internal.distributed.fake_pg import FakeStore

from dynarl.roles.training.megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GPTModel,
    OptimizerConfig,
    ProcessGroupCollection,
    TransformerConfig,
    get_megatron_optimizer,
)
from dynarl.roles.training.megatron_cpu import host_tensors
from dynarl.roles.training.model import CausalAttention
from dynarl.vps.spec import Kind, Latent, ModelSpec
from dynarl.vps.train_layout import TrainLayout

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import MLATransformerConfig


def main() -> None:
    """Answer the cases on standard input."""
    pretend()
    answers = []
    for case in json.load(sys.stdin):
        if "model_dir" in case:
            answers.append(logits(Path(case["model_dir"]), case["tokens"]))
            continue
        spec = case["spec"] | {"moe_layers": frozenset(case["spec"]["moe_layers"])}
        spec["latent"] = Latent(*spec["latent"]) if spec["latent"] else None
        spec["extra_kinds"] = tuple(Kind(*kind) for kind in spec["extra_kinds"])
        layout = TrainLayout(**case["layout"])
        answers.append([build(ModelSpec(**spec), layout, rank) for rank in layout.ranks])
    json.dump(answers, sys.stdout)


def pretend() -> None:
    """Answer what the fake groups cannot, and what megatron_cpu leaves to CUDA: moving a tensor, streams."""
    dist.all_gather_object = lambda out, value, group=None: out.__setitem__(slice(None), [value] * len(out))
    if not torch.cuda.is_available():
        torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor
        torch.cuda.Stream = torch.cuda.Event = Stream
        torch.cuda.current_stream = Stream


class Stream:
    """In the place of a CUDA stream or event: everything is done when it returns."""

    def __init__(self, *args, **kwargs) -> None: ...

    def __getattr__(self, name: str):
        return Stream


def logits(directory: Path, tokens: list[list[int]]) -> list:
    """Logits of a Hugging Face checkpoint, computed by Megatron."""
    settings = json.loads((directory / "config.json").read_text())
    spec, layout = ModelSpec.from_hf(settings), TrainLayout(vocab_divisible_by=1)
    groups = process_groups(layout, 0)
    config = transformer_config(
        spec, layout, bf16=False, layernorm_epsilon=settings["rms_norm_eps"], attention_dropout=0.0
    )
    model = chunk_model(spec, layout, config, groups, 0, attention=CausalAttention).float().eval()
    state, tensors = model.state_dict(keep_vars=True), load_file(directory / "model.safetensors")
    with torch.no_grad():
        for placement in layout.placements(spec, 0):
            local = state[placement.parameter]
            for part in placement.parts:
                value = tensors[spec.tensors[part.tensor].name][tuple(slice(*side) for side in part.box)]
                where = tuple(slice(at, at + size) for at, size in zip(part.at, value.shape, strict=True))
                local[where] = value
        tokens = torch.tensor(tokens)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        answer = model(tokens, positions, None)
    forget()
    return answer.tolist()


def process_groups(layout: TrainLayout, rank: int) -> ProcessGroupCollection:
    """Megatron's groups of one rank."""
    dist.init_process_group("fake", rank=rank, world_size=len(layout.ranks), store=FakeStore())
    parallel_state.destroy_global_memory_buffer()  # megatron_cpu.install() made one
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )
    return ProcessGroupCollection.use_mpu_process_groups()


def forget() -> None:
    """Take down the groups again."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build(spec: ModelSpec, layout: TrainLayout, rank: int) -> dict:
    """Everything of one rank."""
    groups = process_groups(layout, rank)
    config = transformer_config(spec, layout)
    models = [chunk_model(spec, layout, config, groups, chunk) for chunk in range(layout.vpp)]
    with host_tensors():
        wrapped = [
            DistributedDataParallel(
                config,
                DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    use_distributed_optimizer=True,
                    overlap_grad_reduce=layout.bucket_size is not None,
                    bucket_size=layout.bucket_size,
                    pad_buckets_for_high_nccl_busbw=layout.busbw_padding,
                ),
                model,
                disable_bucketing=chunk > 0,
                pg_collection=groups,
            )
            for chunk, model in enumerate(models)
        ]
        adam = OptimizerConfig(
            optimizer="adam", lr=1e-3, use_distributed_optimizer=True, bf16=True, params_dtype=torch.bfloat16
        )
        optimizer = get_megatron_optimizer(adam, wrapped, pg_collection=groups, use_gloo_process_groups=False)
    names = {id(p): (chunk, name) for chunk, m in enumerate(models) for name, p in m.named_parameters()}
    answer = {
        "parameters": [(c, n, list(p.shape)) for c, m in enumerate(models) for n, p in m.named_parameters()],
        "buffers": [
            (c, n, list(b.shape))
            for c, m in enumerate(models)
            for n, b in m.named_buffers()
            if n.endswith("expert_bias")
        ],
        "flat": [],
        "owned": [],
    }
    for ddp in wrapped:
        for expert, buffers in ((False, ddp.buffers), (True, ddp.expert_parallel_buffers)):
            for buffer in buffers:
                for param, (start, stop, bucket) in buffer.param_index_map.items():
                    answer["flat"].append((*names[id(param)], expert, start, stop, *buffer.bucket_indices[bucket]))
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for ranges in part.gbuf_ranges:
            for buckets in ranges.values():
                for bucket in buckets:
                    for param, where in bucket["param_map"].items():
                        answer["owned"].append((*names[id(param)], where["param"].start, where["param"].end))
    forget()
    return answer


class NoAttention(torch.nn.Module):
    """In the place of the attention kernel, which has no parameters; Megatron's own refuses context parallelism."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__()


def chunk_model(
    spec: ModelSpec,
    layout: TrainLayout,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    chunk: int,
    attention: type = NoAttention,
) -> GPTModel:
    """One model chunk of the current rank."""
    stage = groups.pp.rank()
    vp_stage = chunk if layout.vpp > 1 else None
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization=config.normalization,
        vp_stage=vp_stage,
        pp_rank=stage,
    )
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = attention
    model = GPTModel(
        config,
        block,
        vocab_size=layout.padded_vocab(spec),
        max_sequence_length=spec.positions or 64,
        pre_process=stage == 0 and chunk == 0,
        post_process=stage == layout.pp - 1 and chunk == layout.vpp - 1,
        position_embedding_type="learned_absolute" if spec.positions else "rope",
        share_embeddings_and_output_weights=spec.tied,
        pg_collection=groups,
        vp_stage=vp_stage,
    )
    return model.to(config.params_dtype)


def transformer_config(spec: ModelSpec, layout: TrainLayout, bf16: bool = True, **more) -> TransformerConfig:
    """Megatron's config of a model under a layout."""
    settings = dict(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_query_groups=spec.groups,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn,
        normalization="LayerNorm" if spec.norm_bias else "RMSNorm",
        gated_linear_unit=spec.gated,
        activation_func=F.silu if spec.gated else F.gelu,
        add_bias_linear=spec.mlp_bias,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16,
        **more,
    )
    if layout.pp_layers:
        stages = [["decoder"] * count for count in layout.pp_layers]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        settings["pipeline_model_parallel_layout"] = stages
        settings["virtual_pipeline_model_parallel_size"] = None
    if spec.experts:
        settings |= dict(
            num_moe_experts=spec.experts,
            moe_ffn_hidden_size=spec.expert_ffn,
            moe_layer_freq=[int(layer in spec.moe_layers) for layer in range(spec.layers)],
            moe_shared_expert_intermediate_size=spec.shared_ffn or None,
            moe_router_topk=2,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
            moe_grouped_gemm=False,
        )
    if spec.router_bias:
        settings |= dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    if not spec.latent:
        return TransformerConfig(**settings)
    latent = spec.latent
    del settings["kv_channels"]
    return MLATransformerConfig(
        **settings
        | dict(
            multi_latent_attention=True,
            qk_layernorm=True,
            q_lora_rank=latent.q_rank or None,
            kv_lora_rank=latent.kv_rank,
            qk_head_dim=latent.nope_dim,
            qk_pos_emb_head_dim=latent.rope_dim,
            v_head_dim=latent.value_dim,
            rope_type="rope",
        )
    )


if __name__ == "__main__":
    main()
