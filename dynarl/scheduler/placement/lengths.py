"""How long answers are, as the planner knows it: a log-normal law, cut at the longest answer allowed.

A law is handled by its survival function on a few levels, dense where few answers are left: what a rollout does at its
end depends on the last one in ten thousand.
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

import msgspec
import numpy as np

# Share of answers that are longer, from all to one in a million.
LEVELS = np.concatenate([[1.0], np.linspace(0.98, 0.1, 45), np.geomspace(0.09, 1e-6, 40)])

# A law of lengths so wide spans more than all that there are.
MOST_SIGMA = 10.0


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens. prompt: of a prompt; median, sigma: of the log-normal law of answers; cap: the longest answer.

    correlation: how alike the answers to one prompt are in length, 0 to 1. turns: parts of an answer with a call of a
    tool between two of them; a call takes tool_s on average and adds tool_tokens.

    >>> lengths = Lengths(prompt=500, median=6000, sigma=0.8, cap=28672)
    >>> round(lengths.mean), round(lengths.at(1e-6))
    (7961, 28672)
    """

    prompt: int
    median: float
    cap: int
    sigma: float = 0.8
    correlation: float = 0.3
    turns: int = 1
    tool_s: float = 0.0
    tool_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("median", "cap", "turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name):g} must be at least 1")
        for name in ("prompt", "sigma", "tool_s", "tool_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name):g} must not be below 0")
        if not self.sigma <= MOST_SIGMA:
            raise ValueError(f"sigma = {self.sigma:g} must be at most {MOST_SIGMA:g}")
        if not 0 <= self.correlation <= 1:
            raise ValueError(f"correlation = {self.correlation:g} must be from 0 to 1")
        if self.median > self.cap:
            raise ValueError(f"median = {self.median:g} is above cap = {self.cap}")

    def at(self, survival: float) -> float:
        """Length that this share of answers exceeds."""
        if survival >= 1:
            return 0.0
        z = NormalDist().inv_cdf(1 - survival)
        return min(float(self.cap), self.median * math.exp(self.sigma * z))

    @property
    def tokens(self) -> np.ndarray:
        """Lengths at LEVELS, ascending."""
        return _tokens(self)

    @property
    def mean(self) -> float:
        """Tokens of an answer that the model writes."""
        return _integral(LEVELS, self.tokens)

    @property
    def mean_context(self) -> float:
        """Tokens before a token of an answer, on average over tokens: prompt, answer so far, results of tools."""
        middle = (self.tokens[1:] + self.tokens[:-1]) / 2
        weight = (LEVELS[1:] + LEVELS[:-1]) / 2 * np.diff(self.tokens)
        return self.prompt + float((middle * weight).sum() / weight.sum()) * (1 + self.tool_share)

    @property
    def tool_share(self) -> float:
        """Tokens that tools add for each token of the model."""
        return (self.turns - 1) * self.tool_tokens / self.mean

    @property
    def sequence(self) -> float:
        """Tokens of a whole sequence on average."""
        return self.prompt + self.mean * (1 + self.tool_share)

    @property
    def longest(self) -> int:
        return self.prompt + self.cap + (self.turns - 1) * self.tool_tokens

    def group_size_effective(self, group_size: int) -> float:
        """Independent answers that a group's longest is as long as the longest of."""
        return 1 + (group_size - 1) * (1 - self.correlation)


@functools.cache
def _tokens(lengths: Lengths) -> np.ndarray:
    found = np.array([lengths.at(level) for level in LEVELS])
    found.flags.writeable = False
    return found


def _integral(levels: np.ndarray, tokens: np.ndarray) -> float:
    return float(((levels[1:] + levels[:-1]) / 2 * np.diff(tokens)).sum())
