"""Was every sample trained on exactly once? Counted from what the journal says was handed out and what was stepped on.

For iteration i, with S(i) the samples it started and T(i) the list of samples in its optimizer steps:

- trained: distinct samples in any T
- doubled: samples that occur more than once in all T together
- lost:    samples in S(i) but in no T, for finished iterations i only (the others may still train them)

A long run has millions of ids. Those of an iteration are kept as one joined string, and an iteration is counted once:
ids carry their iteration (`wire.sample_id`), so equal ids can only meet inside one. Should an id turn up in a step of
another iteration, everything is counted again as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tally:
    trained: int = 0
    lost: int = 0
    doubled: int = 0


@dataclass
class _Iteration:
    started: str = ""
    steps: list[str] = field(default_factory=list)
    finished: bool = False
    tally: Tally | None = None
    strays: bool = False

    def trained(self) -> Iterable[str]:
        for step in self.steps:
            yield from _split(step)


def _join(samples: Sequence[str]) -> str:
    return "\n".join(samples)


def _split(joined: str) -> list[str]:
    return joined.split("\n") if joined else []


class SampleCount:
    """Samples of a run, by iteration; with `newest`, of so many iterations, so that it does not grow with the run."""

    def __init__(self, newest: int | None = None) -> None:
        self._iterations: dict[int, _Iteration] = {}
        self._newest = newest

    def start(self, iteration: int, samples: Sequence[str]) -> None:
        """The iteration will produce these samples."""
        entry = self._entry(iteration)
        entry.started = _join([*_split(entry.started), *samples])

    def step(self, iteration: int, samples: Sequence[str], finished: bool) -> None:
        """An optimizer step counted these samples; `finished`: it was the last of its iteration."""
        entry = self._entry(iteration)
        entry.steps.append(_join(samples))
        entry.finished = entry.finished or finished

    def finish(self, iteration: int) -> None:
        """No further step of this iteration will come."""
        if iteration in self._iterations:
            self._entry(iteration).finished = True

    def rewind(self, iteration: int | None) -> None:
        """Forget everything after `iteration`, all of it if None: the run went back to a checkpoint."""
        self._iterations = {i: e for i, e in self._iterations.items() if iteration is not None and i <= iteration}

    def tally(self) -> Tally:
        for number, entry in self._iterations.items():
            if entry.tally is None:
                entry.tally, entry.strays = _count(number, entry)
        if any(entry.strays for entry in self._iterations.values()):
            return self._tally_as_a_whole()
        tallies = [entry.tally for entry in self._iterations.values()]
        return Tally(*(sum(getattr(t, name) for t in tallies) for name in ("trained", "lost", "doubled")))

    def _entry(self, iteration: int) -> _Iteration:
        entry = self._iterations.setdefault(iteration, _Iteration())
        if self._newest is not None and len(self._iterations) > self._newest:
            del self._iterations[next(iter(self._iterations))]
        entry.tally = None
        return entry

    def _tally_as_a_whole(self) -> Tally:
        times = Counter(sample for entry in self._iterations.values() for sample in entry.trained())
        due = {sample for entry in self._iterations.values() if entry.finished for sample in _split(entry.started)}
        return Tally(len(times), len(due - times.keys()), sum(count > 1 for count in times.values()))


def _count(number: int, entry: _Iteration) -> tuple[Tally, bool]:
    """The tally of one iteration, and whether samples of another one are in it."""
    started, trained = set(_split(entry.started)), list(entry.trained())
    distinct = set(trained)
    doubled = sum(count > 1 for count in Counter(trained).values()) if len(distinct) < len(trained) else 0
    lost = len(started - distinct) if entry.finished else 0
    prefix = f"\n{number}:"
    strays = any(text and f"\n{text}".count(prefix) <= text.count("\n") for text in [entry.started, *entry.steps])
    return Tally(len(distinct), lost, doubled), strays
