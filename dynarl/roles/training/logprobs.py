"""Log-probability of one token per row when the vocabulary is split over tensor-parallel ranks.

log p(t) = z_t - m - log(sum_v exp(z_v - m)) with m = max_v z_v; m, the sum and z_t are reduced over the ranks, the
logits are never gathered. The gradient d log p(t) / d z_v = [v = t] - p(v) is local to each rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def token_logprobs(logits_NV: Tensor, targets_N: Tensor, vocab: tuple[int, int], group: dist.ProcessGroup) -> Tensor:
    """Log-probabilities [N] of `targets_N` (global token ids).

    logits_NV: float32; column i is token vocab[0] + i; columns from vocab[1] on are padding and have no probability.
    """
    logits_NV = logits_NV[:, : vocab[1] - vocab[0]]
    if group.size() == 1:
        return torch.log_softmax(logits_NV, -1).gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)
    return _SplitLogProb.apply(logits_NV, targets_N, vocab, group)


def entropy(logits_NV: Tensor, vocab: tuple[int, int], group: dist.ProcessGroup) -> Tensor:
    """Entropy [N] in nats of each row's distribution, no gradient. -sum_v p(v) z_v + log sum_v exp(z_v)."""
    with torch.no_grad():
        logits_NV = logits_NV[:, : vocab[1] - vocab[0]]
        shifted_NV, exp_NV, total_N = _softmax_parts(logits_NV, group)
        weighted_N = (exp_NV * shifted_NV).sum(-1)
        if group.size() > 1:
            dist.all_reduce(weighted_N, group=group)
        return total_N.log() - weighted_N / total_N


def _softmax_parts(logits_NV: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Logits less the global maximum, their exponentials, and the global sum of these."""
    if logits_NV.shape[1]:
        max_N = logits_NV.amax(-1)
    else:  # a rank with padding rows only
        max_N = logits_NV.new_full((logits_NV.shape[0],), float("-inf"))
    if group.size() > 1:
        dist.all_reduce(max_N, dist.ReduceOp.MAX, group=group)
    shifted_NV = logits_NV - max_N.unsqueeze(-1)
    exp_NV = shifted_NV.exp()
    total_N = exp_NV.sum(-1)
    if group.size() > 1:
        dist.all_reduce(total_N, group=group)
    return shifted_NV, exp_NV, total_N


class _SplitLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_NV: Tensor, targets_N: Tensor, vocab: tuple[int, int], group: dist.ProcessGroup) -> Tensor:
        shifted_NV, exp_NV, total_N = _softmax_parts(logits_NV, group)
        rows = torch.nonzero((targets_N >= vocab[0]) & (targets_N < vocab[1])).squeeze(-1)
        columns = targets_N[rows] - vocab[0]
        target_N = torch.zeros_like(total_N)
        target_N[rows] = shifted_NV[rows, columns]
        dist.all_reduce(target_N, group=group)
        ctx.save_for_backward(exp_NV.div_(total_N.unsqueeze(-1)), rows, columns)
        return target_N - total_N.log()

    @staticmethod
    def backward(ctx, grad_N: Tensor):
        softmax_NV, rows, columns = ctx.saved_tensors
        grad_NV = softmax_NV * -grad_N.unsqueeze(-1)
        grad_NV[rows, columns] += grad_N[rows]
        return grad_NV, None, None, None
