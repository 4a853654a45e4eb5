"""Sampling with a random stream per request, so that where a request runs never changes what it says.

A token is drawn by inverse CDF from one uniform number, and that number is a hash of (seed, sample, position): no
generator state, nothing that depends on the batch, the slot or the node. A request that is aborted after k tokens and
submitted elsewhere therefore continues with exactly the tokens it would have had.

The hash is SplitMix64 (Steele, Lea, Flood 2014): the stream of a sample is the generator seeded with the sample's key,
and since its state is key + i * GAMMA, any position of it costs the same.
"""

from __future__ import annotations

import numpy as np
import torch

GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
SHIFT_1, SHIFT_2, SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
# 48 bits: `uniform * total` stays below `total` after rounding to float64, so the last token is not drawn by accident.
KEPT_BITS = 48
DROPPED = np.uint64(64 - KEPT_BITS)


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1), float64, one per pair of key (uint64) and position (non-negative integer)."""
    z = keys + (positions.astype(np.uint64) + np.uint64(1)) * GAMMA
    z = (z ^ (z >> SHIFT_1)) * MIX_1
    z = (z ^ (z >> SHIFT_2)) * MIX_2
    return ((z ^ (z >> SHIFT_3)) >> DROPPED) * 2.0**-KEPT_BITS


def draw(logprobs_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """One id per row, int64 [N, 1]: where the running sum of the probabilities passes `uniform` (float64) of their total."""
    # float64: a float32 sum over a large vocabulary would move the borders between tokens by more than their width.
    cdf_NV = logprobs_NV.exp().cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cdf_NV, uniform_N[:, None] * cdf_NV[:, -1:], right=True)


def sample_tokens(logits_NV: torch.Tensor, temperature_N: torch.Tensor, uniform_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row: (ids int64 [N], log-probabilities float32 [N]).

    temperature float32, 0 for the most likely token; uniform float64 in [0, 1). The log-probability is that of the
    token under softmax(logits / temperature), under softmax(logits) where temperature is 0.
    """
    greedy_N = temperature_N == 0
    logprobs_NV = torch.log_softmax(logits_NV.float() / torch.where(greedy_N, 1.0, temperature_N)[:, None], dim=-1)
    ids_N1 = torch.where(greedy_N[:, None], logprobs_NV.argmax(-1, keepdim=True), draw(logprobs_NV, uniform_N))
    return ids_N1[:, 0], logprobs_NV.gather(1, ids_N1)[:, 0]
