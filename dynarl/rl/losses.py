"""Token-level losses as sums, with the sums that their statistics are made of.

Never a mean: a sum does not depend on how a batch was cut into micro-batches and ranks. The trainer divides once, at
the optimizer step, by the number of tokens of the whole batch.

All tensors are [N], one entry per response token; padding never gets here. `weight` is 0 for tokens of masked samples.
Statistics are sums over tokens too; divide each by `tokens`. Names that end in `_max` are maxima.
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp of a log-ratio beyond this is no signal and soon an infinity.
MAX_LOG_RATIO = 20.0


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weight: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GRPO as the token sum of DAPO (arXiv 2503.14476, eq. 8); equal clips give PPO's.

    With r = exp(logprob - old_logprob), the sum over tokens of
    weight * (max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) + kl_coef * k3).
    """
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate = (torch.maximum(plain, clipped) * weight).sum()
    stats = {
        "tokens": weight.sum(),
        "pg_loss": surrogate.detach(),
        "pg_clipfrac": ((clipped > plain) * weight).sum(),
        "ppo_kl": -(log_ratio.detach() * weight).sum(),
        "ratio": (ratio.detach() * weight).sum(),
    }
    loss = surrogate
    if kl_coef:
        if ref_logprobs is None:
            raise ValueError("kl_loss_coef is set but the samples carry no reference log-probabilities")
        kl = (k3(logprobs, ref_logprobs) * weight).sum()
        stats["kl_loss"] = kl.detach()
        loss = loss + kl_coef * kl
    stats["loss"] = loss.detach()
    return loss, stats


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference), unbiased and never negative: x - 1 - log x with x = p_ref / p
    (J. Schulman, "Approximating KL divergence", 2020)."""
    log_x = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_x.exp() - 1.0 - log_x


def supervised_loss(logprobs: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the demonstrated tokens, summed."""
    loss = -(logprobs * weight).sum()
    return loss, {"tokens": weight.sum(), "loss": loss.detach()}
