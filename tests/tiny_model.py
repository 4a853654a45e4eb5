"""A small random model in Hugging Face form, written by hand: tests of engines need no transformers to have one."""

from __future__ import annotations

import json
import os

import torch
from safetensors.torch import save_file

SIZES = dict(hidden_size=64, layers=2, heads=4, kv_heads=2, ffn_size=96, vocab_size=48, max_position=256)
MODEL_TYPES = {"Qwen3MoeForCausalLM": "qwen3_moe"}


def write_model(
    directory: str,
    seed: int = 0,
    family: str = "Qwen2ForCausalLM",
    tied: bool = True,
    eos: int | None = 0,
    **sizes: int,
) -> str:
    """Write config.json and model.safetensors (weights normal with std 0.1, 0.2 in the layers, so that answers vary).

    Returns the directory. experts: their number, for Qwen3MoeForCausalLM; each token goes to two of them.
    """
    experts = sizes.pop("experts", 4) if "Moe" in family else 0
    size = SIZES | sizes
    hidden, heads, kv_heads, ffn = size["hidden_size"], size["heads"], size["kv_heads"], size["ffn_size"]
    head = hidden // heads
    config = {
        "architectures": [family],
        "model_type": MODEL_TYPES.get(family, family.removesuffix("ForCausalLM").lower()),
        "hidden_size": hidden,
        "num_hidden_layers": size["layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "intermediate_size": ffn,
        "vocab_size": size["vocab_size"],
        "max_position_embeddings": size["max_position"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "eos_token_id": eos,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    if experts:
        config |= {
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": ffn // 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    tensors = {"model.embed_tokens.weight": random(size["vocab_size"], hidden), "model.norm.weight": 1 + random(hidden)}
    if not tied:
        tensors["lm_head.weight"] = random(size["vocab_size"], hidden)
    for layer in range(size["layers"]):
        prefix = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj.weight": (heads * head, hidden),
            "self_attn.k_proj.weight": (kv_heads * head, hidden),
            "self_attn.v_proj.weight": (kv_heads * head, hidden),
            "self_attn.o_proj.weight": (hidden, heads * head),
            "mlp.gate_proj.weight": (ffn, hidden),
            "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
        }
        if family == "Qwen2ForCausalLM":
            shapes |= {f"self_attn.{name}_proj.bias": (shapes[f"self_attn.{name}_proj.weight"][0],) for name in "qkv"}
        if experts:
            for projection in ("gate", "up", "down"):
                shape = shapes.pop(f"mlp.{projection}_proj.weight")
                cut = (shape[0], shape[1] // 2) if projection == "down" else (shape[0] // 2, shape[1])
                shapes |= {f"mlp.experts.{i}.{projection}_proj.weight": cut for i in range(experts)}
            shapes["mlp.gate.weight"] = (experts, hidden)
        tensors |= {prefix + name: random(*shape) * 2 for name, shape in shapes.items()}
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if family.startswith("Qwen3"):
            norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
        tensors |= {f"{prefix}{name}.weight": 1 + random(width) for name, width in norms.items()}
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "config.json"), "w") as file:
        json.dump(config, file)
    save_file(tensors, os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})
    return directory
