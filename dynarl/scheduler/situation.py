"""What the adaptive scheduler decides on and what it answers. Plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Queue:
    """Complete groups at one stage: waiting for a node, in work, and the tokens of both."""

    waiting: int = 0
    in_work: int = 0
    tokens: float = 0.0

    @property
    def groups(self) -> int:
        return self.waiting + self.in_work


@dataclass(frozen=True)
class Situation:
    """One moment of an iteration.

    roles: component of each node, None for a node of the free pool; may: components it can join; queues: the components
    after the generating one, in pipeline order; running: requests on each generating node; waiting: requests on none;
    lengths: tokens so far of every live request, those of tools not counted; live_members: {live members: number of
    unfinished groups}; finished_tokens: of finished answers in these; prompt_tokens: mean length of a prompt;
    max_running: requests that one node decodes together; max_queued: beyond these it holds so many; kv_tokens: what all
    of them may take there (None: unknown); units: nodes of one instance, where more than one; slow: nodes far behind
    the others; written_per_sampled: tokens of an answer for each that is decoded, more than 1 where tools write too; wait_s:
    that an answer waits for tools, for each token that is decoded; bound: nodes that the next step of the last component
    waits for, since they own its state or hold a part of its sum; one_by_one: nodes that go to different components move
    one after another, since these are on different weights; finished_share: of all answers, those that have ended;
    group_delay: d, where a share p^d of the groups is complete when a share p of the answers has ended (None: unknown).
    """

    roles: Mapping[str, str | None]
    may: Mapping[str, frozenset[str]]
    queues: Mapping[str, Queue]
    generator: str = "rollout"
    running: Mapping[str, int] = field(default_factory=dict)
    waiting: int = 0
    lengths: Sequence[int] = ()
    live_members: Mapping[int, int] = field(default_factory=dict)
    finished_tokens: float = 0.0
    prompt_tokens: float = 0.0
    max_running: int = 1
    max_queued: int = 0
    kv_tokens: float | None = None
    units: Mapping[str, int] = field(default_factory=dict)
    slow: frozenset[str] = frozenset()
    written_per_sampled: float = 1.0
    bound: frozenset[str] = frozenset()
    group_delay: float | None = None
    finished_share: float = 0.0
    wait_s: float = 0.0
    one_by_one: bool = False

    @property
    def components(self) -> tuple[str, ...]:
        return (self.generator, *self.queues)

    @property
    def most(self) -> int:
        """Requests that one node holds."""
        return self.max_running + self.max_queued

    @property
    def live(self) -> int:
        return self.waiting + sum(self.running.values())


@dataclass(frozen=True)
class Candidate:
    """moves: {node: component}, nodes that release their place first come first. finish_s: forecast end of the
    iteration from now if nothing else moves before the last answer; cost_s: how long its nodes are missing; gain_s:
    how much earlier than staying."""

    moves: dict[str, str]
    finish_s: float
    cost_s: float
    gain_s: float


@dataclass(frozen=True)
class Decision:
    """moves: empty to stay. candidates: staying, then the best; chosen: index of the one taken. finish_s: forecast
    with what is planned for later; seen: the numbers it rests on."""

    moves: dict[str, str]
    reason: str
    candidates: tuple[Candidate, ...] = ()
    chosen: int = 0
    finish_s: float = 0.0
    seen: dict[str, float] = field(default_factory=dict)
