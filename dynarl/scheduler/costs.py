"""What things take, learned from what they took: step time of a rollout node, seconds per token of the other roles,
moves.

- A decode step of b running requests that hold K tokens takes a + c * b + k * K seconds: the weights are read once, each
  request adds its share, and the keys and values of all tokens are read. So a node's rate is concave in b and levels
  off. Least squares without negative parts, from what was seen at each load.
- Inference and training take seconds in proportion to tokens; nodes work on groups of their own, so n nodes are n
  times as fast. A ratio of forgotten sums.
- A move takes its node away for as long as such moves did: the median of the last ones, by (old role, new role).

Every model predicts before it learns; the median relative error of its last predictions says how far to trust it. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
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
# What is guessed before (half of a step fixed, half by requests) counts as so many observations.
PRIOR_WEIGHT = 1e-3
# Loads are told apart, by half octaves of running requests, since a fit to one load alone does not say what is fixed.
# Weight of what was seen at a load after each further observation there, and elsewhere.
FORGET_LOAD, FORGET_OTHERS = 0.94, 0.998
# Another choice of parts must explain more of what was seen, by this share: a hundredth less error.
SAME_FIT = 1e-4
# Steps after which the fit is made again though nobody has asked: predictions are held against an older one until then.
REFIT_AFTER = 16
# Steps that are kept until somebody asks, and taken in together.
MOST_UNLEARNED = 256
# Complete groups from which on an iteration says by itself how late they are.
DELAY_FROM_GROUPS = 16
# A token's forward pass costs about what it adds to a decode step; with backward three times that. On devices whose
# decoding waits for memory it costs a tenth of it, so what was measured of one stage says more of another.
GUESSED_SHARE = {"inference": 1.0, "training": 3.0}


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
    """Seconds of a decode step over running requests and the tokens that they hold: one law for all engines, for loads
    that no engine has had yet. Which of them is slower at the moment, the router learns in `dataflow.speeds`.

    >>> model = StepTime()
    >>> for running in (1, 4, 8, 2, 16, 8) * 8:
    ...     model.observe(running, 0.010 + 0.002 * running)
    >>> round(model.seconds(4), 4), round(model.tokens_per_s(4)), model.error.median < 0.01
    (0.018, 222, True)
    """

    def __init__(self) -> None:
        self._fitted = (0.01, 0.001, 0.0)
        self._unlearned: list[tuple[float, float, float]] = []  # (running, held tokens, seconds) since somebody asked
        self._learned = self._unfitted = 0  # observations that were taken in, and those of them since the last fit
        self._held_each = 0.0  # tokens that a request held at the last observation
        self._prior: np.ndarray | None = None
        # Of each octave of load weighted sums of outer products of (features, 1), each in units of its step's time, so
        # that large steps are not more certain than small ones.
        self._row_of: dict[int, int] = {}
        self._sums = np.zeros((0, 4, 4))
        self._error = Errors()

    @property
    def known(self) -> bool:
        return self._prior is not None or bool(self._unlearned)

    @property
    def error(self) -> Errors:
        self._learn()
        return self._error

    @property
    def fixed_s(self) -> float:
        """a: seconds of a step whatever runs."""
        return self.parts[0]

    @property
    def per_request_s(self) -> float:
        """Further seconds for each running request, with as many tokens as such had lately."""
        _, c, k = self.parts
        return c + k * self._held_each

    @property
    def parts(self) -> tuple[float, float, float]:
        """(a, c, k): seconds of every step, for each request, for each token held."""
        self._learn()
        if self._unfitted:
            self._fit()
        return self._fitted

    def seconds(self, running: float) -> float:
        return self.fixed_s + self.per_request_s * running

    def tokens_per_s(self, running: float) -> float:
        return running / self.seconds(running) if running else 0.0

    def observe(self, running: float, seconds: float, held_tokens: float = 0.0) -> None:
        """Steps of `running` requests, which held so many tokens together, took `seconds` each."""
        if running <= 0 or seconds <= 0:
            return
        self._unlearned.append((running, held_tokens, seconds))
        if len(self._unlearned) >= MOST_UNLEARNED:
            self._learn()

    def _learn(self) -> None:
        """Take in what was observed. A fit that no remembered prediction rests on is left out."""
        if not self._unlearned:
            return
        new, self._unlearned = self._unlearned, []
        if self._prior is None:
            running, _, seconds = new[0]
            self._prior = PRIOR_WEIGHT * np.diag([seconds**-2, (running / seconds) ** 2])
            self._guess = np.array([0.5 * seconds, 0.5 * seconds / running])
            self._fitted = (*self._guess.tolist(), 0.0)
        for left, (running, held, seconds) in zip(range(len(new), 0, -1), new):
            a, c, k = self._fitted
            self._error.add(a + c * running + k * held, seconds)
            self._held_each, self._last = held / running, (running, seconds)
            self._add(running, held, seconds)
            self._learned += 1
            self._unfitted += 1
            if self._unfitted >= REFIT_AFTER or self._learned < REFIT_AFTER:
                self._unfitted = 0
                if left <= REMEMBERED + REFIT_AFTER:
                    self._fit()

    def _add(self, running: float, held: float, seconds: float) -> None:
        row = np.array([1.0, running, held, seconds]) / seconds
        here = int(2.0 * math.log2(running)) if running > 1 else 0
        if here not in self._row_of:
            self._row_of[here] = len(self._row_of)
            self._sums = np.concatenate([self._sums, np.zeros((1, 4, 4))])
        at = self._row_of[here]
        kept = FORGET_LOAD * self._sums[at]
        self._sums *= FORGET_OTHERS
        self._sums[at] = kept + row[:, None] * row

    def _fit(self) -> None:
        self._unfitted, (running, seconds) = 0, self._last
        total = self._sums.sum(axis=0)
        squares, products = total[:3, :3].copy(), total[:3, 3].copy()
        squares[:2, :2] += self._prior
        products[:2] += self._prior @ self._guess
        scale = np.sqrt(np.maximum(np.diag(squares), 1e-300))
        # Of all choices of parts that are not zero, the best without a negative one; the simpler where both are as good.
        best, found = 0.0, None
        for chosen in ([0], [1], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
            if scale[chosen].min() <= 1e-140:
                continue
            scaled = squares[np.ix_(chosen, chosen)] / np.outer(scale[chosen], scale[chosen])
            parts = np.linalg.lstsq(scaled, products[chosen] / scale[chosen], rcond=1e-10)[0] / scale[chosen]
            if parts.min() >= 0 and (gain := float(products[chosen] @ parts)) > best * (1.0 + SAME_FIT):
                best, found = gain, np.zeros(3)
                found[chosen] = parts
        if found is not None:
            least = LEAST_SHARE * seconds
            self._fitted = tuple(np.maximum(found, [least, least / running, 0.0]).tolist())


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


class GroupDelay:
    """How much later groups are complete than their answers are: a share p^d of the groups when a share p of the
    answers has ended. Members that are independent of each other give d of a group's size, such of equal length that
    begin together 1. From the area under that curve, p * p^d / (d + 1).

    >>> delay = GroupDelay(groups=2, size=2)
    >>> for group in ("a", "a", "b", "b"):
    ...     delay.finished(group)
    >>> delay.next_iteration(); round(delay.estimate, 2)
    1.67
    """

    def __init__(self, groups: int, size: int):
        self._groups, self._size = groups, size
        self._former: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._members: Counter[str] = Counter()
        self._answers = self._complete = self._area = 0

    def finished(self, group: str) -> None:
        """Another answer of this group has ended."""
        self._members[group] += 1
        self._area += 2 * self._complete
        self._complete += self._members[group] == self._size
        self._area += self._members[group] == self._size
        self._answers += 1

    def next_iteration(self) -> None:
        if self._enough:
            self._former = self._of_all
        self._clear()

    @property
    def estimate(self) -> float | None:
        """d of this iteration, once enough groups are complete, else of the one before; None while neither is known."""
        answers = self._answers / (self._groups * self._size)
        if not self._enough:
            return self._former
        if answers >= 1.0:
            return self._of_all
        return max(math.log(self._complete / self._groups) / math.log(answers), 1.0)

    @property
    def _of_all(self) -> float:
        return max(2.0 * self._answers * self._complete / self._area - 1.0, 1.0)

    @property
    def _enough(self) -> bool:
        return self._complete >= min(DELAY_FROM_GROUPS, self._groups)


@dataclass
class Costs:
    """All that was learned. `stages`: by component after the first of the pipeline, in its order."""

    step: StepTime = field(default_factory=StepTime)
    stages: dict[str, WorkRate] = field(default_factory=dict)
    moves: MoveCost = field(default_factory=MoveCost)
    finish: Errors = field(default_factory=Errors)

    def knows(self, stage: str) -> bool:
        """Whether the stage was seen at work."""
        return (rate := self.stages.get(stage)) is not None and rate.known

    def seconds_per_token(self, stage: str) -> float:
        """Of one node; while the stage was not seen at work guessed from another one, or from a decode step."""
        if self.knows(stage):
            return self.stages[stage].seconds_per_token
        seen = next((name for name in self.stages if self.knows(name)), None)
        share = GUESSED_SHARE.get(stage, 1.0)
        if seen is not None:
            return share / GUESSED_SHARE.get(seen, 1.0) * self.stages[seen].seconds_per_token
        return share * self.step.per_request_s

    @property
    def forward_s(self) -> float:
        """Of one node, for a token that only goes through the model, as it does in inference and in a prefill."""
        return self.seconds_per_token("inference")

    @property
    def error(self) -> float:
        """Relative error of the forecasts made from all this: that of past finishes, else of the worst part."""
        if self.finish.last:
            return self.finish.median
        return max([self.step.error.median, *(rate.error.median for rate in self.stages.values())])
