"""Forward pass of a Llama-like decoder, dense or with experts, over its Hugging Face weights, with few kernel launches.

Why not the modules of transformers: on small models their forward alone takes half as long again as a whole step of the
engine, sampling included, and importing them costs three times what importing torch does (docs/rollout-engines.md).

Shapes: N tokens (of all requests together), D head size, H query heads, K key-value heads, E experts.
"""

from __future__ import annotations

import glob
import json
import os
from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F
from safetensors import safe_open

from dynarl.vps.spec import ModelSpec

FAMILIES = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"}

# Attention of one layer: (layer index, queries [N, H, D], keys and values [N, 2K, D]) -> [N, H * D].
Attend = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder, as its config.json has them. eos: ids that end an answer; moe_layers: those with experts;
    norm_topk: whether the weights of a token's experts are made to sum up to 1.
    """

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    ffn_size: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope_theta: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    dtype: torch.dtype
    eos: frozenset[int]
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    norm_topk: bool = False
    moe_layers: frozenset[int] = frozenset()


def read_config(model_dir: str) -> DecoderConfig:
    """Raises ValueError for a model that this forward pass does not cover."""
    with open(os.path.join(model_dir, "config.json")) as file:
        raw = json.load(file)
    family = (raw.get("architectures") or ["?"])[0]
    # Transformers 5 writes rope_parameters, earlier releases rope_scaling (None or absent: plain) and rope_theta.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    odd = [
        text
        for text, found in (
            (f"architecture {family}", family not in FAMILIES),
            (f"rope type {rope_type!r}", rope_type != "default"),
            ("a sliding window", bool(raw.get("use_sliding_window"))),
            (f"activation {raw.get('hidden_act')!r}", raw.get("hidden_act", "silu") != "silu"),
            (
                "partial rotary embedding",
                raw.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0,
            ),
            ("biases in the feed-forward", bool(raw.get("mlp_bias"))),
        )
        if found
    ]
    if odd:
        raise ValueError(f"{model_dir}: the local engine does not cover {', '.join(odd)}; use rollout.engine: sglang")
    heads = raw["num_attention_heads"]
    bias = raw.get("attention_bias", False)
    return DecoderConfig(
        hidden_size=raw["hidden_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_size=raw.get("head_dim") or raw["hidden_size"] // heads,
        ffn_size=raw["intermediate_size"],
        vocab_size=raw["vocab_size"],
        max_position=raw["max_position_embeddings"],
        norm_eps=raw["rms_norm_eps"],
        rope_theta=rope.get("rope_theta") or raw.get("rope_theta", 10000.0),
        tied=raw.get("tie_word_embeddings", False),
        qkv_bias=family == "Qwen2ForCausalLM" or bias,
        o_bias=family != "Qwen2ForCausalLM" and bias,
        qk_norm=family.startswith("Qwen3"),
        dtype=getattr(torch, raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos=_end_tokens(model_dir, raw),
        **(_experts(raw) if family == "Qwen3MoeForCausalLM" else {}),
    )


def _experts(raw: dict) -> dict:
    return dict(
        experts=raw["num_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_ffn_size=raw["moe_intermediate_size"],
        norm_topk=raw.get("norm_topk_prob", False),
        moe_layers=ModelSpec.from_hf(raw).moe_layers,
    )


def _end_tokens(model_dir: str, raw: dict) -> frozenset[int]:
    path = os.path.join(model_dir, "generation_config.json")
    ids = None
    if os.path.exists(path):
        with open(path) as file:
            ids = json.load(file).get("eos_token_id")
    if ids is None:
        ids = raw.get("eos_token_id")
    return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)


class FeedForward:
    """The SwiGLU of a layer."""

    def __init__(self, config: DecoderConfig, empty: Callable[..., torch.Tensor]):
        size, width = config.hidden_size, config.ffn_size
        self.gate_up, self.down = empty(size, 2 * width), empty(width, size)

    def views(self) -> dict[str, torch.Tensor]:
        return _swiglu_views("", self.gate_up, self.down)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x + what is made of y; both [N, hidden]."""
        gate, up = (y @ self.gate_up).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate).mul_(up), self.down)


