"""Where each piece of a Hugging Face checkpoint lives in a Megatron model, for any tensor-parallel size.

Every Megatron parameter of every rank is a concatenation of row ranges (or column ranges) of Hugging Face tensors::

    linear_qkv  = for each key/value head of the rank: [its query heads | the key head | the value head]
    linear_fc1  = [gate rows of the rank | up rows of the rank]
    embedding   = vocabulary rows of the rank, zero rows at the end where the vocabulary does not divide
    linear_proj, linear_fc2 = columns of the rank
    norms       = the whole tensor on every rank

So loading copies `Slice`s into a parameter and exporting copies them back; nothing is computed and the round trip is
bitwise. Pure geometry: no torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

# model_type -> (bias on q, k and v; norm on each query and key head)
FAMILIES = {"qwen2": (True, False), "llama": (False, False), "qwen3": (False, True)}


class ModelError(ValueError):
    """A config.json asks for something that this project cannot build."""


@dataclass(frozen=True)
class Arch:
    """Sizes of a decoder-only model with RMSNorm, rotary embedding and SwiGLU."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    rope_theta: float
    norm_eps: float
    max_position: int
    qkv_bias: bool
    qk_norm: bool

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Arch:
        """Read a Hugging Face config.json. Raises ModelError where the model needs more than `Arch` can say."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ModelError(f"model_type {family!r} is not one of {', '.join(FAMILIES)}")
        bias, qk_norm = FAMILIES[family]
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        refused = {
            "rope_type": rope_type not in (None, "default") and rope_type,
            "use_sliding_window": config.get("use_sliding_window"),
            "mlp_bias": config.get("mlp_bias"),
            # Except for qwen2, where it is not a setting, this bias comes with one on the output projection.
            "attention_bias": family != "qwen2" and config.get("attention_bias"),
            "hidden_act": config.get("hidden_act", "silu") != "silu" and config["hidden_act"],
        }
        for key, value in refused.items():
            if value:
                raise ModelError(f"{key}: {value!r} is not supported; {family} models are built without it")
        heads = config["num_attention_heads"]
        return cls(
            family=family,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=config.get("tie_word_embeddings", False),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            max_position=config.get("max_position_embeddings", 32_768),
            qkv_bias=bias,
            qk_norm=qk_norm,
        )

    def padded_vocab(self, tp: int) -> int:
        """The vocabulary rounded up so that every rank holds as many rows."""
        return -(-self.vocab // tp) * tp

    def check_tp(self, tp: int) -> None:
        """Raise ModelError where `tp` ranks cannot share the heads or the feed-forward width."""
        for what, size in (
            ("key/value heads", self.kv_heads),
            ("query heads", self.heads),
            ("feed-forward width", self.ffn),
        ):
            if size % tp:
                raise ModelError(f"{size} {what} do not divide by tensor-parallel size {tp}")


class Slice(NamedTuple):
    """`start:stop` of a Hugging Face tensor, along its shard's axis."""

    tensor: str
    start: int
    stop: int


class Shard(NamedTuple):
    """One Megatron parameter of one rank: `slices` concatenated along `axis`, zeros up to `shape` behind them."""

    name: str
    shape: tuple[int, ...]
    axis: int
    slices: tuple[Slice, ...]


