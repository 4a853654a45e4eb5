"""One iteration on paper: requests decode, groups queue, nodes move when a policy says so. For tests and benchmarks
of policies.

Deterministic and exact for what it models: a node with b requests makes one token of each in a + c * b seconds, and
requests change nodes as soon as these have two more than those; a stage's node takes one group at a time and tokens *
seconds per token for it; a node that moves first gives its requests back (a stage's node finishes its group) and is
then missing for `move_s`. What it leaves out is what the real cluster is measured for: messages, prefills, noise.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dynarl.scheduler.situation import Queue, Situation

TINY_S = 1e-9
# A policy that stays so often in a row while nothing runs stays for ever.
IDLE_LOOKS = 10


@dataclass(frozen=True)
class Work:
    """lengths: tokens of each answer, by group; step: (a, c); stages: seconds per token, in pipeline order; look_s:
    seconds between two looks of the policy."""

    lengths: Sequence[Sequence[int]]
    step: tuple[float, float]
    stages: Mapping[str, float]
    max_running: int = 64
    move_s: float = 0.3
    look_s: float = 0.1


@dataclass
class _Node:
    role: str | None
    steps: float = 0.0
    requests: list[tuple[float, int]] = field(default_factory=list)  # heap of (steps at its end, sample)
    busy_until: float | None = None
    group: int | None = None
    going: str | None = None
    back_at: float | None = None


@dataclass
class Replay:
    """`ask(replay)` answers {node: new role}, at most every `work.look_s`; it may read everything."""

    work: Work
    roles: dict[str, str]
    may: Mapping[str, frozenset[str]]
    ask: Callable[[Replay], Mapping[str, str]]
    generator: str = "rollout"

    def __post_init__(self) -> None:
        self.t, self.moved_at, self.looked_at = 0.0, -1e9, -1e9
        self.nodes = {name: _Node(role) for name, role in self.roles.items()}
        self.length = list(itertools.chain.from_iterable(self.work.lengths))
        self.group_of = [g for g, members in enumerate(self.work.lengths) for _ in members]
        self.done = [0.0] * len(self.length)  # tokens so far of what waits
        self.waiting = deque(range(len(self.length)))
        self.left = [len(members) for members in self.work.lengths]
        self.queues: dict[str, deque[int]] = {stage: deque() for stage in self.work.stages}
        self.trained = self._idle_looks = 0
        self.finished: list[int] = []
        self.history: list[tuple[float, dict[str, str]]] = []

    def run(self, limit_s: float = 1e6) -> float:
        """Seconds until the last group is through the last stage. Raises RuntimeError when nothing goes on any more."""
        while self.trained < len(self.left):
            self._hand_out()
            if self.t - self.looked_at >= self.work.look_s - TINY_S and not any(n.going for n in self.nodes.values()):
                self.looked_at = self.t
                self._move({n: r for n, r in self.ask(self).items() if r != self.nodes[n].role})
                self._hand_out()
            ahead = self._next()
            if ahead is None or self.t > limit_s:
                raise RuntimeError(
                    f"nothing goes on at {self.t:.3f} s: { {n: node.role for n, node in self.nodes.items()} }"
                )
            self._advance(ahead)
        return self.t

    # --- what is seen

    def situation(self) -> Situation:
        roles = {name: node.role for name, node in self.nodes.items() if not node.going}
        running = {name: len(self.nodes[name].requests) for name, role in roles.items() if role == self.generator}
        so_far = [self.length[s] - end + node.steps for node in self.nodes.values() for end, s in node.requests]
        so_far += [self.done[s] for s in self.waiting]
        members: dict[int, int] = {}
        for left in self.left:
            if left:
                members[left] = members.get(left, 0) + 1
        tokens = [sum(members) for members in self.work.lengths]
        in_work = {
            stage: [n.group for n in self.nodes.values() if n.role == stage and n.group is not None]
            for stage in self.queues
        }
        queues = {
            stage: Queue(
                len(queue),
                len(in_work[stage]),
                sum(tokens[g] for g in queue) + 0.5 * sum(tokens[g] for g in in_work[stage]),
            )
            for stage, queue in self.queues.items()
        }
        unfinished = sum(self.length[s] for s in self.finished if self.left[self.group_of[s]])
        return Situation(
            roles,
            self.may,
            queues,
            self.generator,
            running,
            len(self.waiting),
            [int(tokens) for tokens in so_far],
            members,
            unfinished,
            0.0,
            self.work.max_running,
        )

    # --- what happens

    def _at_work(self, role: str) -> list[_Node]:
        return [node for node in self.nodes.values() if node.role == role and not node.going]

    def _hand_out(self) -> None:
        generators = self._at_work(self.generator)
        while self.waiting and generators:
            node = min(generators, key=lambda n: len(n.requests))
            if len(node.requests) >= self.work.max_running:
                break
            self._begin(self.waiting.popleft(), node)
        while generators:
            emptiest, fullest = (find(generators, key=lambda n: len(n.requests)) for find in (min, max))
            if len(fullest.requests) - len(emptiest.requests) < 2:
                break
            self._begin(self._take_away(max(fullest.requests), fullest), emptiest)
        for stage, queue in self.queues.items():
            for node in self._at_work(stage):
                if queue and node.group is None:
                    node.group = queue.popleft()
                    node.busy_until = self.t + self.work.stages[stage] * sum(self.work.lengths[node.group])

    def _begin(self, sample: int, node: _Node) -> None:
        heapq.heappush(node.requests, (node.steps + self.length[sample] - self.done[sample], sample))

    def _take_away(self, entry: tuple[float, int], node: _Node) -> int:
        node.requests.remove(entry)
        heapq.heapify(node.requests)
        end, sample = entry
        self.done[sample] = self.length[sample] - (end - node.steps)
        return sample

    def _move(self, moves: dict[str, str]) -> None:
        for name, target in moves.items():
            node = self.nodes[name]
            assert target in self.may[name], f"{name} cannot be {target}"
            for entry in list(node.requests):
                self.waiting.appendleft(self._take_away(entry, node))
            node.going = target
            node.back_at = max(node.busy_until or self.t, self.t) + self.work.move_s
        if moves:
            self.history.append((self.t, dict(moves)))

    def _step_s(self, node: _Node) -> float:
        return self.work.step[0] + self.work.step[1] * len(node.requests)

    def _next(self) -> float | None:
        times = [self.looked_at + self.work.look_s] if not any(n.going for n in self.nodes.values()) else []
        busy = False
        for node in self.nodes.values():
            if node.requests:
                times.append(self.t + max(node.requests[0][0] - node.steps, 0.0) * self._step_s(node))
            times += [at for at in (node.busy_until, node.back_at) if at is not None]
            busy |= bool(node.requests or node.busy_until is not None or node.back_at is not None)
        self._idle_looks = 0 if busy else self._idle_looks + 1
        return max(min(times), self.t) if self._idle_looks <= IDLE_LOOKS else None

    def _advance(self, until: float) -> None:
        span, self.t = until - self.t, until
        for node in self.nodes.values():
            if node.requests:
                node.steps += span / self._step_s(node)
        for node in self.nodes.values():
            while node.requests and node.requests[0][0] - node.steps <= 1e-6:
                _, sample = heapq.heappop(node.requests)
                self.finished.append(sample)
                group = self.group_of[sample]
                self.left[group] -= 1
                if not self.left[group]:
                    self._pass_on(group, -1)
            if node.busy_until is not None and node.busy_until <= until + TINY_S:
                self._pass_on(node.group, list(self.queues).index(node.role))
                node.busy_until = node.group = None
            if node.back_at is not None and node.back_at <= until + TINY_S:
                node.role, node.going, node.back_at = node.going, None, None
                self.moved_at = until

    def _pass_on(self, group: int, stage: int) -> None:
        if stage + 1 == len(self.queues):
            self.trained += 1
        else:
            list(self.queues.values())[stage + 1].append(group)
