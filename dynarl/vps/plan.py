"""The plan of a transition from one layout to another: who keeps, sends, receives and derives what, and when.

    need(rank)  = what its destination holds, less what it holds at the source, less bf16 parameters of which it
                  will hold the fp32 master (they are cast from it on arrival)
    fragments   = need, cut at the boundaries of source boxes and of chunks; each has holders and receivers   overlap.py
    routes      = who sends a fragment to whom; scarce ones are passed on by their receivers                  routes.py
    chunks      = what moves at a time, so that memory stays bounded                                          chunks.py
    rounds      = which pairs exchange when                                                                   rounds.py

A plan is a sequence of steps. In step s chunk s goes from its holders to its first receivers, while the two chunks
before it are passed on; then the source of chunk s is released. Each step is a closed exchange of `len(plan.ranks)`
rounds, numbered through over all steps.

Everything about a tensor follows from who holds and needs that tensor, from the sizes of the model and from the
degrees, so a rank that computes its own part only (`plan_for_rank`) comes to the same as everybody else. `digest` says
whether all planned from the same facts; `agreement` says whether what one rank will send is what the others expect.

>>> from dynarl.vps.layout import EngineLayout
>>> from dynarl.vps.presets import preset
>>> plan = plan_transition(preset("smollm2-135m"), EngineLayout(tp=1), EngineLayout(tp=3), kinds=["param"])
>>> plan.bytes_received, plan.bytes_received == plan.lower_bound
({0: 0, 1: 89723520, 2: 89723520}, True)
>>> [(e.round, e.peer, len(e.out), len(e.into)) for e in plan.transfers(1)]
[(2, 0, 0, 272)]
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dynarl.vps.box import Box, Pieces
from dynarl.vps.layout import Layout
from dynarl.vps.planner import Moves, Parts, Planner
from dynarl.vps.rounds import num_rounds, round_of, simulate
from dynarl.vps.routes import HOPS
from dynarl.vps.spec import ModelSpec
from dynarl.vps.steps import Exchange, Fragment, Local, Pair, Round, Step


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A transition. Of `plan_for_rank`, the per-rank figures are those of that rank only."""

    spec: ModelSpec
    src: Layout
    dst: Layout  # relabelled, where that saves bytes
    kinds: tuple[str, ...]
    ranks: tuple[int, ...]  # of both layouts and of `held`, ascending
    planned: tuple[int, ...]  # ranks that this plan knows all about
    budget_bytes: int
    num_chunks: int
    moves: tuple[Moves, ...]
    digest: str
    held: Mapping[str, Pieces]
    ranks_per_node: int
    links: float | Mapping[int, float] | None = None
    bytes_saved_by_relabelling: int = 0
    seconds_to_plan: float = 0.0

    def __repr__(self) -> str:
        return f"<Plan {self.digest[:8]}: {self.spec.name}, {'+'.join(self.kinds)}, {len(self.planned)} ranks>"

    # ---- figures

    @cached_property
    def bytes_received(self) -> dict[int, int]:
        """By rank."""
        return self._per_rank(self._sum((m.sent.rank, m.sent.elements * m.width) for m in self.moves))

    @cached_property
    def bytes_sent(self) -> dict[int, int]:
        """By rank, what it passes on included."""
        return self._per_rank(self._sum((m.sender, m.sent.elements * m.width) for m in self.moves))

    @cached_property
    def lower_bound(self) -> dict[int, int]:
        """By rank: bytes of its destination that it neither holds already nor casts from a master."""
        total = np.zeros(len(self.ranks), np.int64)
        for m in self.moves:
            for sign, parts in ((1, m.destination), (-1, m.kept), (-1, m.derived)):
                total += sign * self._sum([(parts.rank, parts.elements * m.width)])
        return self._per_rank(total)

    @cached_property
    def kept_bytes(self) -> dict[int, int]:
        """By rank: of its destination, what it holds already."""
        return self._per_rank(self._sum((m.kept.rank, m.kept.elements * m.width) for m in self.moves))

    @cached_property
    def derived_bytes(self) -> dict[int, int]:
        """By rank: of its destination, what it casts from masters."""
        return self._per_rank(self._sum((m.derived.rank, m.derived.elements * m.width) for m in self.moves))

    @cached_property
    def source_bytes(self) -> dict[int, int]:
        """By rank, of the kinds that move."""
        return self._per_rank(self._sum((m.released.rank, m.released.elements * m.width) for m in self.moves))

    @cached_property
    def destination_bytes(self) -> dict[int, int]:
        """By rank, of the kinds that move."""
        return self._per_rank(self._sum((m.destination.rank, m.destination.elements * m.width) for m in self.moves))

    @cached_property
    def peak_bytes(self) -> dict[int, int]:
        """By rank, at the worst moment: source not yet released, destination, staging for the messages of two rounds.

        Copies given as `held` are not counted.
        """
        ranks, steps = len(self.ranks), self.num_steps
        change, arrivals = np.zeros((2, ranks, steps), np.int64)
        for m in self.moves:
            for parts, step in ((m.sent, m.sent.chunk + m.hop), (m.kept, m.kept.chunk), (m.derived, m.derived.chunk)):
                np.add.at(arrivals, (self._at(parts.rank), step), parts.elements * m.width)
            released = m.released.elements * m.width
            np.add.at(change, (self._at(m.released.rank), m.released.chunk), released)
        source = change.sum(axis=1)
        after = source[:, None] + np.cumsum(arrivals - change, axis=1)
        before = np.concatenate([source[:, None], after[:, :-1]], axis=1)
        live = (before + arrivals).max(axis=1, initial=0)
        return self._per_rank(np.maximum(live, source) + self._staging())

    @property
    def num_steps(self) -> int:
        """Chunks, and the steps in which the last of them are passed on."""
        return self.num_chunks + HOPS - 1

    @property
    def rounds_per_step(self) -> int:
        return num_rounds(len(self.ranks))

    @cached_property
    def rounds(self) -> list[Round]:
        """Every round in which somebody exchanges something, in order."""
        round_, sender, receiver, nbytes = (column.tolist() for column in self._messages)
        result: list[Round] = []
        for number, *pair in zip(round_, sender, receiver, nbytes):
            if not result or result[-1].number != number:
                result.append(Round(number, []))
            result[-1].pairs.append(Pair(*pair))
        return result

    @cached_property
    def num_rounds(self) -> int:
        """Rounds in which somebody exchanges something."""
        return len(np.unique(self._messages[0]))

    @cached_property
    def seconds(self) -> float | None:
        """Estimated time of the exchange at the speeds of `links`; None: no links are given."""
        return None if self.links is None else simulate(*self._messages, self.links)

    @cached_property
    def seconds_at_best(self) -> float | None:
        """What no order of messages could beat: the busiest link, in one direction."""
        if self.links is None:
            return None
        rate = self.links if isinstance(self.links, Mapping) else dict.fromkeys(self.ranks, self.links)
        return max(max(self.bytes_received[r], self.bytes_sent[r]) / rate[r] for r in self.planned)

    @cached_property
    def seconds_to_plan_one_rank(self) -> float:
        """Measured now, once: the time in which the busiest rank plans its own part."""
        if len(self.planned) == 1:
            return self.seconds_to_plan
        busiest = max(self.planned, key=lambda rank: self.bytes_received[rank] + self.bytes_sent[rank])
        began = time.perf_counter()
        Planner(
            self.spec, self.src, self.dst, self.kinds, self.budget_bytes, self.held, self.ranks_per_node, only=busiest
        ).plan(relabel=False)
        return time.perf_counter() - began

    @cached_property
    def imbalance(self) -> float:
        """Bytes sent by the rank that sends most, against the mean of those that have something to send or pass on."""
        sent = [nbytes for rank, nbytes in self.bytes_sent.items() if nbytes or self.source_bytes[rank]]
        return max(sent) * len(sent) / sum(sent) if any(sent) else 1.0

    def agreement(self, rank: int) -> int:
        """A number mod 2**64 of what this rank sends and expects; over all ranks they add up to 0 where both ends
        agree.
        """
        total = 0
        for m in (moves.of_rank(rank) for moves in self.moves):
            columns = (m.round, m.sender, m.sent.rank, m.sent.tensor, *m.sent.lo.T, *m.sent.hi.T)
            seed = int.from_bytes(hashlib.sha256(repr(m.kinds).encode()).digest()[:8], "little")
            row = np.full(len(m.sender), seed, np.uint64)
            for column in columns:
                row = _mix(row ^ column.astype(np.uint64))
            sent, expected = (int(row[side == rank].sum(dtype=np.uint64)) for side in (m.sender, m.sent.rank))
            total += sent - expected
        return total % 2**64

    def traffic(self) -> np.ndarray:
        """Bytes from rank to rank, int64 [R, R], rows and columns in the order of `ranks`."""
        result = np.zeros((len(self.ranks), len(self.ranks)), np.int64)
        for m in self.moves:
            np.add.at(result, (self._at(m.sender), self._at(m.sent.rank)), m.sent.elements * m.width)
        return result

    # ---- what to do

    def transfers(self, rank: int) -> Iterator[Exchange]:
        """Every exchange of a rank, in order."""
        return (exchange for step in self.steps(rank) for exchange in step.exchanges)

    def local(self, rank: int) -> Iterator[Local]:
        """What a rank does by itself, in order. What neither is local nor arrives is padding, which has no logical
        address: an executor fills it with zeros.
        """
        for step in self.steps(rank):
            yield from (Local("keep", step.number, fragment) for fragment in step.keep)
            yield from (Local("derive", step.number, fragment) for fragment in step.derive)

    def steps(self, rank: int) -> Iterator[Step]:
        """Everything that a rank has to do, step by step; steps in which it does nothing are left out."""
        if rank not in self.planned:
            raise ValueError(f"rank {rank} is not in this plan, which is for {len(self.planned)} ranks")
        n, me = self.rounds_per_step, self.ranks.index(rank)
        todo: dict[int, Step] = {}
        exchanges: dict[int, Exchange] = {}

        def step(number: int) -> Step:
            return todo.setdefault(number, Step(number, [], [], [], []))

        for m in sorted((m.of_rank(rank) for m in self.moves), key=lambda m: self.kinds.index(m.kinds[0])):
            for kind in m.kinds:
                for chunk, fragment in self._fragments(kind, m.kept):
                    step(chunk).keep.append(fragment)
                for chunk, fragment in self._fragments(kind, m.derived):
                    step(chunk + HOPS - 1).derive.append(fragment)
                for chunk, fragment in self._fragments(kind, m.released):
                    step(chunk).release.append(fragment)
                rows = zip(m.round.tolist(), m.sender.tolist(), m.sent.rank.tolist(), self._fragments(kind, m.sent))
                for number, sender, receiver, (_, fragment) in rows:
                    if number not in exchanges:
                        peer = receiver if sender == rank else sender
                        assert number % n == round_of(me, self.ranks.index(peer), n)
                        exchanges[number] = Exchange(number, peer, [], [])
                    (exchanges[number].out if sender == rank else exchanges[number].into).append(fragment)
        for number in sorted(exchanges):
            step(number // n).exchanges.append(exchanges[number])
        return (todo[number] for number in sorted(todo))

    def destination(self, rank: int) -> Iterator[Fragment]:
        """Every piece of a rank's destination, as the layout cuts it."""
        for m in (m.of_rank(rank) for m in self.moves):
            for kind in m.kinds:
                yield from (fragment for _, fragment in self._fragments(kind, m.destination))

    def apply(self, buffers: Mapping[int, Mapping[tuple[Any, str], Sequence[tuple[Box, np.ndarray]]]]) -> dict:
        """Execute the plan in this process: {rank: {(tensor, kind): [(box, array), ...]}} of the source, and of
        `held`, to the same form at the destination. Tensors may be named by LogicalTensor, name or index.
        """
        from dynarl.vps.execute import run

        return run(self, buffers).buffers

    # ---- inside

    @cached_property
    def _messages(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(round, sender, receiver, bytes) of every message, sorted by round."""
        n = len(self.ranks)
        keys = [(m.round * n + self._at(m.sender)) * n + self._at(m.sent.rank) for m in self.moves]
        sizes = [m.sent.elements * m.width for m in self.moves]
        key, inverse = np.unique(np.concatenate(keys), return_inverse=True)
        nbytes = np.zeros(len(key), np.int64)
        np.add.at(nbytes, inverse, np.concatenate(sizes))
        ranks = np.array(self.ranks, np.int64)
        return key // (n * n), ranks[key // n % n], ranks[key % n], nbytes

    def _staging(self) -> np.ndarray:
        """By position: the most that two of a rank's rounds in a row send and receive."""
        round_, sender, receiver, nbytes = self._messages
        rank = self._at(np.concatenate([sender, receiver]))
        key, inverse = np.unique(rank * (int(round_.max(initial=0)) + 1) + np.tile(round_, 2), return_inverse=True)
        both = np.zeros(len(key), np.int64)
        np.add.at(both, inverse, np.tile(nbytes, 2))
        rank = key // (int(round_.max(initial=0)) + 1)
        result = np.zeros(len(self.ranks), np.int64)
        np.maximum.at(result, rank, both)
        np.maximum.at(result, rank[1:], np.where(rank[1:] == rank[:-1], both[1:] + both[:-1], 0))
        return result

    @cached_property
    def _sorted_ranks(self) -> np.ndarray:
        return np.array(self.ranks, np.int64)

    def _at(self, rank: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._sorted_ranks, rank)

    def _sum(self, parts) -> np.ndarray:
        """Bytes by position, from (ranks, bytes) pairs."""
        total = np.zeros(len(self.ranks), np.int64)
        for rank, nbytes in parts:
            np.add.at(total, self._at(rank), nbytes)
        return total

    def _per_rank(self, by_position: np.ndarray) -> dict[int, int]:
        values = dict(zip(self.ranks, by_position.tolist()))
        return {rank: values[rank] for rank in self.planned}

    def _fragments(self, kind: str, parts: Parts) -> Iterator[tuple[int, Fragment]]:
        tensors = self.spec.tensors
        for chunk, tensor, lo, hi in zip(
            parts.chunk.tolist(), parts.tensor.tolist(), parts.lo.tolist(), parts.hi.tolist()
        ):
            yield chunk, Fragment(kind, tensor, tuple(zip(lo, hi))[: len(tensors[tensor].shape)])


def plan_transition(
    spec: ModelSpec,
    src: Layout,
    dst: Layout,
    *,
    kinds: Sequence[str],
    relabel: bool = True,
    budget_bytes: int | None = None,
    held: Mapping[str, Pieces] | None = None,
    links: float | Mapping[int, float] | None = None,
    ranks_per_node: int | None = None,
) -> Plan:
    """The plan of all ranks.

    kinds: what moves; param, master, exp_avg, exp_avg_sq or registered extras.
    relabel: let the ranks of `dst` change places where that saves bytes; with `ranks_per_node` only nodes as a whole
        and ranks within a node, so that a group inside one node stays inside one.
    budget_bytes: what the move may need beyond the larger of a rank's two states; default 1 GiB.
    held: pieces that ranks hold besides the source and keep, by kind (a rollout engine's parameters).
    links: bytes per second of every rank, or of each, for `Plan.seconds`.
    ranks_per_node: senders on the receiver's node (rank // ranks_per_node) come first. Default: each rank is a node.

    Raises ValueError where a layout does not fit the model, or where something is needed that nobody holds.
    """
    began = time.perf_counter()
    planner = Planner(spec, src, dst, kinds, budget_bytes, held, ranks_per_node)
    plan = Plan(**planner.plan(relabel=relabel), links=links)
    return replace(plan, seconds_to_plan=time.perf_counter() - began)


def plan_for_rank(
    spec: ModelSpec,
    src: Layout,
    dst: Layout,
    rank: int,
    *,
    kinds: Sequence[str],
    budget_bytes: int | None = None,
    held: Mapping[str, Pieces] | None = None,
    links: float | Mapping[int, float] | None = None,
    ranks_per_node: int | None = None,
) -> Plan:
    """One rank's part of `plan_transition(..., relabel=False)`, from the tensors only that it has or will have.

    Relabelling looks at everybody's overlaps: whoever decides on the transition does it once and hands on `plan.dst`.
    """
    began = time.perf_counter()
    planner = Planner(spec, src, dst, kinds, budget_bytes, held, ranks_per_node, only=rank)
    plan = Plan(**planner.plan(relabel=False), links=links)
    return replace(plan, seconds_to_plan=time.perf_counter() - began)


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit numbers without structure (the finalizer of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
