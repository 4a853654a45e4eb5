"""Routing of one job's requests: what the ledger and the workers' reports say, in the terms of `dataflow.routing`.

It outlives iterations, because what it has learned of lengths and speeds does. Times are seconds of the caller's clock.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dynarl import wire
from dynarl.config.schema import Config
from dynarl.dataflow.ledger import Ledger
from dynarl.dataflow.routing import Instance, Move, Outline, Request, may_move, rebalance, route
from dynarl.dataflow.speeds import Speeds
from dynarl.scheduler.survival import Lengths

# What it takes to move a request, before one has been moved; weight of the newest measurement after that.
FIRST_MOVE_S, NEWEST = 0.1, 0.25
# The estimate of lengths is made anew when so many more answers have finished, as a share of those before.
FRESH_SHARE = 1 / 8
# Speeds are learned over many readings, and requests grow slowly: whether nodes are equally fast, and what memory of a
# node its requests will have taken in the end, is looked at so often.
SPEEDS_S, MEMORY_S = 1.0, 2.0
# Speeds come in steps of 41 % (`speeds.STEPS_PER_OCTAVE`).
EQUAL = 1.25
# Where there are many nodes, so many of those that end last, of those that end first and of the fastest are looked at
# for moves. The others are in between, and there is a next look.
LOOKED_AT = 6


class _Columns(NamedTuple):
    """The requests that run on a node: when each was handed out, how many tokens it had before, and how many of these
    tools wrote."""

    samples: list[str]
    since: np.ndarray
    before: np.ndarray
    masked: np.ndarray


class Router:
    """One instance per node: the engines of its devices together. The agent spreads requests over them.

    lengths: of the answers that have finished; whoever hears of them keeps it up to date. figures_gap_s: reports of a
    worker that are further apart say nothing of its speed.
    """

    def __init__(self, config: Config, lengths: Lengths, figures_gap_s: float = math.inf):
        self._devices = config.cluster.devices_per_node
        self._max_running = config.rollout.max_running * self._devices
        self._max_queued = config.rollout.max_queued * self._devices
        self._lengths, self._speeds = lengths, Speeds(figures_gap_s)
        self._alike = config.policy.equal_nodes  # a node is then taken for as fast as the mean
        self._equal, self._equal_until = True, -math.inf  # whether all nodes are equally fast, and when to look again
        self._prompt_tokens, self._finished = float(config.algorithm.max_prompt_tokens), 0
        self._kv_tokens: dict[str, dict[str, int]] = defaultdict(dict)  # node -> worker -> tokens its KV memory holds
        self._kv_of: dict[str, float] = {}  # node -> tokens that its memory may be given, where its workers all say
        # running sample -> (when it was handed out, its tokens then, those of them that tools wrote)
        self._begun: dict[str, tuple[float, int, int]] = {}
        self._tokens: dict[str, int] = {}  # sample that was given back -> its tokens
        self._masked: dict[str, int] = {}  # and those of these that tools wrote
        # Nodes with places, of which nodes, and when to look at all of them again.
        self._free: dict[str, int] = {}
        self._looked_at: tuple[list[str], Ledger | None] = [], None
        self._known: set[str] = set()
        self._look_again = -math.inf
        self._taken: dict[str, tuple[float, int, float]] = {}  # node -> memory, for so many requests, at that time
        self._columns: dict[str, _Columns] = {}  # node -> of what runs there
        self.move_s = FIRST_MOVE_S
        self._estimate([])

    # --- what is learned

    def figures(
        self, node: str, now: float, *, worker: str, tokens: int, running: int, kv_total_tokens: int,
        prefill_tokens: int = 0, made_s: float | None = None, **_: Any
    ) -> None:  # fmt: skip
        """A worker's report of its load; kv_total_tokens 0: it does not say; made_s: seconds on the worker's clock."""
        self._speeds.note(worker, now, tokens, running, prefill_tokens, made_s)
        workers = self._kv_tokens[node]
        if workers.get(worker) != kv_total_tokens:
            workers[worker] = kv_total_tokens
            complete = len(workers) >= self._devices and all(workers.values())
            # What is queued takes no memory yet.
            held = 1.0 + self._max_queued / self._max_running
            self._kv_of[node] = sum(workers.values()) * held if complete else math.inf

    def finished(self, sample: str, prompt_tokens: int) -> None:
        self._finished += 1
        if self._finished == 1:
            self._prompt_tokens = 0.0
        self._prompt_tokens += (prompt_tokens - self._prompt_tokens) / self._finished
        self._begun.pop(sample, None)
        self._tokens.pop(sample, None)
        self._masked.pop(sample, None)

    def given_back(self, sample: str, tokens: int, masked_tokens: int = 0) -> None:
        self._tokens[sample], self._masked[sample] = tokens, masked_tokens

    def moved(self, seconds: float) -> None:
        """A request was got out of one instance, which is half of a move."""
        self.move_s += NEWEST * (2 * seconds - self.move_s)

    # --- what is decided

    def place(self, ledger: Ledger, nodes: list[str], now: float) -> dict[str, list[str]]:
        """Node -> waiting samples that it should get now. The caller hands them out."""
        free = self._places(ledger, nodes, now) if ledger.num_waiting else {}
        if not free:
            return {}
        self._refresh(ledger, nodes, now)
        samples = ledger.waiting(sum(free.values()))
        equal = self._equally_fast(nodes, now)
        if equal and len(samples) < sum(ledger.num_running_on(node) for node in free):
            assigned = self._fill_up(ledger, free, samples, now)
        else:  # of equal nodes the full ones need not be looked at
            waiting = [self._waiting(ledger, sample) for sample in samples]
            backlog = (ledger.num_waiting - len(waiting)) * self._remaining_at.item(0)
            seen = [self._instance(ledger, node, now) for node in (free if equal else nodes)]
            assigned = route(waiting, seen, backlog).assigned
        for node, samples in assigned.items():
            self.handed_out(node, samples, now)
        return assigned

    def _places(self, ledger: Ledger, nodes: list[str], now: float) -> dict[str, int]:
        """Node -> how many more requests it may take, where that is any; in number and, about, in memory. What has been
        found stays, but for nodes where something has ended since."""
        most, need = self._max_running + self._max_queued, self._prompt_tokens + self._remaining_at.item(0)
        if nodes is self._looked_at[0] and ledger is self._looked_at[1] and now < self._look_again:
            looked_at = [node for node in ledger.freed if node in self._known]
        else:
            looked_at, self._looked_at, self._look_again = nodes, (nodes, ledger), now + MEMORY_S
            self._known, self._free = set(nodes), {}
        ledger.freed.clear()
        for node in looked_at:
            running = ledger.num_running_on(node)
            if (free := most - running) > 0 and running and math.isfinite(memory := self._kv_of.get(node, math.inf)):
                # One at a time may be shorter than the mean.
                free = min(free, math.ceil((memory - self._kv_taken(ledger, node, now)) / need))
            if free > 0:
                self._free[node] = free
            else:
                self._free.pop(node, None)
        return self._free

    def _kv_taken(self, ledger: Ledger, node: str, now: float) -> float:
        """Tokens that what runs on a node will have taken of its memory, each at its end."""
        running = ledger.num_running_on(node)
        taken, of, at = self._taken.get(node, (0.0, 0, -math.inf))
        if not of or now - at >= MEMORY_S or not of / 2 <= running <= of:
            tokens, _, remaining = self._progress(ledger, node, now)
            taken, of = float(tokens.sum() + remaining.sum()) + self._prompt_tokens * running, running
            self._taken[node] = taken, of, now
        return taken * running / of

    def _fill_up(
        self, ledger: Ledger, free: dict[str, int], samples: list[str], now: float
    ) -> dict[str, list[str]]:
        """As `route`, for fewer requests than run there already: each in its turn, where its tokens are or else where
        the fewest tokens are to come, as far as memory goes."""
        if len(free) > 2 * LOOKED_AT + len(samples):  # of many nodes those with the fewest requests
            fewest = heapq.nsmallest(LOOKED_AT + len(samples), free, key=ledger.num_running_on)
            homes = [home for home in map(ledger.partial.get, samples) if home in free]
            free = {node: free[node] for node in (*fewest, *homes)}
        taken = {node: self._kv_taken(ledger, node, now) if ledger.num_running_on(node) else 0.0 for node in free}
        left, order = dict(free), list(free)
        heap = [(taken[node], number) for number, node in enumerate(order)]
        heapq.heapify(heap)
        assigned: dict[str, list[str]] = defaultdict(list)
        for request in (self._waiting(ledger, sample) for sample in samples):
            while heap and (not left[order[heap[0][1]]] or heap[0][0] != taken[order[heap[0][1]]]):
                _, number = heapq.heappop(heap)  # full, or it has got more meanwhile
                if left[order[number]]:
                    heapq.heappush(heap, (taken[order[number]], number))
            if not heap:
                break
            need, emptiest = request.kv_tokens, order[heap[0][1]]
            able = [
                node
                for node in (request.home, emptiest)
                if left.get(node) and (not taken[node] or taken[node] + need <= self._kv_of.get(node, math.inf))
            ]
            if not able:  # nor would those behind it be sent: it is not to be passed over for ever
                break
            assigned[able[0]].append(request.sample)
            taken[able[0]] += need
            left[able[0]] -= 1
        return dict(assigned)

    def _equally_fast(self, nodes: list[str], now: float) -> bool:
        if now >= self._equal_until:
            steps = [sum(self._speed(node)) for node in nodes]
            self._equal, self._equal_until = max(steps) < EQUAL * min(steps), now + SPEEDS_S
        return self._equal

    def handed_out(self, node: str, samples: Sequence[str], now: float) -> None:
        self._free[node] = self._free.get(node, 0) - len(samples)
        if self._free[node] <= 0:
            del self._free[node]
        for sample in samples:
            self._begun[sample] = now, self._tokens.get(sample, 0), self._masked.get(sample, 0)

    def moves(self, ledger: Ledger, nodes: list[str], now: float) -> list[Move]:
        """Running requests that should change nodes. None as long as speeds are unknown: gain and cost are seconds."""
        if len(nodes) < 2 or not self._speeds.known():
            return []
        self._refresh(ledger, nodes, now)
        if len(nodes) > 3 * LOOKED_AT:
            nodes = self._worth_a_look(ledger, nodes, now)
        if not may_move([self._outline(ledger, node, now) for node in nodes], self.move_s):
            return []
        return rebalance([self._instance(ledger, node, now) for node in nodes], move_s=self.move_s)

    def _worth_a_look(self, ledger: Ledger, nodes: list[str], now: float) -> list[str]:
        ends, steps = [], []
        for node in nodes:
            (_, _, remaining), (fixed_s, each_s) = self._progress(ledger, node, now), self._speed(node)
            total = float(remaining.sum())
            longest = max(float(remaining.max(initial=0.0)), total / self._max_running)
            ends.append(fixed_s * longest + each_s * total)
            steps.append(fixed_s + each_s * (len(remaining) + 1))
        by_end, by_step = np.argsort(ends, kind="stable"), np.argsort(steps, kind="stable")
        found = {*by_end[:LOOKED_AT].tolist(), *by_end[-LOOKED_AT:].tolist(), *by_step[:LOOKED_AT].tolist()}
        return [nodes[index] for index in sorted(found)]

    # --- what is estimated

    def _refresh(self, ledger: Ledger, nodes: list[str], now: float) -> None:
        """Another estimate of lengths, if enough has finished since the last one to matter."""
        if self._finished > self._estimated_of * (1.0 + FRESH_SHARE):
            running = [self._progress(ledger, node, now)[1] for node in nodes]
            self._estimate(np.concatenate(running) if running else [])

    def _estimate(self, running: Sequence[int] | np.ndarray) -> None:
        """How many tokens of an answer are still to be sampled, by those that were."""
        survival = self._lengths.survival(running)
        self._estimated_of = self._finished
        self._remaining_at = np.maximum(survival.expected_remaining(np.arange(self._lengths.max_tokens)), 1.0)

    def _progress(self, ledger: Ledger, node: str, now: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens so far, those of them that were sampled, and those still expected, of each request that runs on a node.
        """
        samples, since, before, masked = self._columns_of(ledger, node, now)
        step_s = self._step_s(node, len(samples))
        tokens = np.minimum(before + (now - since) / step_s, self._lengths.max_tokens - 1)
        sampled = tokens.astype(int) - masked
        return tokens, sampled, self._expected(samples, tokens, sampled)

    def _columns_of(self, ledger: Ledger, node: str, now: float) -> _Columns:
        samples = ledger.running_on(node)
        found = self._columns.get(node)
        if found is None or found.samples is not samples:
            begun, unknown = self._begun, (now, 0, 0)
            rows = [begun.get(sample, unknown) for sample in samples]
            columns = np.fromiter(itertools.chain.from_iterable(rows), float, 3 * len(rows)).reshape(-1, 3).T
            found = self._columns[node] = _Columns(samples, *columns[:2].copy(), columns[2].astype(int))
        return found

    def _expected(self, samples: list[str], tokens: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """Tokens still expected of requests that have so many, of which some were sampled."""
        return self._remaining_at[sampled]

    def _step_s(self, node: str, running: int) -> float:
        """Seconds in which each of so many requests on a node gets a token; infinite while speeds are unknown."""
        if not self._speeds.known():
            return math.inf
        fixed_s, each_s = self._speed(node)
        # Beyond max_running they take turns, so each gets on more slowly.
        batch, turns = min(running, self._max_running), max(1.0, running / self._max_running)
        return (fixed_s + each_s * batch) * turns

    def _instance(self, ledger: Ledger, node: str, now: float) -> Instance:
        fixed_s, each_s = self._speed(node)
        samples, (tokens, _, remaining) = ledger.running_on(node), self._progress(ledger, node, now)
        running = [
            Request(sample, wire.group_of(sample), prefix, rest, node, "preferred")
            for sample, prefix, rest in zip(samples, (self._prompt_tokens + tokens).tolist(), remaining.tolist())
        ]
        # To prefill a token takes at most as long as to decode it with others.
        return Instance(node, self._max_running, running, fixed_s, each_s, prefill_s=each_s,
                        kv_tokens=self._kv_of.get(node, math.inf), max_queued=self._max_queued)

    def _outline(self, ledger: Ledger, node: str, now: float) -> Outline:
        (tokens, _, remaining), (fixed_s, each_s) = self._progress(ledger, node, now), self._speed(node)
        longest, least = float(remaining.max(initial=0.0)), float(tokens.min(initial=np.inf))
        return Outline(len(tokens), longest, self._prompt_tokens + least, fixed_s, each_s, prefill_s=each_s)

    def _speed(self, node: str) -> tuple[float, float]:
        """(fixed_s, per_request_s) of a node: its engines share its requests."""
        workers = () if self._alike else self._kv_tokens.get(node, ())
        speeds = [self._speeds.of(worker) for worker in workers] or [self._speeds.of(node)]
        fixed_s, each_s = (sum(part) / len(speeds) for part in zip(*speeds))
        return fixed_s, each_s / self._devices

    def _request(self, sample: str, tokens: float, home: str | None) -> Request:
        tokens = min(tokens, self._lengths.max_tokens - 1)
        prefix, remaining = self._prompt_tokens + tokens, self._expected_of(sample, tokens)
        return Request(sample, wire.group_of(sample), prefix, remaining, home, "preferred" if home else "none")

    def _waiting(self, ledger: Ledger, sample: str) -> Request:
        return self._request(sample, self._tokens.get(sample, 0), ledger.partial.get(sample))

    def _expected_of(self, sample: str, tokens: float) -> float:
        return self._remaining_at.item(int(tokens) - self._masked.get(sample, 0))