class Experts:
    """The SwiGLUs of a layer, of which a router picks some for each token."""

    def __init__(self, config: DecoderConfig, empty: Callable[..., torch.Tensor]):
        size, width = config.hidden_size, config.expert_ffn_size
        self.chosen, self.norm_topk = config.experts_per_token, config.norm_topk
        self.router = empty(size, config.experts)
        self.gate_up, self.down = empty(config.experts, size, 2 * width), empty(config.experts, width, size)

    def views(self) -> dict[str, torch.Tensor]:
        views = {"gate.weight": self.router.t()}
        for index, (gate_up, down) in enumerate(zip(self.gate_up, self.down)):
            views |= _swiglu_views(f"experts.{index}.", gate_up, down)
        return views

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x + the weighted sum of what the chosen experts make of y; both [N, hidden]."""
        weight, expert = torch.softmax(y @ self.router, dim=-1, dtype=torch.float32).topk(self.chosen, dim=-1)
        if self.norm_topk:
            weight = weight / weight.sum(dim=-1, keepdim=True)
        # Expert by expert: the tokens that come to one lie side by side.
        order = expert.flatten().argsort(stable=True)
        token = order // self.chosen
        counts = expert.flatten().bincount(minlength=len(self.gate_up)).tolist()
        parts = []
        for index, rows in enumerate(y[token].split(counts)):
            if len(rows):
                gate, up = (rows @ self.gate_up[index]).chunk(2, dim=-1)
                parts.append(F.silu(gate).mul_(up) @ self.down[index])
        return x.index_add(0, token, torch.cat(parts) * weight.flatten()[order, None].to(x.dtype))


def _swiglu_views(prefix: str, gate_up: torch.Tensor, down: torch.Tensor) -> dict[str, torch.Tensor]:
    gate, up = gate_up.chunk(2, dim=-1)
    named = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    return {f"{prefix}{name}.weight": weight.t() for name, weight in named.items()}


class Layer:
    """Weights of one layer. Matrices are kept [in, out]: a plain product is faster than `linear` on few rows."""

    def __init__(self, config: DecoderConfig, index: int, device: torch.device):
        def empty(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=config.dtype, device=device)

        size = config.hidden_size
        self.mlp = (Experts if index in config.moe_layers else FeedForward)(config, empty)
        attention, keys = config.heads * config.head_size, config.kv_heads * config.head_size
        self.input_norm, self.post_norm = empty(size), empty(size)
        self.qkv, self.o = empty(size, attention + 2 * keys), empty(attention, size)
        self.qkv_bias = empty(attention + 2 * keys) if config.qkv_bias else None
        self.o_bias = empty(size) if config.o_bias else None
        self.q_norm = empty(config.head_size) if config.qk_norm else None
        self.k_norm = empty(config.head_size) if config.qk_norm else None

    def views(self, config: DecoderConfig) -> dict[str, torch.Tensor]:
        """Where each tensor of the Hugging Face file goes, as a view of that tensor's own shape."""
        attention, keys = config.heads * config.head_size, config.kv_heads * config.head_size
        views = {
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.post_norm,
            "self_attn.o_proj.weight": self.o.t(),
            **{f"mlp.{name}": view for name, view in self.mlp.views().items()},
        }
        for name, start, width in (("q", 0, attention), ("k", attention, keys), ("v", attention + keys, keys)):
            views[f"self_attn.{name}_proj.weight"] = self.qkv[:, start : start + width].t()
            if self.qkv_bias is not None:
                views[f"self_attn.{name}_proj.bias"] = self.qkv_bias[start : start + width]
        if self.o_bias is not None:
            views["self_attn.o_proj.bias"] = self.o_bias
        if self.q_norm is not None:
            views["self_attn.q_norm.weight"] = self.q_norm
            views["self_attn.k_norm.weight"] = self.k_norm
        return views


