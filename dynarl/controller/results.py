"""What the answers of an iteration come to: sums for its metrics, advantages of complete groups, gradients' statistics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dynarl import wire
from dynarl.config.schema import Algorithm
from dynarl.controller.epochs import Outcome
from dynarl.dataflow.ledger import Group
from dynarl.rl.advantages import group_advantages, is_flat
from dynarl.rl.truncation import judge


@dataclass
class Tally:
    """What an iteration adds up for its metrics. `score_stats` has the keys that the workers report (sums; `*_max`
    maxima). Times are the monitor's clock's.
    """

    started: float
    score_stats: dict[str, float] = field(default_factory=dict)
    correct: int = 0
    timed_out: int = 0
    prompt_tokens: int = 0
    tool_calls: list[int] = field(default_factory=list)  # of each answer
    tool_seconds: float = 0.0
    generated_at: float = 0.0
    scored_at: float = 0.0
    switches: list[Outcome] = field(default_factory=list)
    node_seconds: dict[str, float] = field(default_factory=dict)

    def stage_ends(self) -> dict[str, float]:
        """Seconds from the start to the last answer and to the last score, as far as they are there."""
        ends = {"rollout": self.generated_at, "inference": self.scored_at}
        return {role: round(end - self.started, 3) for role, end in ends.items() if end}


def add(into: dict[str, float], stats: dict[str, float]) -> None:
    """Add statistics up: sums, and maxima where the name ends in `_max`.

    >>> total = {"tokens": 2.0, "diff_max": 0.5}
    >>> add(total, {"tokens": 3.0, "diff_max": 0.1})
    >>> total
    {'tokens': 5.0, 'diff_max': 0.5}
    """
    for name, value in stats.items():
        into[name] = max(into.get(name, value), value) if name.endswith("_max") else into.get(name, 0.0) + value


class Results:
    """Of the groups that are complete, and of those that are trained. `num_flat_groups`: without an advantage, since
    all rewards are the same."""

    def __init__(self, algorithm: Algorithm):
        self._algorithm = algorithm
        # group -> sample -> (advantage, weight); in the order in which they became complete
        self._advantages: dict[str, dict[str, tuple[float, float]]] = {}
        self._masked: dict[str, int] = {}  # sample -> its tokens that tools wrote
        self._stats: dict[str, dict[str, float]] = {}
        self.num_flat_groups = 0

    def finished(self, sample: str, masked_tokens: int) -> None:
        self._masked[sample] = masked_tokens

    def completed(self, group: Group) -> None:
        """Its last answer is there."""
        settled = [judge(self._algorithm.truncated, group.rewards[s], group.finish[s]) for s in group.samples]
        rewards = [outcome.reward for outcome in settled]
        self.num_flat_groups += is_flat(rewards)
        advantages = group_advantages(rewards, self._algorithm.normalize_std)
        self._advantages[group.name] = {
            sample: (advantage, outcome.weight)
            for sample, advantage, outcome in zip(group.samples, advantages, settled)
        }

    def trained(self, group: Group, stats: dict[str, float]) -> None:
        """By group: one whose gradient is lost with its worker is trained, and counted, again."""
        self._stats[group.name] = stats

    def of_sample(self, sample: str) -> dict[str, float]:
        """What a trainer is told of a sample of a complete group."""
        advantage, weight = self._advantages[wire.group_of(sample)][sample]
        return {"advantage": advantage, "weight": weight}

    def advantages(self) -> list[float]:
        return [advantage for group in self._advantages.values() for advantage, _ in group.values()]

    def counted_tokens(self, groups: Iterable[Group]) -> int:
        """Response tokens of these groups that count in the loss."""
        return sum(int((group.tokens[s] - self._masked[s]) * self._advantages[group.name][s][1])
                   for group in groups for s in group.samples)

    @property
    def num_masked_tokens(self) -> int:
        """Response tokens that tools wrote."""
        return sum(self._masked.values())

    def stats(self, groups: Iterable[Group] | None = None) -> dict[str, float]:
        """Sums over these trained groups; by default over all."""
        total: dict[str, float] = {}
        for stats in self._stats.values() if groups is None else [self._stats[group.name] for group in groups]:
            add(total, stats)
        return total
