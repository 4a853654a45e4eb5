"""Published models by name, for plans and benchmarks that need no checkpoint."""

from __future__ import annotations

from typing import Any

from dynarl.vps.spec import ModelSpec


def _gpt3(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return dict(
        layers=layers, hidden=hidden, heads=heads, groups=heads, head_dim=hidden // heads, ffn=4 * hidden, vocab=50257,
        tied=True, qkv_bias=True, out_bias=True, mlp_bias=True, gated=False, norm_bias=True, positions=2048,
    )  # fmt: skip


def _llama(layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    return dict(
        layers=layers, hidden=hidden, heads=heads, groups=groups, head_dim=hidden // heads, ffn=ffn, vocab=vocab
    ) | more  # fmt: skip


def _qwen3_experts(layers: int, hidden: int, heads: int, ffn: int, expert_ffn: int) -> dict[str, Any]:
    return dict(
        layers=layers, hidden=hidden, heads=heads, groups=4, head_dim=128, ffn=ffn, vocab=151936, qk_norm=True,
        experts=128, expert_ffn=expert_ffn, moe_layers=frozenset(range(layers)),
    )  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    # GPT-3 is published as a table of sizes only. The names are ours; the smallest has Megatron's 16 heads, since the
    # table's 24 heads of 128 do not make 2048.
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-2.7b": _gpt3(32, 2560, 32),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "qwen2.5-1.5b": _llama(28, 1536, 12, 2, 8960, 151936, qkv_bias=True, tied=True),
    "qwen2.5-7b": _llama(28, 3584, 28, 4, 18944, 152064, qkv_bias=True),
    "qwen2.5-14b": _llama(48, 5120, 40, 8, 13824, 152064, qkv_bias=True),
    "qwen2.5-32b": _llama(64, 5120, 40, 8, 27648, 152064, qkv_bias=True),
    "qwen2.5-72b": _llama(80, 8192, 64, 8, 29568, 152064, qkv_bias=True),
    "qwen3-30b-a3b": _qwen3_experts(48, 2048, 32, 6144, 768),
    "qwen3-235b-a22b": _qwen3_experts(94, 4096, 64, 12288, 1536),
    "smollm2-135m": _llama(30, 576, 9, 3, 1536, 49152, tied=True),
}


def preset(name: str) -> ModelSpec:
    """A published model by name. Raises ValueError with the names there are."""
    if name not in PRESETS:
        raise ValueError(f"{name!r} is not one of {', '.join(PRESETS)}")
    return ModelSpec(name=name, **PRESETS[name])