class Decoder:
    """The model. Its tensors are made once; `load` overwrites them, so a weight update needs no second copy."""

    def __init__(self, config: DecoderConfig, device: str = "cpu"):
        self.config = config
        self.device = torch.device(device)
        self.embedding = torch.zeros(config.vocab_size, config.hidden_size, dtype=config.dtype, device=self.device)
        self.head = self.embedding if config.tied else torch.zeros_like(self.embedding)
        self.norm = torch.zeros(config.hidden_size, dtype=config.dtype, device=self.device)
        self.layers = [Layer(config, index, self.device) for index in range(config.layers)]
        power = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
        angles = torch.outer(torch.arange(config.max_position, dtype=torch.float32), config.rope_theta**-power)
        angles = torch.cat((angles, angles), dim=-1)
        self.cos = angles.cos().to(config.dtype).to(self.device)
        self.sin = angles.sin().to(config.dtype).to(self.device)

    def _views(self) -> dict[str, torch.Tensor]:
        views = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.config.tied:
            views["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            views.update({f"model.layers.{index}.{name}": view for name, view in layer.views(self.config).items()})
        return views

    def load(self, model_dir: str) -> None:
        """Take the weights of the directory. Raises ValueError, with nothing overwritten, on a mismatch."""
        views = self._views()
        paths = sorted(glob.glob(os.path.join(model_dir, "*.safetensors")))
        files = [safe_open(path, framework="pt") for path in paths]
        where = {name: file for file in files for name in file.keys()}
        if self.config.tied:
            where.pop("lm_head.weight", None)
        if where.keys() != views.keys():
            missing, extra = sorted(views.keys() - where.keys()), sorted(where.keys() - views.keys())
            raise ValueError(
                f"{model_dir}: {len(missing)} tensors are missing {missing[:3]}, "
                f"{len(extra)} are unknown {extra[:3]}"
            )
        for name, view in views.items():
            shape = tuple(where[name].get_slice(name).get_shape())
            if shape != tuple(view.shape):
                raise ValueError(f"{model_dir}: {name} has shape {shape}, the engine holds {tuple(view.shape)}")
        for name, view in views.items():
            view.copy_(where[name].get_tensor(name))

    def forward(self, tokens_N: torch.Tensor, positions_N: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states [N, hidden] before the last norm. `attend` keeps keys and values and does the attention."""
        config = self.config
        heads, rotated, eps = config.heads, config.heads + config.kv_heads, config.norm_eps
        shape = (tokens_N.shape[0], config.heads + 2 * config.kv_heads, config.head_size)
        cos, sin = self.cos[positions_N][:, None], self.sin[positions_N][:, None]
        half = config.head_size // 2
        x = F.embedding(tokens_N, self.embedding)
        for index, layer in enumerate(self.layers):
            y = F.rms_norm(x, (config.hidden_size,), layer.input_norm, eps)
            qkv = (y @ layer.qkv if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, y, layer.qkv)).view(shape)
            qk = qkv[:, :rotated]
            if layer.q_norm is not None:
                qk[:, :heads] = F.rms_norm(qk[:, :heads], (config.head_size,), layer.q_norm, eps)
                qk[:, heads:] = F.rms_norm(qk[:, heads:], (config.head_size,), layer.k_norm, eps)
            turned = torch.cat((-qk[..., half:], qk[..., :half]), dim=-1)
            qk.mul_(cos).addcmul_(turned, sin)
            x = torch.addmm(x, attend(index, qkv[:, :heads], qkv[:, heads:]), layer.o)
            if layer.o_bias is not None:
                x = x + layer.o_bias
            x = layer.mlp.add(x, F.rms_norm(x, (config.hidden_size,), layer.post_norm, eps))
        return x

    def logits(self, hidden_N: torch.Tensor) -> torch.Tensor:
        """[N, vocabulary] of hidden states that `forward` returned."""
        return F.linear(F.rms_norm(hidden_N, (self.config.hidden_size,), self.norm, self.config.norm_eps), self.head)
