"""Model state on its way from one layout to another: the same phases on every node; nothing new counts before the last.

    prepare   every rank plans its part; all must have made the same plan     kept, so that weights are planned once
    reserve   memory for the new state
    run       in rounds, over MPI between the nodes; the old state is whole
    verify    digests: what arrived is what was sent
    finish    the new state counts                                            or abort: as if nothing had been
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynarl.controller.fleet import Fleet
from dynarl.transport.planning import Request
from dynarl.wire import CallError

log = logging.getLogger(__name__)

PLAN_TIMEOUT_S = 120.0
# Beyond the time for the phase itself: for the way there and back.
GRACE_S = 15.0


@dataclass
class Moved:
    """A transition that has arrived and been verified. Phases in milliseconds; num_bytes: between nodes."""

    key: str
    phases: dict[str, float]
    num_bytes: int
    digests: dict[str, dict[str, Any]] = field(default_factory=dict)  # by node


class Transitions:
    """`nodes`: all nodes of the step, in the order of the requests' places."""

    def __init__(self, fleet: Fleet, nodes: list[str], first_number: int = 0):
        self._fleet, self._nodes = fleet, nodes
        self._numbers = itertools.count(first_number + 1)
        self._turn = asyncio.Lock()

    @property
    def _ranks(self) -> list[int]:
        return [self._fleet.agents[node].rank for node in self._nodes]

    async def _ask(self, method: str, timeout_s: float, **args: Any) -> dict[str, Any]:
        return await self._fleet.call_each(
            self._nodes, f"{method}_transition", timeout_s=timeout_s + GRACE_S, limit_s=timeout_s, **args
        )

    async def carry_out(self, request: Request, timeout_s: float = 300.0, version: int | None = None) -> Moved:
        """Prepare, reserve, run, verify. `finish` or `abort` has to follow. version: of the staged weights, where they
        are the destination. Raises CallError or TimeoutError; then everything new has been dropped."""
        async with self._turn:
            phases: dict[str, float] = {}
            clock = asyncio.get_running_loop().time
            last = clock()

            def lap(name: str) -> None:
                nonlocal last
                now = clock()
                phases[name], last = round(1e3 * (now - last), 2), now

            try:
                plans = await self._plan(request)
                lap("plan_ms")
                if not all(plan["cached"] for plan in plans.values()):
                    await self._ask("reserve", PLAN_TIMEOUT_S, key=request.key, version=version)
                    lap("reserve_ms")
                answers = await self._run(request.key, timeout_s, version)
                lap("run_ms")
            except BaseException as error:  # also when this is cancelled: a node that is told nothing would wait on
                await asyncio.shield(self.abort(request.key, str(error) or type(error).__name__))
                raise
            return Moved(
                request.key,
                phases,
                sum(plan["bytes_sent"] for plan in plans.values()),
                {node: answer["digests"] for node, answer in answers.items()},
            )

    async def _run(self, key: str, timeout_s: float, version: int | None) -> dict[str, Any]:
        """Run on all nodes. At the first error the others are told: their peers will not come."""
        arguments = dict(key=key, number=next(self._numbers), nodes=self._ranks, version=version, limit_s=timeout_s)
        tasks = {
            node: asyncio.ensure_future(
                self._fleet.call(node, "run_transition", timeout_s=timeout_s + GRACE_S, **arguments)
            )
            for node in self._nodes
        }
        try:
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
            failed = [task for task in tasks.values() if task.done() and task.exception() is not None]
            if failed:
                await self.abort(key, str(failed[0].exception()))
                await asyncio.wait(tasks.values(), timeout=GRACE_S)
                raise failed[0].exception()
            return {node: task.result() for node, task in tasks.items()}
        finally:
            for task in tasks.values():
                task.cancel()

    async def plan(self, request: Request) -> None:
        """Only plan, ahead of time; what is planned is kept. Raises CallError or TimeoutError."""
        async with self._turn:
            await self._plan(request)

    async def _plan(self, request: Request) -> dict[str, dict[str, Any]]:
        plans = await self._ask("prepare", PLAN_TIMEOUT_S, request=msgspec.to_builtins(request), nodes=self._ranks)
        digests = {node: plan["digest"] for node, plan in plans.items() if plan["digest"]}
        if len(set(digests.values())) > 1:
            raise CallError(f"nodes made different plans of a transition: {digests}")
        return plans

    async def staged_digests(self, moved: Moved) -> dict[str, dict[str, int]]:
        """Positional digests of what was staged, by node."""
        answers = await self._ask("verify", PLAN_TIMEOUT_S, key=moved.key)
        return {node: answer for node, answer in answers.items() if answer is not None}

    async def finish(self, moved: Moved, **staging: Any) -> None:
        """What arrived counts from here on."""
        await self._ask("finish", PLAN_TIMEOUT_S, key=moved.key, **staging)

    async def abort(self, key: str, reason: str) -> None:
        """Drop what is new on every node that still answers."""
        log.warning("transition %s is given up: %s", key, reason)
        await asyncio.gather(
            *(
                self._fleet.call(
                    node,
                    "abort_transition",
                    timeout_s=GRACE_S,
                    key=key,
                    reason=reason,
                    nodes=self._ranks,
                    limit_s=GRACE_S,
                )
                for node in self._nodes
            ),
            return_exceptions=True,
        )


def compare_state(digests: dict[str, dict[str, dict[str, dict[str, int]]]]) -> list[str]:
    """Kinds whose digests at the source and at the destination, summed over all workers, differ; and those whose copies
    do. digests: {node: {worker: {"source" or "target": {kind: number}}}}.

    >>> compare_state({"n1": {"w": {"source": {"param": 5, "param/replicas": 0}, "target": {"param": 2}}}})
    ['param']
    """
    sums: dict[str, dict[str, int]] = {"source": {}, "target": {}}
    for worker in (worker for node in digests.values() for worker in node.values()):
        for side, total in sums.items():
            for kind, value in worker.get(side, {}).items():
                total[kind] = (total.get(kind, 0) + value) % 2**64
    kinds = sorted({*sums["source"], *sums["target"]})
    copies = [kind for kind in kinds if kind.endswith("/replicas")]
    differing = [kind for kind in kinds if kind not in copies and sums["source"].get(kind) != sums["target"].get(kind)]
    return differing + [kind for kind in copies if any(total.get(kind) for total in sums.values())]
