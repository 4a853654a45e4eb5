"""Which allocations of nodes to components are worth a look, and which nodes to move to get from one to another.
Pure."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator

from dynarl.scheduler.situation import Situation

# Up to so many nodes every split between two stages is looked at.
EVERY_SPLIT = 12

Flows = dict[tuple[str | None, str], int]


def ladder(most: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and `most`: small changes exactly, large ones roughly.

    >>> list(ladder(10)), list(ladder(0))
    ([1, 2, 3, 4, 6, 8, 10], [])
    """
    step = 1
    while step < most:
        yield step
        if step > 1 and 3 * step // 2 < most:
            yield 3 * step // 2
        step *= 2
    if most > 0:
        yield most


def shares(total: int, weights: list[float]) -> list[int]:
    """`total` in whole parts as near to the weights as can be; every weight above 0 gets 1 where there are enough.

    >>> shares(5, [1.0, 3.0]), shares(1, [1.0, 3.0]), shares(3, [0.0, 1.0])
    ([1, 4], [0, 1], [0, 3])
    """
    asked = sum(weights)
    if not asked:
        return [total] + [0] * (len(weights) - 1) if weights else []
    exact = [total * weight / asked for weight in weights]
    parts = [int(part) for part in exact]
    for index in sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))[: total - sum(parts)]:
        parts[index] += 1
    for index, weight in enumerate(weights):
        if weight and not parts[index] and max(parts) > 1:
            parts[parts.index(max(parts))] -= 1
            parts[index] += 1
    return parts


class Pool:
    """The nodes of a situation by where they are and where they can go."""

    def __init__(self, situation: Situation):
        self._situation = situation
        self.now: Counter[str | None] = Counter(situation.roles.values())
        self._components, self._free = situation.components, self.now[None]
        self._have = [self.now[component] for component in self._components]
        self._by: dict[tuple[str | None, frozenset[str]], list[str]] = defaultdict(list)
        self._order: dict[tuple[str | None, str], list[str]] = {}
        for node, role in situation.roles.items():
            others = situation.may[node] - {role}
            if node in situation.bound and role != situation.generator:
                # It would be called back at the next step; and were only such nodes left there, the step would have to
                # wait for the last answer.
                others -= {situation.generator}
            if others:
                self._by[role, others].append(node)
        self.able: defaultdict[tuple[str | None, str], int] = defaultdict(int)
        self.movable: Counter[str | None] = Counter()
        for (role, others), nodes in self._by.items():
            self.movable[role] += len(nodes)
            for target in others:
                self.able[role, target] += len(nodes)

    def flows(self, target: tuple[int, ...]) -> Flows | None:
        """The fewest moves to these numbers of nodes; None where nodes cannot go there. The free pool gives first."""
        missing: dict[str, int] = {}
        spare: dict[str | None, int] = {None: self._free}
        for component, have, want in zip(self._components, self._have, target):
            if want > have:
                missing[component] = want - have
            elif want < have:
                spare[component] = have - want
        flows: Flows = {}
        takers = list(missing)
        if len(takers) > 1:  # who can take from the fewest comes first
            takers.sort(key=lambda c: sum(self.able[giver, c] for giver in spare))
        for taker in takers:
            for giver in spare:
                count = min(missing[taker], spare[giver], self.able[giver, taker])
                if count > 0:
                    flows[giver, taker] = count
                    missing[taker] -= count
                    spare[giver] -= count
            if missing[taker]:
                return None
        return None if any(n for giver, n in spare.items() if giver is not None) else flows

    def pick(self, flows: Flows) -> dict[str, str] | None:
        """Nodes for these flows, givers in pipeline order: those first that have to be there at the next step anyhow; of
        rollout those that are slow or have the fewest requests, since they have the least to hand over. None where a
        node would be needed twice."""
        situation, taken, moves = self._situation, set(), {}
        order = {component: index for index, component in enumerate((None, *situation.components))}
        # Most particular first: a node that can go to one place only is no help elsewhere.
        for (giver, taker), count in sorted(flows.items(), key=lambda flow: (self.able[flow[0]], order[flow[0][1]])):
            able = [node for node in self._ranked(giver, taker) if node not in taken]
            if len(able) < count:
                return None
            taken |= set(able[:count])
            moves |= dict.fromkeys(able[:count], taker)
        return dict(sorted(moves.items(), key=lambda move: (order[situation.roles[move[0]]], order[move[1]], move[0])))

    def _ranked(self, giver: str | None, taker: str) -> list[str]:
        """Nodes that can go from one to the other, those that rather should first."""
        if (giver, taker) not in self._order:
            situation = self._situation
            wanted = situation.bound if taker == self._components[-1] else situation.roles.keys() - situation.bound
            self._order[giver, taker] = sorted(
                (n for (role, others), nodes in self._by.items() if role == giver and taker in others for n in nodes),
                key=lambda n: (
                    n not in wanted, n not in situation.slow, situation.running.get(n, 0), len(situation.may[n]), n
                ),
            )  # fmt: skip
        return self._order[giver, taker]


def targets(
    situation: Situation, pool: Pool, may_leave: int, may_return: int, work: list[float]
) -> list[tuple[int, ...]]:
    """Allocations to compare, the present one first: fewer (or more) rollout nodes with the difference split among the
    stages, all stages shared anew, and nodes between two stages. work: seconds that are left for each stage."""
    components = situation.components
    now = tuple(pool.now[c] for c in components)
    stages, free = list(now[1:]), pool.now[None]
    found = dict.fromkeys([now])
    for leave in [*ladder(may_leave), 0, *(-n for n in ladder(may_return))]:
        rollout = now[0] - leave
        # All of the free pool, none of it, or, where nobody leaves, a part.
        for given in {leave, leave + free, *(ladder(free) if not leave else ())}:
            total = sum(stages) + given
            if total < 0:
                continue
            fair = shares(total, work)
            found[rollout, *fair] = None
            if len(stages) == 2:
                span = (
                    range(total + 1)
                    if total <= EVERY_SPLIT
                    else range(max(fair[0] - 2, 0), min(fair[0] + 2, total) + 1)
                )
                found |= dict.fromkeys((rollout, n, total - n) for n in span)
            # All of them to, or from, one stage.
            for index in range(len(stages)) if len(stages) <= 3 or abs(given) <= EVERY_SPLIT else ():
                if stages[index] + given >= 0:
                    found[rollout, *(have + given * (i == index) for i, have in enumerate(stages))] = None
            if given > 0:  # to those that have less than their share
                gaps = [max(want - have, 0) for want, have in zip(fair, stages)]
                found[
                    rollout, *(have + more for have, more in zip(stages, shares(given, gaps if any(gaps) else work)))
                ] = None
            if 0 < given <= EVERY_SPLIT and len(stages) == 2:
                found |= dict.fromkeys((rollout, stages[0] + n, stages[1] + given - n) for n in range(given + 1))
    for giver in range(1, len(now)):
        # With many stages there are many pairs: one node, half or all of them must do.
        counts = (
            ladder(now[giver]) if len(stages) <= 3 else {1, now[giver] // 2, now[giver]} - {0} if now[giver] else ()
        )
        for taker, count in itertools.product(range(1, len(now)), sorted(counts)):
            if giver != taker:
                found[tuple(n + count * ((i == taker) - (i == giver)) for i, n in enumerate(now))] = None
    return list(found)
