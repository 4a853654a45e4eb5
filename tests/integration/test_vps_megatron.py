"""Layouts against what Megatron-core itself builds: names, shapes and order of parameters, rank numbers, flat buffers,
and the intervals of its distributed optimizers."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynarl.vps.local import flat
from dynarl.vps.spec import ModelSpec
from dynarl.vps.train_layout import TrainLayout

pytest.importorskip("torch")
pytest.importorskip("megatron")

ROOT = Path(__file__).parents[2]

BASE = dict(
    num_attention_heads=6,
    num_key_value_heads=3,
    hidden_size=24,
    head_dim=4,
    num_hidden_layers=4,
    intermediate_size=36,
    vocab_size=101,
)
EXPERTS = dict(num_experts=6, moe_intermediate_size=24)
LLAMA = ModelSpec.from_hf(BASE | dict(model_type="llama"))
QWEN2 = ModelSpec.from_hf(BASE | dict(model_type="qwen2", tie_word_embeddings=True))
QWEN3 = ModelSpec.from_hf(BASE | dict(model_type="qwen3", tie_word_embeddings=True))
WIDE = ModelSpec.from_hf(
    BASE | dict(model_type="qwen2", num_attention_heads=8, num_key_value_heads=2, intermediate_size=40, head_dim=6)
)
MIXED = ModelSpec.from_hf(BASE | EXPERTS | dict(model_type="qwen3_moe", mlp_only_layers=[1]))
MIXTRAL = ModelSpec.from_hf(BASE | dict(model_type="mixtral", num_local_experts=4))
GPT = ModelSpec(
    "gpt", layers=4, hidden=24, heads=6, groups=6, head_dim=4, ffn=36, vocab=101, tied=True, qkv_bias=True,
    out_bias=True, mlp_bias=True, gated=False, norm_bias=True, positions=32,
)  # fmt: skip
LATENT = dict(
    num_key_value_heads=6,
    n_routed_experts=6,
    moe_intermediate_size=20,
    n_shared_experts=2,
    first_k_dense_replace=1,
    q_lora_rank=12,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=6,
)
DEEPSEEK = ModelSpec.from_hf(BASE | LATENT | dict(model_type="deepseek_v3"))

CASES = {
    "llama alone": (LLAMA, dict()),
    "llama tp pp dp": (LLAMA, dict(tp=3, pp=2, dp=2)),
    "llama tp 6, 3 groups, cp": (LLAMA, dict(tp=6, cp=2, dp=2)),
    "llama uneven, little padding": (LLAMA, dict(tp=3, pp=3, dp=2, pp_layers=(1, 1, 2), vocab_divisible_by=1)),
    "llama interleaved": (LLAMA, dict(pp=2, vpp=2, dp=3)),
    "llama uneven and interleaved": (LLAMA, dict(pp=2, vpp=2, dp=2, pp_layers=(0, 1, 2, 1))),
    "llama buckets": (LLAMA, dict(tp=3, dp=3, bucket_size=3000)),
    "llama buckets interleaved": (LLAMA, dict(pp=2, vpp=2, dp=3, bucket_size=3000)),
    "llama busbw": (LLAMA, dict(pp=2, dp=3, busbw_padding=True)),
    "qwen2 tied": (QWEN2, dict(tp=3, dp=5)),
    "qwen2 tied pp": (QWEN2, dict(tp=3, pp=2, dp=3)),
    "qwen2 tied pp buckets": (QWEN2, dict(pp=2, dp=3, bucket_size=2500)),
    "qwen3 tied vpp": (QWEN3, dict(pp=2, vpp=2, dp=7)),
    "cuts inside a group": (WIDE, dict(tp=8, dp=2)),
    "gpt": (GPT, dict(tp=3, pp=2, dp=3)),
    "experts in the dense buffers": (MIXED, dict(tp=3, pp=2, dp=2)),
    "experts by ep": (MIXED, dict(tp=3, dp=4, ep=2)),
    "experts by ep and pp": (MIXED, dict(pp=2, dp=6, ep=3)),
    "experts by ep, whole": (MIXED, dict(tp=3, dp=4, ep=6, etp=1)),
    "experts whole, tp 3": (MIXED, dict(tp=3, dp=2, etp=1)),
    "experts cut finer than the rest": (MIXED, dict(dp=4, etp=4)),
    "experts vpp": (MIXED, dict(tp=1, pp=2, vpp=2, dp=4, ep=2)),
    "mixtral": (MIXTRAL, dict(tp=3, dp=2, ep=2)),
    "deepseek": (DEEPSEEK, dict(tp=2, pp=2, dp=3, ep=3)),
}

# Of transformers, for models that are computed with.
SIZES = BASE | dict(
    num_experts=6,
    num_local_experts=6,
    n_routed_experts=6,
    moe_intermediate_size=20,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    initializer_range=0.3,
    max_position_embeddings=64,
    rope_theta=10000.0,
    sliding_window=None,
)
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": dict(tie_word_embeddings=True),
    "Mixtral": {},
    "Qwen3Moe": dict(mlp_only_layers=[1]),
    "DeepseekV3": LATENT | dict(n_group=1, topk_group=1, routed_scaling_factor=1.0),
}


@pytest.fixture(scope="module")
def live() -> dict[str, list[dict]]:
    """What Megatron builds on each rank of each case."""
    cases = []
    for spec, layout in CASES.values():
        numbers = dataclasses.asdict(spec) | {"moe_layers": sorted(spec.moe_layers), "latent": spec.latent}
        cases.append({"spec": numbers, "layout": layout})
    return dict(zip(CASES, ask(cases)))


def ask(cases: list[dict]) -> list:
    """Answers of Megatron, in a process that nothing else is imported into."""
    answer = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "live_megatron.py")],
        input=json.dumps(cases),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"},
        timeout=1200,
    )
    assert answer.returncode == 0
    return json.loads(answer.stdout)


def case(name: str) -> tuple[ModelSpec, TrainLayout]:
    spec, degrees = CASES[name]
    return spec, TrainLayout(**degrees).checked(spec)


@pytest.mark.parametrize("name", CASES)
def test_placements_are_megatrons_parameters(live, name):
    spec, layout = case(name)
    for rank, built in zip(layout.ranks, live[name], strict=True):
        placements = layout.placements(spec, rank)
        mine = [[p.chunk, p.parameter, list(p.shape)] for p in placements if not p.buffer]
        assert mine == built["parameters"], (rank, layout.coordinates(rank))
        assert [[p.chunk, p.parameter, list(p.shape)] for p in placements if p.buffer] == built["buffers"]


@pytest.mark.parametrize("name", CASES)
def test_flat_buffers_are_megatrons(live, name):
    spec, layout = case(name)
    for rank, built in zip(layout.ranks, live[name], strict=True):
        at = layout.coordinates(rank)
        table = layout._table(spec, at)
        mine = []
        for chunk in range(layout.vpp):
            for expert, shards in ((False, layout.dp * layout.cp), (True, layout.expert_dp)):
                size = layout.bucket_size if at.pp == 0 and chunk == 0 else None
                which, buffer = flat(table, chunk, expert, shards, size, layout.busbw_padding)
                mine += [
                    [*table.parameters[p][:2], expert, start, start + numel, bucket_start, bucket_stop]
                    for p, start, numel, bucket_start, bucket_stop in zip(
                        which.tolist(),
                        *(x.tolist() for x in (buffer.start, buffer.numel, buffer.bucket_start, buffer.bucket_stop)),
                    )
                ]
        assert sorted(mine) == sorted(built["flat"]), (rank, at)


@pytest.mark.parametrize("name", CASES)
def test_intervals_are_those_of_the_distributed_optimizer(live, name):
    spec, layout = case(name)
    for rank, built in zip(layout.ranks, live[name], strict=True):
        theirs = {(chunk, parameter): (lo, hi) for chunk, parameter, lo, hi in built["owned"]}
        assert len(theirs) == len(built["owned"])
        assert layout.shard_intervals(spec, rank) == theirs, (rank, layout.coordinates(rank))


@pytest.fixture(scope="module")
def logits(tmp_path_factory) -> dict[str, tuple]:
    """(Megatron's, transformers') logits of a small random model of each family."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(5)
    cases, theirs = [], []
    for family, settings in FAMILIES.items():
        config = getattr(transformers, f"{family}Config")(**(SIZES | settings))
        model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
        tokens = torch.randint(0, config.vocab_size, (2, 16))
        with torch.no_grad():
            for value in (*model.parameters(), *(b for name, b in model.named_buffers() if "correction" in name)):
                if value.dim() == 1:  # norms begin as ones, biases as zeros
                    value += torch.randn_like(value) * 0.2
            theirs.append(model(tokens).logits)
        directory = tmp_path_factory.mktemp(family)
        model.save_pretrained(directory)
        cases.append({"model_dir": str(directory), "tokens": tokens.tolist()})
    return dict(zip(FAMILIES, zip(map(torch.tensor, ask(cases)), theirs, strict=True), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_filled_by_its_placements_computes_what_transformers_computes(logits, family):
    torch = pytest.importorskip("torch")
    mine, theirs = logits[family]
    assert theirs.std() > 0.5
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-5)
