"""The logical tensors of a model: what exists, whoever holds it.

They are the tensors of its Hugging Face checkpoint, by name and shape, with global numbers of layers and experts. Every
parallel cut of Megatron or of an engine is then a range of their rows or columns. Tied embeddings are one tensor.

>>> from dynarl.vps.presets import preset
>>> spec = preset("smollm2-135m")
>>> spec.tensors[0]
LogicalTensor(name='model.embed_tokens.weight', shape=(49152, 576), buffer=False)
>>> f"{spec.parameters:,}"
'134,515,008'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


class SpecError(ValueError):
    """A config asks for a model whose tensors are not known here."""


class LogicalTensor(NamedTuple):
    """One tensor of the model. `buffer`: it is not trained (the selection bias of a router) and never cut by ZeRO."""

    name: str
    shape: tuple[int, ...]
    buffer: bool = False


class Kind(NamedTuple):
    """One kind of state that tensors have: its dtype, and which kind's cuts it follows ("param" or "master")."""

    name: str
    dtype: str
    sharded_as: str


OPTIMIZER_KINDS = tuple(Kind(name, "float32", "master") for name in ("master", "exp_avg", "exp_avg_sq"))


class Latent(NamedTuple):
    """Sizes of multi-head latent attention; q_rank 0: queries are projected in one step."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only model by its sizes. `tensors` follows from them."""

    name: str
    layers: int
    hidden: int
    heads: int
    groups: int  # key/value heads; a group is one of them with its query heads
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    dtype: str = "bfloat16"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    gated: bool = True
    norm_bias: bool = False
    positions: int = 0  # rows of a learned position embedding
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0  # all shared experts together
    router_bias: bool = False
    moe_layers: frozenset[int] = frozenset()
    latent: Latent | None = None
    mixtral_names: bool = False
    extra_kinds: tuple[Kind, ...] = ()

    @classmethod
    def from_hf(cls, config: dict[str, Any], name: str = "") -> ModelSpec:
        """The spec of a Hugging Face config.json. Raises SpecError where its tensors are not known here.

        Layers that only predict further tokens (DeepSeek's last ones) are left out, as transformers leaves them out.
        """
        family = config.get("model_type")
        if family not in _FAMILIES:
            raise SpecError(f"model_type {family!r} is not one of {', '.join(sorted(_FAMILIES))}")
        try:
            return cls._from_hf(config, family, name)
        except KeyError as error:
            raise SpecError(f"the config of a {family} model must have {error.args[0]}") from None

    @classmethod
    def _from_hf(cls, config: dict[str, Any], family: str, name: str) -> ModelSpec:
        heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
        bias = bool(config.get("attention_bias"))
        sizes = dict(
            name=name or config.get("_name_or_path") or family,
            layers=layers,
            hidden=config["hidden_size"],
            heads=heads,
            groups=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            dtype=config.get("dtype") or config.get("torch_dtype") or "bfloat16",
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bool(config.get("mlp_bias")),
        )
        spec = cls(**(sizes | _FAMILIES[family](config, layers)))
        if spec.heads % spec.groups:
            raise SpecError(f"{spec.name}: {spec.groups} key/value heads do not divide {spec.heads} attention heads")
        if spec.latent and bias:
            raise SpecError(f"{spec.name}: attention_bias is not supported with latent attention")
        if spec.dtype not in ITEMSIZE:
            raise SpecError(f"{spec.name}: dtype {spec.dtype!r} is not one of {', '.join(ITEMSIZE)}")
        return spec

    # ---- kinds of state

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Parameters, fp32 masters, Adam's moments, and what was registered."""
        return (Kind("param", self.dtype, "param"), *OPTIMIZER_KINDS, *self.extra_kinds)

    def kind(self, name: str) -> Kind:
        """A kind by its name. Raises ValueError if it is not registered."""
        kinds = {kind.name: kind for kind in self.kinds}
        if name not in kinds:
            raise ValueError(f"kind {name!r} is not one of {', '.join(kinds)}; register it first")
        return kinds[name]

    def itemsize(self, kind: str) -> int:
        """Bytes of one element of a kind."""
        return ITEMSIZE[self.kind(kind).dtype]

    def with_kind(self, name: str, dtype: str, sharded_as: str = "master") -> ModelSpec:
        """The same model with one more kind of state for each tensor, such as an average of the weights."""
        if name in (kind.name for kind in self.kinds):
            raise ValueError(f"kind {name!r} is registered already")
        if dtype not in ITEMSIZE or sharded_as not in ("param", "master"):
            raise ValueError(f"kind {name!r}: dtype {dtype!r}, sharded as {sharded_as!r}")
        return dataclasses.replace(self, extra_kinds=(*self.extra_kinds, Kind(name, dtype, sharded_as)))

    # ---- tensors. Order: embeddings, the layers one after the other, final norm, output layer.

    @cached_property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        """Every logical tensor; layouts and plans name them by their index here."""
        return tuple(self._tensors())

    @cached_property
    def index(self) -> dict[str, int]:
        """Index of each tensor by its name."""
        return {tensor.name: i for i, tensor in enumerate(self.tensors)}

    @cached_property
    def shapes(self) -> np.ndarray:
        """int64 [T, A]; a tensor of one axis has size 1 on the second."""
        per_layer = {
            moe: np.array([(*shape, 1)[:2] for _, shape in self.layer_tensors(moe)], np.int64)
            for moe in {layer in self.moe_layers for layer in range(self.layers)}
        }
        ends = [np.array([(*t.shape, 1)[:2] for t in part], np.int64) for part in (self._head(), self._tail())]
        layers = [per_layer[layer in self.moe_layers] for layer in range(self.layers)]
        return np.concatenate([ends[0], *layers, ends[1]])

    @cached_property
    def sizes(self) -> np.ndarray:
        """Elements of each tensor, int64 [T]."""
        return self.shapes.prod(axis=1)

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return int(self.sizes.sum())

    @cached_property
    def layer_starts(self) -> np.ndarray:
        """Index of the first tensor of each layer, and of the first one behind the layers: int64 [layers + 1]."""
        counts = [len(self.layer_tensors(layer in self.moe_layers)) for layer in range(self.layers)]
        return len(self._head()) + np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)

    def layer_tensors(self, moe: bool) -> list[tuple[str, tuple[int, ...]]]:
        """(name without its layer, shape) of every tensor of a layer, in order."""
        return list(self._layer_tensors[moe])

    def expert_suffix(self, expert: int, part: str) -> str:
        """Name of an expert's tensor without its layer; part: gate, up or down."""
        if self.mixtral_names:
            return f"block_sparse_moe.experts.{expert}.{dict(gate='w1', up='w3', down='w2')[part]}.weight"
        return f"mlp.experts.{expert}.{part}_proj.weight"

    @property
    def router_suffix(self) -> str:
        """Name of the router's weight without its layer."""
        return "block_sparse_moe.gate.weight" if self.mixtral_names else "mlp.gate.weight"

    @cached_property
    def _layer_tensors(self) -> dict[bool, tuple[tuple[str, tuple[int, ...]], ...]]:
        attention = tuple(self._attention())
        return {False: attention + tuple(self._dense()), True: attention + tuple(self._moe())}

    @cached_property
    def layer_offsets(self) -> dict[bool, dict[str, int]]:
        """Number of each tensor in its layer by its name without it, for layers with experts and without."""
        return {moe: {name: i for i, (name, _) in enumerate(parts)} for moe, parts in self._layer_tensors.items()}

    def _tensors(self) -> Iterator[LogicalTensor]:
        yield from self._head()
        for layer in range(self.layers):
            for suffix, shape in self._layer_tensors[layer in self.moe_layers]:
                yield LogicalTensor(f"model.layers.{layer}.{suffix}", shape, suffix == ROUTER_BIAS)
        yield from self._tail()

    def _head(self) -> list[LogicalTensor]:
        head = [LogicalTensor(EMBEDDING, (self.vocab, self.hidden))]
        if self.positions:
            head.append(LogicalTensor(POSITIONS, (self.positions, self.hidden)))
        return head

    def _tail(self) -> list[LogicalTensor]:
        tail = [LogicalTensor(f"model.{name}", shape) for name, shape in self._norm("norm", self.hidden)]
        return tail if self.tied else [*tail, LogicalTensor(OUTPUT, (self.vocab, self.hidden))]

    def _norm(self, name: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (size,)
        if self.norm_bias:
            yield f"{name}.bias", (size,)

    def _linear(self, name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (rows, columns)
        if bias:
            yield f"{name}.bias", (rows,)

    def _attention(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self._norm("input_layernorm", self.hidden)
        if self.latent:
            yield from self._latent_attention(self.latent)
        else:
            for name, heads in (("q", self.heads), ("k", self.groups), ("v", self.groups)):
                yield from self._linear(f"self_attn.{name}_proj", heads * self.head_dim, self.hidden, self.qkv_bias)
            if self.qk_norm:
                yield from self._norm("self_attn.q_norm", self.head_dim)
                yield from self._norm("self_attn.k_norm", self.head_dim)
            yield from self._linear("self_attn.o_proj", self.hidden, self.heads * self.head_dim, self.out_bias)
        yield from self._norm("post_attention_layernorm", self.hidden)

    def _latent_attention(self, latent: Latent) -> Iterator[tuple[str, tuple[int, ...]]]:
        q_rows = self.heads * (latent.nope_dim + latent.rope_dim)
        if latent.q_rank:
            yield from self._linear("self_attn.q_a_proj", latent.q_rank, self.hidden, False)
            yield from self._norm("self_attn.q_a_layernorm", latent.q_rank)
            yield from self._linear("self_attn.q_b_proj", q_rows, latent.q_rank, False)
        else:
            yield from self._linear("self_attn.q_proj", q_rows, self.hidden, False)
        yield from self._linear("self_attn.kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim, self.hidden, False)
        yield from self._norm("self_attn.kv_a_layernorm", latent.kv_rank)
        kv_rows = self.heads * (latent.nope_dim + latent.value_dim)
        yield from self._linear("self_attn.kv_b_proj", kv_rows, latent.kv_rank, False)
        yield from self._linear("self_attn.o_proj", self.hidden, self.heads * latent.value_dim, self.out_bias)

    def _dense(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        if not self.gated:
            yield from self._linear("mlp.fc1", self.ffn, self.hidden, self.mlp_bias)
            yield from self._linear("mlp.fc2", self.hidden, self.ffn, self.mlp_bias)
            return
        for name in ("gate", "up"):
            yield from self._linear(f"mlp.{name}_proj", self.ffn, self.hidden, self.mlp_bias)
        yield from self._linear("mlp.down_proj", self.hidden, self.ffn, self.mlp_bias)

    def _moe(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.router_suffix, (self.experts, self.hidden)
        if self.router_bias:
            yield ROUTER_BIAS, (self.experts,)
        if self.shared_ffn:
            for name in ("gate", "up"):
                yield f"mlp.shared_experts.{name}_proj.weight", (self.shared_ffn, self.hidden)
            yield "mlp.shared_experts.down_proj.weight", (self.hidden, self.shared_ffn)
        # gate, up, down of one expert after the other: index arithmetic in the layouts rests on it.
        for expert in range(self.experts):
            for part in ("gate", "up"):
                yield self.expert_suffix(expert, part), (self.expert_ffn, self.hidden)
            yield self.expert_suffix(expert, "down"), (self.hidden, self.expert_ffn)


EMBEDDING = "model.embed_tokens.weight"
POSITIONS = "model.embed_positions.weight"
OUTPUT = "lm_head.weight"
ROUTER_BIAS = "mlp.gate.e_score_correction_bias"


def _experts(config: dict[str, Any]) -> int:
    """Number of experts, by whichever of its names a config has it."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((config[name] for name in names if config.get(name)), 0)


def _qwen3_moe(config: dict[str, Any], layers: int) -> dict[str, Any]:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return dict(
        qk_norm=True,
        experts=_experts(config),
        expert_ffn=config["moe_intermediate_size"],
        moe_layers=frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    )


def _mixtral(config: dict[str, Any], layers: int) -> dict[str, Any]:
    return dict(
        experts=_experts(config),
        expert_ffn=config["intermediate_size"],
        moe_layers=frozenset(range(layers)),
        mixtral_names=True,
    )


def _deepseek(config: dict[str, Any], layers: int) -> dict[str, Any]:
    first, step = config.get("first_k_dense_replace", 0), config.get("moe_layer_freq", 1)
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    latent = Latent(config.get("q_lora_rank") or 0, config["kv_lora_rank"], nope, rope, config["v_head_dim"])
    experts = _experts(config)
    return dict(
        groups=config["num_attention_heads"],  # one latent vector is cached, but every head has its own key and value
        head_dim=nope + rope,
        qkv_bias=False,
        experts=experts,
        expert_ffn=config.get("moe_intermediate_size", 0),
        shared_ffn=(config.get("n_shared_experts") or 0) * config.get("moe_intermediate_size", 0),
        router_bias=bool(experts) and config.get("topk_method", _DEFAULT_TOPK[config["model_type"]]) == "noaux_tc",
        moe_layers=frozenset(i for i in range(first, layers) if i % step == 0) if experts else frozenset(),
        latent=latent,
    )


_DEFAULT_TOPK = {"deepseek_v2": "greedy", "deepseek_v3": "noaux_tc"}

# model_type -> what its config says beyond the sizes that all have
_FAMILIES = {
    "llama": lambda config, layers: {},
    "qwen2": lambda config, layers: dict(qkv_bias=True, out_bias=False),
    "qwen3": lambda config, layers: dict(qk_norm=True),
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
