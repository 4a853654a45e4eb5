"""How fast each instance decodes, learned from what the workers report.

For the router: it tells instances apart, and forgets within a minute. Forecasts take the time of a step from
`scheduler.costs.StepTime`, one law for all instances, which also charges for the tokens that requests hold.

Pure: fed with what the workers report, times passed in.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

# A reading over a shorter time is mostly noise.
LEAST_S = 0.1
# Loads at the two ends of a reading that differ by more say little of either.
MOST_CHANGE = 1.8
# No engine decodes a further request for less than this share of a step at the mean load, divided by that load.
LEAST_SLOPE = 0.1
# Time in which a reading loses half of its weight in the line: its range of loads is that of an iteration, not of a
# moment. Readings of one instance that its factor is found from, and how many it takes.
HALF_LIFE_S, KEPT_STEPS, LEAST_STEPS = 60.0, 9, 3
# An instance counts as any other when it has had no reading for so long: one that was measured in a bad moment gets nothing to
# do, and so would never be measured again.
KEPT_S = 20.0
# How far an instance is taken to be from the line at most, and the steps in which that is counted.
MOST_OCTAVES, STEPS_PER_OCTAVE = 4.0, 2
# Before anything is known half of a step at the mean load is its fixed part. That counts as much as so many readings at
# no load and as many at twice the mean one: readings at about one load say little of the slope, and were it taken for
# nothing, a node that seems a little faster would get all requests.
ASSUMED = 1.0


class Speeds:
    """Decode speed of every instance: `fixed_s + per_request_s * b` seconds per step of b requests.

    The line is fitted over all instances, since they run the same model; an instance differs from it by one factor, by
    which three quarters of its last steps differ at least, rounded so that equal machines count as equal, and forgotten
    in time. most_s: in a longer time between two readings an engine may have stood still.

    >>> speeds = Speeds()
    >>> for second in range(9):  # 4 requests take 0.5 s per step on one instance and 1 s on the other
    ...     speeds.note("n1", second, 8 * second, 4)
    ...     speeds.note("n2", second, 4 * second, 4)
    >>> fast, slow = speeds.of("n1"), speeds.of("n2")
    >>> [later / earlier for earlier, later in zip(fast, slow)]
    [2.0, 2.0]
    """

    def __init__(self, most_s: float = math.inf) -> None:
        self._most_s = most_s
        self._last: dict[str, tuple[float, int, int, int]] = {}  # instance -> (time, tokens, running, prefilled)
        self._steps: dict[str, deque[tuple[float, float, float]]] = {}  # instance -> (time, b, seconds per step)
        self._sums = [0.0] * 5  # of 1, b, t, b * b, b * t
        self._summed_at = 0.0

    def note(
        self, instance: str, now: float, tokens: int, running: int, prefilled: int = 0, made_s: float | None = None
    ) -> None:
        """A reading at `now` seconds: `tokens` made and `prefilled` since the engine's start, `running` requests in it.
        made_s: when it was made, on the instance's own clock; None: now.
        """
        at = now if made_s is None else made_s
        before, tokens_before, running_before, prefilled_before = self._last.get(instance, (at, tokens, 0, prefilled))
        if running and running_before and abs(at - before) < LEAST_S:
            return
        self._last[instance] = at, tokens, running, prefilled
        made, b = tokens - tokens_before, (running + running_before) / 2
        least, most = sorted((running, running_before))
        if made <= 0 or not least or most > MOST_CHANGE * least:  # a new engine, idle, or of no one load
            return
        if prefilled - prefilled_before > made:  # requests have moved there: they will not in every step
            return
        if not 0.0 < at - before <= self._most_s:  # a node that was started again has another clock
            return
        step_s = (at - before) * b / made
        self._steps.setdefault(instance, deque(maxlen=KEPT_STEPS)).append((now, b, step_s))
        kept = 0.5 ** ((now - self._summed_at) / HALF_LIFE_S)
        self._sums = [kept * old + new for old, new in zip(self._sums, (1.0, b, step_s, b * b, b * step_s))]
        self._summed_at = now

    def known(self) -> bool:
        return self._sums[0] > 0

    def of(self, instance: str) -> tuple[float, float]:
        """(fixed_s, per_request_s); the line's for an instance that was not measured lately, 1 and 1 while there is none."""
        fixed, each = self._line()
        since = self._summed_at - KEPT_S
        ratios = [t / (fixed + each * b) for at, b, t in self._steps.get(instance, ()) if at >= since]
        octaves = max(-MOST_OCTAVES, min(math.log2(_certain(ratios)), MOST_OCTAVES))
        factor = 2.0 ** (round(octaves * STEPS_PER_OCTAVE) / STEPS_PER_OCTAVE)
        return fixed * factor, each * factor

    def _line(self) -> tuple[float, float]:
        n, b, t, bb, bt = self._sums
        if not n:
            return 1.0, 1.0
        spread, steepest = n * bb - b * b, t / b
        assumed = 2.0 * ASSUMED * b * b / n
        slope = ((n * bt - b * t) + assumed * steepest / 2) / (spread + assumed)
        # A slow instance at a low load can turn the line over: that is no speed.
        slope = min(max(slope, LEAST_SLOPE * steepest), steepest)
        return (t - slope * b) / n, slope


def _certain(ratios: list[float]) -> float:
    """What three quarters of these are at least, if that is above 1, or at most, if it is below; else 1.

    >>> _certain([2.0, 2.1, 2.2, 9.0]), _certain([0.4, 0.5, 0.5, 1.5]), _certain([0.7, 0.9, 1.1, 1.3]), _certain([3.0])
    (2.075, 0.75, 1.0, 1.0)
    """
    if len(ratios) < LEAST_STEPS:
        return 1.0
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return max(low, 1.0) if low > 1.0 else min(high, 1.0)
