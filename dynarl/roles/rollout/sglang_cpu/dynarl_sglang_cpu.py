"""SGLang plugin: seeds per request on CPU, with the same random numbers as the local engine.

SGLang honours `sampling_seed` only in its deterministic mode. That mode insists on GPU attention kernels, replaces torch's
matrix products with Triton ones, and draws by a kernel that has no CPU build. On a CPU the native attention is used and the
products stay torch's: results of different batches then differ by rounding (about 1e-6), which a seeded draw survives but
for rare ties.
"""

import numpy as np
import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def register() -> None:
    from sglang.srt.arg_groups import choices

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    replace("sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", lambda *_, **__: None)
    replace("sglang.srt.layers.sampler.multinomial_with_seed", seeded_draw)
    replace("sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch", draw_beside_greedy)


def replace(target: str, function) -> None:
    HookRegistry.register(target, function, HookType.REPLACE)


def seeded_draw(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One id per row, [rows, 1]. positions: of the last token before the one that is drawn, as in the local engine."""
    from dynarl.roles.rollout.sampling import draw, uniforms

    return draw(logprobs, torch.from_numpy(uniforms(seed.numpy().astype(np.uint64), positions.numpy())))


def draw_beside_greedy(probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **_) -> torch.Tensor:
    """Ids, int32 [rows], of a batch in which some request is greedy, which SGLang writes as top_k = 1.

    Its own function draws from probabilities sorted by size, so that a greedy neighbour would change what the same random
    number means. Other uses of top_k, top_p and min_p never come from the rollout worker.
    """
    if need_min_p_sampling or bool((top_ps != 1).any()) or bool(((top_ks != 1) & (top_ks < probs.shape[-1])).any()):
        raise NotImplementedError("top_k, top_p and min_p are not covered on CPU")
    drawn = seeded_draw(probs.log(), sampling_seed, positions)[:, 0]
    return torch.where(top_ks == 1, probs.argmax(-1), drawn).to(torch.int32)
