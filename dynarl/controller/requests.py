"""The requests of one iteration on their way to rollout nodes, back, and from one to another."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Awaitable, Callable

from dynarl import wire
from dynarl.config.schema import Config
from dynarl.controller.fleet import Fleet
from dynarl.controller.router import Router
from dynarl.dataflow.ledger import Ledger

log = logging.getLogger(__name__)

# Between two looks at whether running requests should change nodes: a move is judged by what came of the last ones. And
# looking takes at most this share of the controller's time.
REBALANCE_S, REBALANCE_SHARE = 1.0, 0.01


class Requests:
    """The router decides who gets which; the ledger says who has it. `lives`: rollout workers that each node has lost;
    num_moved: requests that went from one rollout node to another while neither changed its role.

    at_work: nodes that take work of a role now; spawn: run a hand-out in the background; what undoes it if it fails;
    stopwatch: seconds that this process has worked.
    """

    def __init__(self, config: Config, fleet: Fleet, ledger: Ledger, router: Router, split: str, temperature: float,
                 at_work: Callable[[str], list[str]], spawn: Callable[[Awaitable[Any], Callable[[], None]], None],
                 stopwatch: Callable[[], float]):
        self._config, self._fleet, self._ledger, self.router = config, fleet, ledger, router
        self._split, self._temperature = split, temperature
        self._at_work, self._spawn, self._stopwatch = at_work, spawn, stopwatch
        self.lives: Counter[str] = Counter()
        self.num_moved = 0
        self._relocating: set[str] = set()  # nodes that are asked to give up some of their requests
        self._asked: Counter[str] = Counter()  # questions to each node, which requests it gives up, without an answer
        self._late: dict[str, list[tuple[list[str], list[str]]]] = defaultdict(list)  # deaths meanwhile: (lost, held)
        self.rebalance_at = 0.0

    def hand_out(self, *, rebalance: bool) -> None:
        """Give waiting requests to nodes; when none waits, and if `rebalance`, move running ones between them."""
        now = asyncio.get_running_loop().time()
        if self._ledger.num_waiting:
            for node, samples in self.router.place(self._ledger, self._at_work("rollout"), now).items():
                self._send(node, samples)
        elif rebalance and now >= self.rebalance_at:
            began = self._stopwatch()
            self._rebalance(self._at_work("rollout"), now)
            self.rebalance_at = now + max(REBALANCE_S, (self._stopwatch() - began) / REBALANCE_SHARE)

    def _send(self, node: str, samples: list[str]) -> None:
        handed, lives = self._ledger.dispatch(node, samples), self.lives[node]
        self._spawn(self._generate(node, handed, lives), lambda: self.failed(node, handed, lives))

    async def _generate(self, node: str, handed: list[tuple[str, str | None]], lives: int) -> None:
        holders = {holder for _, holder in handed if holder}
        try:
            await self._fleet.call(
                node,
                "generate",
                requests=[{"sample": s, "holder": h} for s, h in handed],
                split=self._split,
                temperature=self._temperature,
                seed=self._config.run.seed,
                max_response_tokens=self._config.algorithm.max_response_tokens,
                order=self._config.rollout.order,
                holders={h: self._fleet.agents[h].peer_address for h in holders},
            )
        except (wire.CallError, TimeoutError):
            if lives == self.lives[node]:
                self._ledger.unreached(node, (sample for sample, _ in handed))
            raise

    def failed(self, node: str, handed: list[tuple[str, str | None]], lives: int) -> None:
        """A hand-out did not reach `node`, which had lost `lives` workers when it began."""
        # When the worker has died since, they were offered again then, and may be running there a second time.
        for sample, holder in handed if lives == self.lives[node] else ():
            self._ledger.returned(sample, node, holder=holder)

    def returned(self, node: str, partial: dict) -> bool:
        """`node` gave up this request ({sample, tokens, masked_tokens}) and keeps its tokens. False: it did not have it."""
        if not self._ledger.returned(partial["sample"], node, holder=node if partial["tokens"] else None):
            return False
        self.router.given_back(**partial)
        return True

    # --- workers that die

    def worker_lost(self, node: str, held: Iterable[str]) -> None:
        """A rollout worker of `node` died: what it had is offered again. held: requests whose answer so far is recorded
        there.

        A node that has just been asked to give up requests answers that first: what it has handed back it no longer
        counts as held, and without that answer a tool call that it has made would be made again elsewhere.
        """
        self.lives[node] += 1
        self._late[node].append((self._ledger.running_on(node), list(held)))
        self._settle(node)

    @contextmanager
    def asking(self, nodes: Iterable[str]) -> Iterator[None]:
        """Around the question to these nodes, which requests they give up."""
        nodes = list(nodes)
        self._asked.update(nodes)
        try:
            yield
        finally:
            self._asked.subtract(nodes)
            for node in nodes:
                self._settle(node)

    def _settle(self, node: str) -> None:
        for lost, held in self._late.pop(node, []) if not self._asked[node] else ():
            self._ledger.worker_lost(node, "rollout", held, among=lost)

    # --- from one rollout node to another

    def _rebalance(self, nodes: list[str], now: float) -> None:
        targets: dict[str, dict[str, str]] = defaultdict(dict)  # source -> sample -> target
        for move in self.router.moves(self._ledger, nodes, now):
            if move.source not in self._relocating:
                targets[move.source][move.sample] = move.target
        for source, wanted in targets.items():
            self._relocating.add(source)
            self._spawn(self._relocate(source, wanted), lambda: None)

    async def _relocate(self, source: str, targets: dict[str, str]) -> None:
        """Move requests ({sample: target}) that are not finished by now, each with its tokens so far."""
        clock = asyncio.get_running_loop().time
        began = clock()
        with self.asking([source]):
            try:
                given_up = await self._fleet.call(source, "abort", samples=list(targets))
            finally:
                self._relocating.discard(source)
            self.router.moved(clock() - began)
            log.debug("%s gave up %d of %d requests for other nodes", source, len(given_up), len(targets))
            for partial in given_up:
                sample, target = partial["sample"], targets[partial["sample"]]
                if self.returned(source, partial) and target in self._at_work("rollout"):
                    self.router.handed_out(target, [sample], clock())
                    self._send(target, [sample])
                    self.num_moved += 1
        # Now: no event says that some wait whose target has left, or whose worker has died meanwhile.
        self.hand_out(rebalance=False)
