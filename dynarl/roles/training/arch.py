"""What a trainer must know of a model beside its tensors: how they are used. From the config.json of its ModelSpec."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynarl.vps.spec import ModelSpec

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


class ModelError(ValueError):
    """A config.json asks for something that the trainer cannot build."""


@dataclass(frozen=True)
class Arch:
    """A decoder-only model with RMSNorm, rotary embedding and SwiGLU, dense or with experts."""

    spec: ModelSpec
    rope_theta: float
    norm_eps: float
    max_position: int
    experts_per_token: int = 0
    norm_topk: bool = True  # whether the weights of the chosen experts are made to sum up to 1

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Arch:
        """Read a Hugging Face config.json. Raises ModelError where the model needs more than `Arch` can say."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ModelError(f"model_type {family!r} is not one of {', '.join(FAMILIES)}")
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
        return cls(
            spec=ModelSpec.from_hf(config),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            max_position=config.get("max_position_embeddings", 32_768),
            experts_per_token=config.get("num_experts_per_tok", 0) if family == "qwen3_moe" else 0,
            norm_topk=bool(config.get("norm_topk_prob", False)),
        )


def read_arch(model_dir: str | os.PathLike[str]) -> Arch:
    """The model of a Hugging Face directory."""
    return Arch.from_config(json.loads((Path(model_dir) / "config.json").read_text()))