def hf_shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the Hugging Face checkpoint."""
    q_rows, kv_rows = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab, arch.hidden)}
    for layer in range(arch.layers):
        p = f"model.layers.{layer}."
        shapes[p + "input_layernorm.weight"] = (arch.hidden,)
        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            shapes[f"{p}self_attn.{name}_proj.weight"] = (rows, arch.hidden)
            if arch.qkv_bias:
                shapes[f"{p}self_attn.{name}_proj.bias"] = (rows,)
        if arch.qk_norm:
            shapes[p + "self_attn.q_norm.weight"] = shapes[p + "self_attn.k_norm.weight"] = (arch.head_dim,)
        shapes[p + "self_attn.o_proj.weight"] = (arch.hidden, q_rows)
        shapes[p + "post_attention_layernorm.weight"] = (arch.hidden,)
        shapes[p + "mlp.gate_proj.weight"] = shapes[p + "mlp.up_proj.weight"] = (arch.ffn, arch.hidden)
        shapes[p + "mlp.down_proj.weight"] = (arch.hidden, arch.ffn)
    shapes["model.norm.weight"] = (arch.hidden,)
    if not arch.tied:
        shapes["lm_head.weight"] = (arch.vocab, arch.hidden)
    return shapes


def shards(arch: Arch, tp: int, rank: int) -> list[Shard]:
    """Every parameter of tensor-parallel rank `rank`, in the model's order. Raises ModelError if `tp` does not fit."""
    arch.check_tp(tp)
    result = [_vocab_rows(arch, tp, rank, "embedding.word_embeddings.weight", "model.embed_tokens.weight")]
    for layer in range(arch.layers):
        hf, mg = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        result.append(_whole(mg + "input_layernorm.weight", hf + "input_layernorm.weight", arch.hidden))
        result.append(
            _columns(
                mg + "self_attention.linear_proj.weight",
                hf + "self_attn.o_proj.weight",
                arch.hidden,
                arch.heads * arch.head_dim,
                tp,
                rank,
            )
        )
        result.append(_qkv(arch, tp, rank, mg, hf, "weight"))
        if arch.qkv_bias:
            result.append(_qkv(arch, tp, rank, mg, hf, "bias"))
        if arch.qk_norm:
            for name in "qk":
                result.append(
                    _whole(
                        f"{mg}self_attention.{name}_layernorm.weight",
                        f"{hf}self_attn.{name}_norm.weight",
                        arch.head_dim,
                    )
                )
        result.append(_whole(mg + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight", arch.hidden))
        rows = arch.ffn // tp
        gate_up = tuple(Slice(f"{hf}mlp.{name}_proj.weight", rank * rows, (rank + 1) * rows) for name in ("gate", "up"))
        result.append(Shard(mg + "mlp.linear_fc1.weight", (2 * rows, arch.hidden), 0, gate_up))
        result.append(
            _columns(mg + "mlp.linear_fc2.weight", hf + "mlp.down_proj.weight", arch.hidden, arch.ffn, tp, rank)
        )
    result.append(_whole("decoder.final_layernorm.weight", "model.norm.weight", arch.hidden))
    if not arch.tied:
        result.append(_vocab_rows(arch, tp, rank, "output_layer.weight", "lm_head.weight"))
    return result


def is_replicated(shard: Shard) -> bool:
    """Whether every tensor-parallel rank holds the same values, so that one of them is enough to export."""
    return len(shard.shape) == 1 and shard.name.endswith("norm.weight")


def vocab_range(arch: Arch, tp: int, rank: int) -> tuple[int, int]:
    """First and last-plus-one real token id whose row this rank holds; padding rows are not counted."""
    rows = arch.padded_vocab(tp) // tp
    return min(rank * rows, arch.vocab), min((rank + 1) * rows, arch.vocab)


def _whole(name: str, tensor: str, size: int) -> Shard:
    return Shard(name, (size,), 0, (Slice(tensor, 0, size),))


def _columns(name: str, tensor: str, rows: int, columns: int, tp: int, rank: int) -> Shard:
    width = columns // tp
    return Shard(name, (rows, width), 1, (Slice(tensor, rank * width, (rank + 1) * width),))


def _vocab_rows(arch: Arch, tp: int, rank: int, name: str, tensor: str) -> Shard:
    return Shard(name, (arch.padded_vocab(tp) // tp, arch.hidden), 0, (Slice(tensor, *vocab_range(arch, tp, rank)),))


def _qkv(arch: Arch, tp: int, rank: int, mg: str, hf: str, kind: str) -> Shard:
    head, per_group, groups = arch.head_dim, arch.heads // arch.kv_heads, arch.kv_heads // tp
    slices = []
    for group in range(rank * groups, (rank + 1) * groups):
        slices.append(Slice(f"{hf}self_attn.q_proj.{kind}", group * per_group * head, (group + 1) * per_group * head))
        slices.append(Slice(f"{hf}self_attn.k_proj.{kind}", group * head, (group + 1) * head))
        slices.append(Slice(f"{hf}self_attn.v_proj.{kind}", group * head, (group + 1) * head))
    rows = groups * (per_group + 2) * head
    shape = (rows, arch.hidden) if kind == "weight" else (rows,)
    return Shard(f"{mg}self_attention.linear_qkv.{kind}", shape, 0, tuple(slices))
