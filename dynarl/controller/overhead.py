"""What scheduling costs the controller itself: seconds of its thread's CPU time, by what it did."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Overhead:
    """Times of named parts since `clear`.

    >>> ticks = iter([1.0, 1.5])
    >>> overhead = Overhead(lambda: next(ticks))
    >>> with overhead("decisions"):
    ...     pass
    >>> dict(overhead.seconds)
    {'decisions': 0.5}
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time):
        self._clock = clock
        self.seconds: Counter[str] = Counter()

    def clear(self) -> None:
        self.seconds.clear()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            self.seconds[part] += self._clock() - began
