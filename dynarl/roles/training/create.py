"""A Qwen2 model, or with experts a Qwen3-MoE one, with random weights, in Hugging Face form."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import torch

from dynarl.roles.training.weights import write_weights
from dynarl.transport.hf import copy_small_files
from dynarl.vps.digest import digest_weights
from dynarl.vps.spec import ModelSpec


def create_model(model_dir: str, model: dict[str, Any], tokenizer_dir: str, seed: int) -> dict[str, Any]:
    """Write config.json, weights and tokenizer files to `model_dir`. model: the section `model` of a job's config.

    Each tensor's values depend on the seed and its own name only. Returns {parameters, digest}.
    Raises ValueError if heads do not divide the width, or if `model_dir` holds weights already.
    """
    directory = Path(model_dir)
    if (directory / "model.safetensors").exists():
        raise ValueError(f"{directory} holds a model already; it is not overwritten")
    vocab, special = _tokenizer_ids(Path(tokenizer_dir))
    config = hf_config(model, vocab, special)
    spec = ModelSpec.from_hf(config)
    tensors = {name: _initial(name, shape, spec, seed) for name, shape, _ in spec.tensors}
    directory.mkdir(parents=True, exist_ok=True)
    copy_small_files(Path(tokenizer_dir), directory)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    write_weights({name: value.to(getattr(torch, model["dtype"])) for name, value in tensors.items()}, directory)
    return {"parameters": sum(value.numel() for value in tensors.values()), "digest": digest_weights(model_dir)}


def hf_config(model: dict[str, Any], vocab: int, special: dict[str, int | None]) -> dict[str, Any]:
    """The config.json of a model of the given sizes; special: token ids of bos, eos and pad."""
    hidden, heads, kv_heads = model["hidden_size"], model["heads"], model["kv_heads"]
    if hidden % heads or heads % kv_heads:
        raise ValueError(
            f"model: {heads} heads must divide hidden_size {hidden}, and {kv_heads} kv_heads must divide {heads} heads"
        )
    family = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    if model["experts"]:
        family = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "head_dim": hidden // heads,
            "num_experts": model["experts"],
            "num_experts_per_tok": model["experts_per_token"],
            "moe_intermediate_size": model["ffn_size"],
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return {
        **family,
        "hidden_size": hidden,
        "num_hidden_layers": model["layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": model["ffn_size"],
        "vocab_size": vocab,
        "max_position_embeddings": model["max_position"],
        "tie_word_embeddings": model["tied"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "initializer_range": hidden**-0.5,
        "use_sliding_window": False,
        "torch_dtype": model["dtype"],
        **special,
    }


def _initial(name: str, shape: tuple[int, ...], spec: ModelSpec, seed: int) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    # Scaled by the width, for the usual 0.02 for all is made for large models. At 1.0 every layer would keep the size
    # of what goes in; somewhat less makes a small model learn more from the same supervised steps.
    std = 0.6 * shape[1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        # Outputs of residual branches are made smaller by their number, so that the sum keeps its size (GPT-2).
        std /= math.sqrt(2 * spec.layers)
    # torch's CPU generator looks at the low 32 bits of a seed only, so both have to be mixed into those.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return torch.randn(shape, generator=generator) * std


def _tokenizer_ids(directory: Path) -> tuple[int, dict[str, int | None]]:
    """Size of the vocabulary and ids of the special tokens, from tokenizer.json and tokenizer_config.json."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    vocab = tokenizer["model"]["vocab"]
    ids.update(vocab if isinstance(vocab, dict) else {piece[0]: index for index, piece in enumerate(vocab)})
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    special = {}
    for kind in ("bos", "eos", "pad"):
        token = settings.get(f"{kind}_token")
        special[f"{kind}_token_id"] = ids.get(token["content"] if isinstance(token, dict) else token)
    return max(ids.values()) + 1, special
