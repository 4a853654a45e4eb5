"""Routing of one job's requests: what the ledger and the workers' reports say, in the terms of `dataflow.routing`.

It outlives iterations, because what it has learned of lengths and speeds does. Times are seconds of the caller's clock.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from dynarl import wire
from dynarl.config.schema import Config
from dynarl.dataflow.ledger import Ledger
from dynarl.dataflow.routing import Instance, Move, Request, rebalance, route
from dynarl.dataflow.speeds import Speeds
from dynarl.scheduler.survival import Lengths

# What it takes to move a request, before one has been moved; weight of the newest measurement after that.
FIRST_MOVE_S, NEWEST = 0.1, 0.25


class Router:
    """One instance per node: the engines of its devices together. The agent spreads requests over them.

    lengths: of the answers that have finished; whoever hears of them keeps it up to date.
    """

    def __init__(self, config: Config, lengths: Lengths):
        self._devices = config.cluster.devices_per_node
        self._max_running = config.rollout.max_running * self._devices
        self._max_queued = config.rollout.max_queued * self._devices
        self._lengths, self._speeds = lengths, Speeds()
        self._running: list[int] = []  # tokens of the running requests, at the last look
        self._prompt_tokens, self._finished = float(config.algorithm.max_prompt_tokens), 0
        self._estimate([])
        self._kv_tokens: dict[str, dict[str, int]] = defaultdict(dict)  # node -> worker -> tokens its KV memory holds
        self._begun: dict[str, tuple[float, float]] = {}  # running sample -> (when it was handed out, its tokens then)
        self._tokens: dict[str, int] = {}  # sample that was given back -> its tokens
        self._masked: dict[str, int] = {}  # and those of them that tools wrote
        self.move_s = FIRST_MOVE_S

    # --- what is learned

    def figures(
        self, node: str, now: float, *, worker: str, tokens: int, running: int, kv_total_tokens: int, **_: Any
    ) -> None:
        """A worker's report of its load; kv_total_tokens 0: it does not say."""
        self._speeds.note(worker, now, tokens, running)
        self._kv_tokens[node][worker] = kv_total_tokens

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
        running = Counter(ledger.running.values())
        most = self._max_running + self._max_queued
        free = {node: most - running[node] for node in nodes if running[node] < most}
        # Of equal nodes only these are looked at: mostly one answer has finished, and all nodes but one are full.
        seen = nodes if free and len({self._speed(node) for node in nodes}) > 1 else list(free)
        waiting = [self._request(sample, self._tokens.get(sample, 0), ledger.partial.get(sample))
                   for sample in ledger.waiting(sum(free.values()))]
        backlog = (ledger.num_waiting - len(waiting)) * self._remaining[0]
        assigned = route(waiting, self._instances(ledger, seen, now), backlog).assigned if waiting else {}
        for samples in assigned.values():
            self.handed_out(samples, now)
        return assigned

    def handed_out(self, samples: Iterable[str], now: float) -> None:
        for sample in samples:
            self._begun[sample] = now, self._tokens.get(sample, 0)

    def moves(self, ledger: Ledger, nodes: list[str], now: float) -> list[Move]:
        """Running requests that should change nodes. None as long as speeds are unknown: gain and cost are seconds."""
        if len(nodes) < 2 or not self._speeds.known():
            return []
        return rebalance(self._instances(ledger, nodes, now), move_s=self.move_s)

    def _instances(self, ledger: Ledger, nodes: list[str], now: float) -> list[Instance]:
        if self._finished * 16 > self._estimated_of * 17:  # enough has finished since to matter
            self._estimate(self._running)
        running: dict[str, list[str]] = {node: [] for node in nodes}
        for sample, node in ledger.running.items():
            if node in running:
                running[node].append(sample)
        instances = [self._instance(node, samples, now) for node, samples in running.items()]
        self._running = [
            int(request.prefix - self._prompt_tokens) - self._masked.get(request.sample, 0)
            for each in instances for request in each.running
        ]
        return instances

    def _instance(self, node: str, samples: list[str], now: float) -> Instance:
        workers = self._kv_tokens.get(node, {})
        fixed_s, each_s = self._speed(node)
        # Beyond max_running they take turns, so each gets on more slowly.
        batch, turns = min(len(samples), self._max_running), max(1.0, len(samples) / self._max_running)
        step_s = (fixed_s + each_s * batch) * turns if self._speeds.known() else math.inf
        begun = [(sample, *self._begun.get(sample, (now, 0.0))) for sample in samples]
        running = [self._request(sample, tokens + (now - since) / step_s, node) for sample, since, tokens in begun]
        complete = len(workers) == self._devices and all(workers.values())
        # What is queued takes no memory yet. To prefill a token takes at most as long as to decode it with others.
        held = 1.0 + self._max_queued / self._max_running
        return Instance(node, self._max_running, running, fixed_s, each_s, prefill_s=each_s,
                        kv_tokens=sum(workers.values()) * held if complete else math.inf, max_queued=self._max_queued)

    def _speed(self, node: str) -> tuple[float, float]:
        """(fixed_s, per_request_s) of a node: its engines share its requests."""
        speeds = [self._speeds.of(worker) for worker in self._kv_tokens.get(node, ())] or [self._speeds.of(node)]
        fixed_s, each_s = (sum(part) / len(speeds) for part in zip(*speeds))
        return fixed_s, each_s / self._devices

    def _request(self, sample: str, tokens: float, home: str | None) -> Request:
        tokens = min(tokens, self._lengths.max_tokens - 1)
        prefix = self._prompt_tokens + tokens
        sampled = int(tokens) - self._masked.get(sample, 0)
        remaining = max(1.0, self._remaining[sampled])
        return Request(sample, wire.group_of(sample), prefix, remaining, home, "preferred" if home else "none")

    def _estimate(self, running: list[int]) -> None:
        """Tokens still expected of an answer, by those that it has; running: those of the unfinished ones."""
        survival = self._lengths.survival(running)
        # For all numbers at once: it is asked for every running request, again and again.
        self._remaining: list[float] = survival.expected_remaining(range(survival.max_tokens + 1)).tolist()
        self._estimated_of = self._finished
