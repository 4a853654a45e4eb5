"""Generation replayed on instances whose speed and whose answers' lengths are known here, but not to what hands out.

An instance takes `fixed_s + per_request_s * b` seconds for one token of each of its b requests. A request that moves
makes no token for MOVE_S; then its receiver makes none while it prefills the request's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from dynarl.dataflow.routing import Instance, Request, rebalance, route
from dynarl.scheduler.survival import Lengths

MOVE_S, PREFILL_S, PROMPT, LIMIT = 0.5, 0.002, 50, 2000


def long_tailed(groups: int, size: int, seed: int) -> dict[str, int]:
    """Log-normal lengths, cut at LIMIT; half of the spread is between prompts."""
    source = random.Random(seed)
    lengths = {}
    for group in range(groups):
        level = source.gauss(5.0, 0.7)
        for member in range(size):
            lengths[f"1:{group}:{member}"] = max(1, min(LIMIT, round(2.718 ** source.gauss(level, 0.7))))
    return lengths


@dataclass
class Replay:
    lengths: dict[str, int]
    instances: list[Instance]
    rebalancing: bool = False
    even: bool = False  # equal numbers for everybody, first come first served
    now: float = 0.0
    waiting: list[str] = field(default_factory=list)
    under_way: dict[str, tuple[float, str]] = field(default_factory=dict)  # sample -> (when it arrives, where)
    busy_until: dict[str, float] = field(default_factory=dict)  # instance -> end of its prefill
    moves: int = 0

    def run(self) -> float:
        """Seconds until the last answer is there."""
        self.waiting = list(self.lengths)
        self.made = dict.fromkeys(self.lengths, 0.0)
        self.at: dict[str, str] = {}
        self.learned = Lengths(LIMIT)
        next_look = 0.0
        while self.waiting or self.at or self.under_way:
            if self.waiting:
                self.hand_out()
            elif self.rebalancing and self.now >= next_look:
                next_look = self.now + 1.0
                self.move()
            self.advance(next_look if self.rebalancing and not self.waiting else float("inf"))
        return self.now

    def running(self, instance: Instance) -> list[str]:
        return [sample for sample, name in self.at.items() if name == instance.name]

    def remaining(self, made: float) -> float:
        return max(1.0, float(self.survival.expected_remaining(int(min(made, LIMIT - 1)))))

    def request(self, sample: str, home: str | None) -> Request:
        made = self.made[sample]
        return Request(sample, sample.rpartition(":")[0], PROMPT + made, self.remaining(made), home, "preferred" if home else "none")

    def loaded(self) -> list[Instance]:
        return [replace(instance, prefill_s=PREFILL_S, running=[self.request(s, instance.name) for s in self.running(instance)])
                for instance in self.instances]

    def hand_out(self) -> None:
        self.survival = self.learned.survival([])
        loaded = self.loaded()
        if self.even:
            assigned = {}
            left = list(self.waiting)
            for instance in sorted(loaded, key=lambda instance: len(instance.running)):
                share = -(-(len(left) + sum(len(i.running) for i in loaded)) // len(loaded))
                count = max(0, min(instance.max_running, max(share, 1)) - len(instance.running))
                assigned[instance.name], left = left[:count], left[count:]
        else:
            free = sum(instance.max_running - len(instance.running) for instance in loaded)
            backlog = max(0, len(self.waiting) - free) * self.remaining(0)
            assigned = route([self.request(s, None) for s in self.waiting[:free]], loaded, backlog).assigned
        for name, samples in assigned.items():
            for sample in samples:
                self.waiting.remove(sample)
                self.at[sample] = name

    def move(self) -> None:
        self.survival = self.learned.survival([int(self.made[sample]) for sample in self.at])
        for move in rebalance(self.loaded(), move_s=MOVE_S):
            del self.at[move.sample]
            self.under_way[move.sample] = self.now + MOVE_S, move.target
            self.moves += 1

    def advance(self, at_most: float) -> None:
        """To the next answer that finishes, the next arrival, or to `at_most`."""
        rates, ends = {}, [at_most, *(when for when, _ in self.under_way.values())]
        for instance in self.instances:
            samples = self.running(instance)
            if samples:
                step_s = instance.fixed_s + instance.per_request_s * len(samples)
                start = max(self.now, self.busy_until.get(instance.name, 0.0))
                rates[instance.name] = start, step_s
                ends.append(start + step_s * min(self.lengths[s] - self.made[s] for s in samples))
        then = max(min(ends), self.now)
        for sample, name in list(self.at.items()):
            start, step_s = rates[name]
            self.made[sample] += max(0.0, then - start) / step_s
            if self.made[sample] >= self.lengths[sample] - 1e-6:
                del self.at[sample]
                self.learned.finished(self.lengths[sample])
        for sample, (when, name) in list(self.under_way.items()):
            if when <= then:
                del self.under_way[sample]
                self.at[sample] = name
                self.busy_until[name] = max(then, self.busy_until.get(name, 0.0)) + PREFILL_S * (PROMPT + self.made[sample])
        self.now = then
