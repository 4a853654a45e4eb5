"""Group-relative advantages (GRPO, arXiv 2402.03300 eq. 3): A_i = (r_i - mean(r)) / std(r) in each group.

Dr. GRPO (arXiv 2503.20783) is the special case without the division.
"""

from __future__ import annotations

import math
from typing import Sequence

STD_FLOOR = 1e-6


def group_advantages(rewards: Sequence[float], normalize_std: bool = True) -> list[float]:
    """One advantage per sample of a group.

    Where all rewards are equal the advantages are exact zeros: the mean of equal floats need not be that float, and
    dividing the rounding error by a tiny standard deviation would make a signal of it.
    """
    if is_flat(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return centred
    # Sample standard deviation (n - 1), as torch.std and the published implementations have it.
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + STD_FLOOR) for value in centred]


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether a group teaches nothing: all its rewards are equal. Their share is reported as `groups/zero_std_frac`."""
    return max(rewards) == min(rewards)
