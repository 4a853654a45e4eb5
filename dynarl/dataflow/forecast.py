"""What routing expects: how long answers still get, and how fast each instance decodes. Learned from what came in.

Pure: fed with what the workers report, times passed in.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import deque

# Lengths that are remembered: the policy changes, and old answers tell less of new ones.
KEPT_LENGTHS = 4096
# With fewer answers longer than the one in question, half the way to the limit is as good a guess.
FEW = 8
# A reading over a shorter time is mostly noise.
LEAST_S = 0.1
# Loads at the two ends of a reading that differ by more say little of either.
MOST_CHANGE = 1.8
# Time in which a reading loses half of its weight in the line: its range of loads is that of an iteration, not of a
# moment. Readings of one instance that its factor is the median of.
HALF_LIFE_S, KEPT_STEPS = 60.0, 9
# How far an instance is taken to be from the line at most, and the steps in which that is counted.
MOST_OCTAVES, STEPS_PER_OCTAVE = 4.0, 4


class Lengths:
    """Response lengths of finished answers, and the mean that is left of one that has so many tokens already.

    >>> lengths = Lengths(limit=100)
    >>> lengths.remaining(20)
    40.0
    >>> for length in (10, 10, 20, 20, 30, 30, 40, 40, 60, 60):
    ...     lengths.add(length)
    >>> lengths.remaining(0), lengths.remaining(10)
    (32.0, 27.5)
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._lengths: deque[int] = deque(maxlen=KEPT_LENGTHS)
        self._sorted: list[int] = []
        self._above: list[int] = [0]  # sum of all lengths from each index on
        self._added = 0

    def add(self, length: int) -> None:
        self._lengths.append(length)
        self._added += 1

    def remaining(self, so_far: float) -> float:
        """Mean tokens that an answer of `so_far` tokens still gets; at least 1."""
        if self._added * 16 > len(self._sorted):  # sorting on every answer would cost more than it tells
            self._sorted, self._above, self._added = sorted(self._lengths), [0], 0
            for length in reversed(self._sorted):
                self._above.append(self._above[-1] + length)
            self._above.reverse()
        first = bisect_right(self._sorted, so_far)
        count = len(self._sorted) - first
        left = (self.limit - so_far) / 2 if count < FEW else self._above[first] / count - so_far
        return max(1.0, left)


class Speeds:
    """Decode speed of every instance: `fixed_s + per_request_s * b` seconds per step of b requests.

    The line is fitted over all instances, since they run the same model; an instance differs from it by one factor, the
    median of its last steps over the line's, rounded so that equal machines count as equal.

    >>> speeds = Speeds()
    >>> for second in range(9):  # 4 requests take 0.5 s per step on one instance and 1 s on the other
    ...     speeds.note("n1", second, 8 * second, 4)
    ...     speeds.note("n2", second, 4 * second, 4)
    >>> fast, slow = speeds.of("n1"), speeds.of("n2")
    >>> [later / earlier for earlier, later in zip(fast, slow)]
    [2.0, 2.0]
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int, int]] = {}  # instance -> (time, tokens, running)
        self._steps: dict[str, deque[tuple[float, float]]] = {}  # instance -> (b, seconds per step)
        self._sums = [0.0] * 5  # of 1, b, t, b * b, b * t
        self._summed_at = 0.0

    def note(self, instance: str, now: float, tokens: int, running: int) -> None:
        """A reading at `now` seconds: `tokens` made since the engine's start, `running` requests in it."""
        before, tokens_before, running_before = self._last.get(instance, (now, tokens, 0))
        if running and running_before and now - before < LEAST_S:
            return
        self._last[instance] = now, tokens, running
        made, b = tokens - tokens_before, (running + running_before) / 2
        least, most = sorted((running, running_before))
        if made <= 0 or not least or most > MOST_CHANGE * least:  # a new engine, idle, or of no one load
            return
        step_s = (now - before) * b / made
        self._steps.setdefault(instance, deque(maxlen=KEPT_STEPS)).append((b, step_s))
        kept = 0.5 ** ((now - self._summed_at) / HALF_LIFE_S)
        self._sums = [kept * old + new for old, new in zip(self._sums, (1.0, b, step_s, b * b, b * step_s))]
        self._summed_at = now

    def known(self) -> bool:
        return self._sums[0] > 0

    def of(self, instance: str) -> tuple[float, float]:
        """(fixed_s, per_request_s); the line's for an instance that was not measured, 1 and 1 while there is none."""
        fixed, each = self._line()
        ratio = statistics.median(t / (fixed + each * b) for b, t in self._steps.get(instance, [(1.0, fixed + each)]))
        octaves = max(-MOST_OCTAVES, min(math.log2(ratio), MOST_OCTAVES))
        factor = 2.0 ** (round(octaves * STEPS_PER_OCTAVE) / STEPS_PER_OCTAVE)
        return fixed * factor, each * factor

    def _line(self) -> tuple[float, float]:
        n, b, t, bb, bt = self._sums
        if not n:
            return 1.0, 1.0
        spread = n * bb - b * b
        if spread < 0.01 * b * b:  # all at one load: half and half
            return t / n / 2, t / b / 2
        slope = (n * bt - b * t) / spread
        fixed = (t - slope * b) / n
        if slope <= 0:
            return t / n, 0.0
        return (fixed, slope) if fixed >= 0 else (0.0, t / b)
