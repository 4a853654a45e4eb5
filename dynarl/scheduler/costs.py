"""What things take, learned from what they took: step time of a rollout node, seconds per token of the other roles,
moves.

- A decode step of b running requests takes a + c * b seconds: the weights are read once, each request adds its
  share. So a node's rate b / (a + c * b) is concave in b and levels off at 1 / c. Recursive least squares, old steps
  forgotten.
- Inference and training take seconds in proportion to tokens; nodes work on groups of their own, so n nodes are n
  times as fast. A ratio of forgotten sums.
- A move takes its node away for as long as such moves did: the median of the last ones, by (old role, new role).

Every model predicts before it learns; the median relative error of its last predictions says how far to trust it. Pure.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

import numpy as np

# Weight of an observation after each further one: about the last 50 count.
FORGET = 0.98
# Predictions that an error is the median of, and pauses that a move cost is.
REMEMBERED = 32
# Neither part of a step is less than this share of it: a fit through noise must not say that requests are free, or that
# one alone costs nothing.
LEAST_SHARE = 0.02
# Before the first move: what one takes on idle CPUs. Before the first error: no reason for trust.
DEFAULT_PAUSE_S, DEFAULT_ERROR = 0.3, 0.25
# Variances, relative to the first step: of a single step's time (other work, prefills), and of a and c before others came.
NOISE, PRIOR_VARIANCE = 0.04, 0.25
# A token's forward pass costs about what it adds to a decode step; with backward three times that.
GUESSED_SHARE = {"inference": 1.0, "training": 3.0}
# Largest variance, in the prior's: without variation in b the estimate of one direction would forget itself without
# bound.
MOST_VARIANCE = 4.0


@dataclass
class Errors:
    """Relative errors of the last predictions."""

    last: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def add(self, predicted: float, actual: float) -> None:
        if actual > 0:
            self.last.append(abs(predicted - actual) / actual)

    @property
    def median(self) -> float:
        return statistics.median(self.last) if self.last else DEFAULT_ERROR


class StepTime:
    """Seconds of a decode step over running requests.

    >>> model = StepTime()
    >>> for running in (1, 4, 8, 2, 16, 8) * 8:
    ...     model.observe(running, 0.010 + 0.002 * running)
    >>> round(model.seconds(4), 4), round(model.tokens_per_s(4)), model.error.median < 0.01
    (0.018, 222, True)
    """

    def __init__(self) -> None:
        self._coefficients = np.array([0.01, 0.001])
        self._scale: float | None = None
        self._prior = self._variance = np.zeros((2, 2))
        self.error = Errors()

    @property
    def known(self) -> bool:
        return self._scale is not None

    @property
    def fixed_s(self) -> float:
        """a: seconds of a step whatever runs."""
        return float(self._coefficients[0])

    @property
    def per_request_s(self) -> float:
        """c: further seconds for each running request."""
        return float(self._coefficients[1])

    def seconds(self, running: float) -> float:
        return self.fixed_s + self.per_request_s * running

    def tokens_per_s(self, running: float) -> float:
        return running / self.seconds(running) if running else 0.0

    def observe(self, running: float, seconds: float) -> None:
        """Steps of `running` requests took `seconds` each."""
        if running <= 0 or seconds <= 0:
            return
        if self._scale is None:
            self._scale = seconds
            self._coefficients = np.array([0.5 * seconds, 0.5 * seconds / running])
            self._prior = self._variance = PRIOR_VARIANCE * np.diag([seconds**2, (seconds / running) ** 2])
        self.error.add(self.seconds(running), seconds)
        # In units of the step itself: large steps are not more certain than small ones.
        features = np.array([1.0, running]) / seconds
        gain = self._variance @ features / (FORGET * NOISE + features @ self._variance @ features)
        estimate = self._coefficients + gain * (1.0 - features @ self._coefficients)
        self._variance = (self._variance - np.outer(gain, features) @ self._variance) / FORGET
        grown = (np.diag(self._variance) / np.diag(self._prior)).max()
        self._variance *= min(1.0, MOST_VARIANCE / max(grown, 1e-30))
        least = LEAST_SHARE * seconds
        self._coefficients = np.maximum(estimate, [least, least / running])


class WorkRate:
    """Seconds per token of one node in a role whose work is a sum over tokens.

    >>> rate = WorkRate()
    >>> rate.observe(tokens=500, seconds=1.0)
    >>> rate.observe(tokens=1500, seconds=3.0)
    >>> round(rate.seconds_per_token, 4)
    0.002
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self.error = Errors()

    @property
    def known(self) -> bool:
        return self._tokens > 0

    @property
    def seconds_per_token(self) -> float:
        return self._seconds / self._tokens

    def observe(self, tokens: float, seconds: float) -> None:
        if tokens <= 0 or seconds <= 0:
            return
        if self.known:
            self.error.add(tokens * self.seconds_per_token, seconds)
        self._tokens, self._seconds = FORGET * self._tokens + tokens, FORGET * self._seconds + seconds


class MoveCost:
    """Seconds that a move keeps its node from work, by (old role, new role)."""

    def __init__(self) -> None:
        self._pauses: dict[tuple[str, str], deque[float]] = {}

    def observe(self, source: str, target: str, pause_s: float) -> None:
        self._pauses.setdefault((source, target), deque(maxlen=REMEMBERED)).append(pause_s)

    def seconds(self, source: str | None, target: str) -> float:
        """The median of such moves; of all moves while there was none such."""
        known = self._pauses.get((source, target)) or [p for pauses in self._pauses.values() for p in pauses]
        return statistics.median(known) if known else DEFAULT_PAUSE_S


@dataclass
class Costs:
    """All that was learned. `stages`: by component after the first of the pipeline, in its order."""

    step: StepTime = field(default_factory=StepTime)
    stages: dict[str, WorkRate] = field(default_factory=dict)
    moves: MoveCost = field(default_factory=MoveCost)
    finish: Errors = field(default_factory=Errors)

    def seconds_per_token(self, stage: str) -> float:
        """Of one node; guessed from a decode step while the stage was not seen at work."""
        rate = self.stages.get(stage)
        if rate is not None and rate.known:
            return rate.seconds_per_token
        return GUESSED_SHARE.get(stage, 1.0) * self.step.per_request_s

    @property
    def error(self) -> float:
        """Relative error of the forecasts made from all this: that of past finishes, else of the worst part."""
        if self.finish.last:
            return self.finish.median
        return max([self.step.error.median, *(rate.error.median for rate in self.stages.values())])
