"""How long answers get: the survival function S(l) = P(an answer has more than l tokens), from whole and unfinished
ones.

- Finished answers are events. Running ones are right-censored: all that is known is that they are longer than they are
  now. A mean over finished answers alone would be too short, because the short ones finish first.
- Product-limit estimate (Kaplan and Meier 1958): S(l) = prod over k <= l of (1 - finished(k) / at_risk(k)).
- Where fewer than `TAIL_AT_RISK` answers are left the estimate is mostly chance: from there on the hazard is constant
  (an exponential tail) up to the longest answer allowed, at which all that is left ends.
- Answers of former iterations count less, by `FORGET` each iteration: the model that wrote them was another one.

Pure; arrays over lengths 0..max_tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

# Weight of what was seen one iteration ago: half of it is gone after three.
FORGET = 0.5 ** (1 / 3)
# Answers at risk below which single ones decide the estimate.
TAIL_AT_RISK = 8.0
# The tail's hazard is measured over at least the latest of this share of the events, so that a single one does not
# set it.
TAIL_SHARE = 0.1
# Weight of answers at a length that none has: a small number to divide nothing by.
NOBODY = 1e-300
# What is believed before anything has finished: a mean of this share of the longest answer, worth one event.
PRIOR_MEAN_SHARE = 0.5
# Points of integration over remaining tokens, denser near 0, and kinds of present lengths that are told apart.
GRID_POINTS, MAX_KINDS = 96, 64


@dataclass(frozen=True)
class Survival:
    """`above[l]`: share of answers with more than l tokens, l = 0..max_tokens; 0 at max_tokens."""

    above: np.ndarray

    @property
    def max_tokens(self) -> int:
        return len(self.above) - 1

    @cached_property
    def _rest(self) -> np.ndarray:
        """Sum of `above` from each length on."""
        return _from_end(self.above)

    def remains(self, tokens_so_far: np.ndarray, more: np.ndarray) -> np.ndarray:
        """[answers, points]: chance that an answer of so many tokens gets more than `more` further ones."""
        at = np.clip(np.asarray(tokens_so_far, int), 0, self.max_tokens)
        now = self.above[at]
        # On the line between two lengths.
        places = np.minimum(at[:, None] + np.asarray(more), self.max_tokens)
        below = np.minimum(places.astype(int), self.max_tokens - 1)
        later = self.above[below]
        later += (self.above[below + 1] - later) * (places - below)
        return np.divide(later, now[:, None], out=np.zeros_like(later), where=now[:, None] > 0)

    def expected_remaining(self, tokens_so_far: Sequence[int] | int) -> np.ndarray:
        """Mean number of further tokens of answers that have so many and go on.

        >>> fit([1, 3, 4], [2], max_tokens=4, tail_at_risk=0).expected_remaining([0, 1]).tolist()
        [2.875, 2.5]
        """
        at = np.clip(np.asarray(tokens_so_far, int), 0, self.max_tokens)
        now = self.above[at]
        return np.divide(self._rest[at], now, out=np.zeros(np.shape(at)), where=now > 0)

    def expected_max_remaining(self, tokens_so_far: Sequence[int]) -> float:
        """Mean number of further tokens until the last of these answers ends: integral of 1 - prod(1 - S(t+x)/S(t)).

        >>> fit([2, 4], [], max_tokens=4, tail_at_risk=0).expected_max_remaining([0, 0])
        3.5
        """
        return self.until_last(*grouped(tokens_so_far))

    def until_last(self, kinds: np.ndarray, counts: np.ndarray) -> float:
        """The same of `counts` answers of each of these kinds."""
        if not len(kinds):
            return 0.0
        furthest = self.max_tokens - int(kinds.min())
        # Whole tokens where there are few: the function is a staircase, and the sum over its steps is exact.
        more = np.arange(furthest + 1.0) if furthest <= GRID_POINTS else points(furthest)
        none_left = np.exp(counts @ np.log1p(-np.minimum(self.remains(kinds, more), 1 - 1e-15)))
        alive = 1.0 - none_left
        if furthest <= GRID_POINTS:
            return float(round(alive.sum(), 9))
        return float(0.5 * ((alive[1:] + alive[:-1]) * np.diff(more)).sum())


def points(furthest: float, count: int = GRID_POINTS) -> np.ndarray:
    """`count` + 1 places from 0 to `furthest`, denser near 0, where most answers end."""
    return furthest * (np.arange(count + 1) / count) ** 2


def grouped(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Lengths as at most `MAX_KINDS` different ones and how many there are of each.

    >>> [part.tolist() for part in grouped([5, 7, 5])]
    [[5, 7], [2.0, 1.0]]
    """
    kinds, counts = np.unique(np.asarray(lengths, int), return_counts=True)
    if len(kinds) > MAX_KINDS:
        edges = np.linspace(0, len(kinds), MAX_KINDS + 1).astype(int)[:-1]
        total = np.add.reduceat(counts, edges)
        kinds, counts = np.rint(np.add.reduceat(kinds * counts, edges) / total).astype(int), total
    return kinds, counts.astype(float)


