"""What scheduling costs the controller itself: seconds of its thread's CPU time, by what it did."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable


class Overhead:
    """Times of named parts since `clear`; a part must not contain itself.

    >>> ticks = iter([1.0, 1.5])
    >>> overhead = Overhead(lambda: next(ticks))
    >>> with overhead("decisions"):
    ...     pass
    >>> dict(overhead.seconds)
    {'decisions': 0.5}
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time):
        self._clock = clock
        self._parts: dict[str, _Part] = {}
        self.seconds: Counter[str] = Counter()

    def clear(self) -> None:
        self.seconds.clear()

    def __call__(self, part: str) -> _Part:
        if part not in self._parts:
            self._parts[part] = _Part(part, self._clock, self.seconds)
        return self._parts[part]


class _Part:
    # Entered with every message: a generator with a decorator takes several times as long.
    def __init__(self, name: str, clock: Callable[[], float], seconds: Counter[str]):
        self._name, self._clock, self._seconds = name, clock, seconds
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] += self._clock() - self._began
