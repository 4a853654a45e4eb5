"""How early can an iteration on paper end at all, whatever the policy knows? A bound that no `scheduler.replay` beats.

A schedule is seen by what it does while the furthest answer so far grows from one token to the next. Let x be that
answer's length, M the nodes, n of them those that are ever out of rollout, and R(x) those that generate, M - n <= R <= M:

- A node decodes all requests that it has, and these are spread evenly. So each is one of at least floor(N(x) / R) on
  its node (or of `max_running`), where N(x) answers are longer than x, and the next token of the furthest takes at
  least a + c * floor(N(x) / R) seconds.
- A group is complete no earlier than x reaches its longest answer. Then it has to go through all stages, each on one
  node: the end is at least that moment plus the group's own work.
- All work of the groups that are complete at x or later is done after that, by nodes that do not generate then, and by
  at most n after the last answer. From the very beginning, each of the n that has to leave for it loses a move as well.

The least end under these conditions is what the bound is, minimised over n. Each is a linear inequality, so Lagrange
multipliers take them apart into one choice of R for each x; whatever the multipliers, what comes out is a bound
(weak duality), and a multiplicative ascent makes it a good one. What is left out: that nodes have to move at all within
these conditions, that groups are whole, when the policy looks.
"""

from __future__ import annotations

import numpy as np

from dynarl.scheduler.replay import Work

# Steps of the ascent. Ten times as many raise the bound by a thousandth.
STEPS = 500


def least_s(work: Work, num_nodes: int, elsewhere: int = 0, steps: int = STEPS) -> float:
    """Seconds that every schedule takes at least. elsewhere: nodes that do not generate at the beginning.

    >>> work = Work([[100], [10]], (0.01, 0.001), {"training": 0.001}, move_s=0.0)
    >>> round(least_s(work, num_nodes=2), 3)  # 100 steps of a request alone, then its training
    1.2
    """
    least = np.inf
    for leavers in range(num_nodes, 0, -1):
        least = min(least, _Relaxed(work, num_nodes, leavers, elsewhere).ascend(steps, least))
    return float(least)


class _Relaxed:
    """The conditions with `leavers` nodes that are ever out of rollout. Arrays over x have one cell for each different
    length; a cell ends where answers of that length do."""

    def __init__(self, work: Work, num_nodes: int, leavers: int, elsewhere: int):
        a, c = work.step
        lengths = np.sort(np.concatenate([np.asarray(group) for group in work.lengths]))
        ends = np.unique(lengths)
        live = len(lengths) - np.searchsorted(lengths, ends)
        rollout = np.arange(max(num_nodes - leavers, 1), num_nodes + 1)
        running = np.clip(live[:, None] // rollout, 1, work.max_running)
        # [cells, choices of R]: seconds that a cell takes, and node-seconds outside of rollout meanwhile.
        self._seconds = np.diff(ends, prepend=0)[:, None] * (a + c * running)
        self._away = self._seconds * (num_nodes - rollout)
        per_token = sum(work.stages.values())
        self._own = per_token * np.array([sum(group) for group in work.lengths])
        done_in = np.searchsorted(ends, [max(group) for group in work.lengths])
        cells = np.arange(len(ends))
        self._before = (cells <= done_in[:, None]).astype(float)  # [groups, cells] until a group is complete
        begins = np.unique(done_in)
        after = np.array([self._own[done_in >= begin].sum() for begin in begins])
        self._work = np.concatenate([[after[0] + max(leavers - elsewhere, 0) * work.move_s], after])
        self._later = (cells > np.concatenate([[-1], begins])[:, None]).astype(float)
        self._leavers = leavers

    def ascend(self, steps: int, enough: float) -> float:
        """The best bound found; stops at `enough`."""
        groups = len(self._own)
        # Multipliers of the groups' paths and, times the leavers, of the work; the last is what is left to 1. Within
        # 1 no multiplier makes it pay to let time pass.
        weights = np.full(groups + len(self._work) + 1, 1.0 / (groups + len(self._work) + 1))
        best = 0.0
        for step in range(steps):
            value, slope = self._value(weights[:groups], weights[groups:-1] / self._leavers)
            best = max(best, value)
            if best >= enough:
                break
            behind = slope - slope.max()
            weights = weights * np.exp(behind * (4.0 / np.sqrt(1.0 + step / 20) / max(-behind.min(), 1e-12)))
            weights /= weights.sum()
        return best

    def _value(self, paths: np.ndarray, work: np.ndarray) -> tuple[float, np.ndarray]:
        """The bound of these multipliers, and its slope in each of them."""
        time_price = 1.0 - paths.sum() + paths @ self._before
        cost = time_price[:, None] * self._seconds - (work @ self._later)[:, None] * self._away
        chosen = cost.argmin(axis=1)
        rows = np.arange(len(chosen))
        seconds, away = self._seconds[rows, chosen], self._away[rows, chosen]
        value = cost[rows, chosen].sum() + paths @ self._own + work @ self._work
        late = self._own - seconds.sum() + self._before @ seconds
        short = (self._work - self._later @ away) / self._leavers
        return float(value), np.concatenate([late, short, [0.0]])