def fit(
    finished: Sequence[int], running: Sequence[int], max_tokens: int, tail_at_risk: float = TAIL_AT_RISK
) -> Survival:
    """From lengths of finished answers and tokens so far of running ones.

    >>> fit([1, 3, 4], [2], max_tokens=4, tail_at_risk=0).above.tolist()
    [1.0, 0.75, 0.75, 0.375, 0.0]
    """
    return _estimate(_histogram(finished, max_tokens), _histogram(running, max_tokens), max_tokens, tail_at_risk)


def _histogram(lengths: Sequence[int], max_tokens: int) -> np.ndarray:
    return np.bincount(np.clip(np.asarray(lengths, int), 0, max_tokens), minlength=max_tokens + 1)


def _estimate(events: np.ndarray, censored: np.ndarray, max_tokens: int, tail_at_risk: float) -> Survival:
    at_risk = _from_end(events + censored)
    # In place where it can be: to take and return the memory of all these lengths would cost more than to use it.
    hazard = np.maximum(at_risk, NOBODY)
    np.divide(events, hazard, out=hazard)
    # The tail begins where too few are at risk. Ending at max_tokens is no event: the answer was cut, not finished.
    begin = _last(at_risk, max(tail_at_risk, 1e-9)) + 1
    if begin <= max_tokens:
        later = _from_end(events[:max_tokens])
        enough = max(TAIL_SHARE * later[0], min(TAIL_AT_RISK, later[0]))
        measured_from = _last(later, enough) if later[0] else 0
        natural = slice(min(begin, measured_from), max_tokens)
        exposure, seen = at_risk[natural].sum(), events[natural].sum()
        prior_mean = max(PRIOR_MEAN_SHARE * max_tokens, 1.0)
        hazard[begin:] = min((seen + 1.0) / (exposure + prior_mean), 1.0)
    np.subtract(1.0, hazard, out=hazard)
    above = np.cumprod(hazard, out=hazard)
    above[max_tokens] = 0.0
    return Survival(above)


def _from_end(numbers: np.ndarray) -> np.ndarray:
    """Sums of each number and all behind it."""
    return np.cumsum(numbers[::-1])[::-1]


def _last(falling: np.ndarray, least: float) -> int:
    """Index of the last that is at least so much, of numbers that never rise; -1 if none is.

    >>> _last(np.array([3.0, 2.0, 2.0, 0.0]), 2.0)
    2
    """
    return len(falling) - 1 - int(np.searchsorted(falling[::-1], least))


@dataclass
class Lengths:
    """The memory behind an estimate: lengths of finished answers, older ones with less weight."""

    max_tokens: int
    events: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.events = np.zeros(self.max_tokens + 1)

    def finished(self, tokens: int) -> None:
        self.events[min(tokens, self.max_tokens)] += 1.0

    def next_iteration(self) -> None:
        """Another version of the model writes from now on."""
        self.events *= FORGET

    def survival(self, running: Sequence[int]) -> Survival:
        """The estimate now, with the tokens so far of the answers that are not finished."""
        # An answer that waits for its first token says nothing about lengths.
        running = np.asarray(running, int)
        return _estimate(self.events, _histogram(running[running > 0], self.max_tokens), self.max_tokens, TAIL_AT_RISK)
