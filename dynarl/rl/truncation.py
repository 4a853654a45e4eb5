"""What becomes of an answer that was cut at max_response_tokens. The only place that knows.

Everything later reads the two values: the reward goes into the advantages, the weight multiplies each of the sample's
tokens in the loss and in the token count that divides it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Rule = Literal["keep", "zero_reward", "mask"]


class Judged(NamedTuple):
    """`weight` is 1.0, or 0.0 for a sample that counts neither in the loss nor in its denominator."""

    reward: float
    weight: float


def judge(rule: Rule, reward: float, finish: str) -> Judged:
    """Apply `rule` to one finished answer.

    keep: as the verifier scored it. zero_reward: a cut answer scores 0. mask: its reward still counts in the group's
    mean, its tokens are not trained on.

    >>> judge("mask", 1.0, "length")
    Judged(reward=1.0, weight=0.0)
    """
    if rule not in ("keep", "zero_reward", "mask"):
        raise ValueError(f"truncated: {rule!r} is not one of keep, zero_reward, mask")
    if finish != "length" or rule == "keep":
        return Judged(reward, 1.0)
    return Judged(0.0, 1.0) if rule == "zero_reward" else Judged(reward, 0.0)
