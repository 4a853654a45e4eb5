"""What a model costs per token: operations and bytes, from its sizes.

- A token's forward pass takes two operations for every parameter it goes through (the embedding is a look-up, the
  output layer is not), and for each earlier token 4 * layers * heads * head_dim for scores and weighted sum.
- Its keys and values take 2 * layers * groups * head_dim numbers; with latent attention layers * (kv_rank + rope_dim).

Backward takes twice as much as forward (Kaplan et al., 2020, section 2.1).

>>> cost = ModelCost.of("qwen2.5-7b")
>>> f"{cost.num_params:,}", cost.kv_bytes_per_token
('7,615,616,512', 57344)
"""

from __future__ import annotations

from dataclasses import dataclass

from dynarl.errors import ConfigError
from dynarl.vps.presets import PRESETS, preset
from dynarl.vps.spec import EMBEDDING, ITEMSIZE, POSITIONS, ModelSpec

# Experts that a token goes through, in the published configs (num_experts_per_tok).
EXPERTS_PER_TOKEN = {"qwen3-30b-a3b": 8, "qwen3-235b-a22b": 8}


@dataclass(frozen=True)
class ModelCost:
    """Sizes that costs follow from. `table_params`: of look-ups; they take memory, but no operations."""

    name: str
    layers: int
    hidden: int
    heads: int
    groups: int
    num_params: int
    table_params: int
    expert_params: int  # of all experts, shared ones not counted
    experts: int
    experts_per_token: int
    moe_layers: int
    kv_per_token: int  # numbers
    shared_kv: bool  # one latent vector for all heads: no cut by tensor parallelism
    attention_width: int  # heads * (dimensions of a score + those of a value) / 2
    ffn_width: float  # rows of the feed-forward layers that a token goes through, on average over the layers
    gated: bool  # a feed-forward layer multiplies two halves of that width
    vocab: int
    dtype_bytes: int = 2

    @classmethod
    def of(cls, model: str | ModelSpec, experts_per_token: int | None = None) -> ModelCost:
        """From a preset's name or a spec. experts_per_token: needed for a model with experts that is no preset.

        Raises ConfigError.
        """
        if isinstance(model, str):
            if model not in PRESETS:
                raise ConfigError(f"model {model!r}: there are {', '.join(PRESETS)}")
            model = preset(model)
        chosen = experts_per_token or EXPERTS_PER_TOKEN.get(model.name)
        if model.experts and not chosen:
            raise ConfigError(
                f"{model.name} has {model.experts} experts: say how many a token goes through (experts_per_token)"
            )
        latent = model.latent
        expert_params = len(model.moe_layers) * model.experts * 3 * model.expert_ffn * model.hidden
        tables = sum(int(model.sizes[model.index[name]]) for name in (EMBEDDING, POSITIONS) if name in model.index)
        if model.tied:
            tables -= model.vocab * model.hidden  # the output layer's products go through it
        return cls(
            name=model.name,
            layers=model.layers,
            hidden=model.hidden,
            heads=model.heads,
            groups=model.groups,
            num_params=model.parameters,
            table_params=tables,
            expert_params=expert_params,
            experts=model.experts,
            experts_per_token=chosen if model.experts else 0,
            moe_layers=len(model.moe_layers),
            kv_per_token=model.layers * (
                latent.kv_rank + latent.rope_dim if latent else 2 * model.groups * model.head_dim
            ),
            shared_kv=latent is not None,
            attention_width=model.heads * (
                (latent.nope_dim + latent.rope_dim + latent.value_dim) // 2 if latent else model.head_dim
            ),
            ffn_width=_ffn_width(model, chosen or 0),
            gated=model.gated,
            vocab=model.vocab,
            dtype_bytes=ITEMSIZE[model.dtype],
        )

    @property
    def expert_share(self) -> float:
        """Of the experts that one token goes through."""
        return self.experts_per_token / self.experts if self.experts else 0.0

    @property
    def active_params(self) -> int:
        """Parameters that a token goes through: those of the experts it chooses, and no look-up table."""
        idle = round(self.expert_params * (1 - self.expert_share)) if self.expert_params else 0
        return self.num_params - self.table_params - idle

    @property
    def weight_bytes(self) -> int:
        return self.num_params * self.dtype_bytes

    @property
    def expert_weight_bytes(self) -> int:
        return self.expert_params * self.dtype_bytes

    @property
    def dense_weight_bytes(self) -> int:
        """What every decode step reads. A step looks up a few rows of a table only."""
        return (self.num_params - self.table_params - self.expert_params) * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.kv_per_token * self.dtype_bytes

    def kv_bytes_per_token_per_device(self, tp: int) -> float:
        """Beyond one device per key/value head there are copies."""
        return self.kv_bytes_per_token / (1 if self.shared_kv else min(tp, self.groups))

    @property
    def flops_per_pair(self) -> int:
        """Of a token's attention to one other."""
        return 4 * self.layers * self.attention_width

    def flops_per_token(self, context: float) -> float:
        """Of a token's forward pass behind `context` others."""
        return 2 * self.active_params + self.flops_per_pair * context

    @property
    def activation_numbers(self) -> float:
        """That one token leaves in a layer for the way back, where nothing is computed again: the inputs of norms and
        of products, queries, keys, values, the attention's output, and what the feed-forward layer multiplies.
        """
        attention = 2 * self.attention_width + self.kv_per_token / self.layers
        return 4 * self.hidden + attention + (3 if self.gated else 2) * self.ffn_width

    def check_tensor_parallel(self, tp: int) -> None:
        """Raises ConfigError where `tp` does not cut the heads evenly; key/value heads may be copied."""
        if tp < 1 or self.heads % tp or (self.groups % tp and tp % self.groups):
            raise ConfigError(
                f"{self.name}: tp={tp} does not cut {self.heads} heads and {self.groups} key/value heads evenly"
            )


def _ffn_width(model: ModelSpec, experts_per_token: int) -> float:
    routed = experts_per_token * model.expert_ffn + model.shared_ffn
    moe = len(model.moe_layers)
    return (moe * routed + (model.layers - moe) * model.ffn) / model.layers
