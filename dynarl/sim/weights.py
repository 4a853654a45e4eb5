"""New weights on their way to the simulated nodes; stands for `controller.staging`."""

from __future__ import annotations

import asyncio

from dynarl.controller.epochs import Weights
from dynarl.controller.rounds import Rounds
from dynarl.sim.fleet import SimFleet


class SimStaging:
    """`versions`: the newest on each node; `lock`: held while they come and go, as in `controller.staging.Staging`."""

    def __init__(self, rounds: Rounds, fleet: SimFleet):
        self._rounds, self._fleet = rounds, fleet
        self.lock = asyncio.Lock()
        self.versions = dict.fromkeys(rounds.home, 0)

    async def everywhere(self) -> None:
        """The trainer's weights, as the next version, to all nodes."""
        await self._rounds.workers.settled()
        await self._stage(list(self._rounds.home))

    async def refresh_trainers(self, nodes: list[str], keep: int | None = None) -> None:
        """New weights for the trainers on `nodes` alone."""
        rounds = self._rounds
        await rounds.workers.settled()
        await self._stage([n for n in rounds.home if n in nodes or n in rounds.trainer.owner_nodes])
        await rounds.fleet.call_each(nodes, "refresh", version=rounds.weights.version)

    async def _stage(self, nodes: list[str]) -> None:
        rounds, fleet = self._rounds, self._fleet
        async with self.lock, rounds.epochs.weights_in_transit():
            version = rounds.weights.version + 1
            rounds.journal.append("weights_staging", version=version)
            places = [(node, 0) for node in nodes]
            await fleet.loop.pause(fleet.network_ns("broadcast", places, fleet.world.weight_bytes))
            rounds.weights = Weights(version, "simulated")
            self.versions |= dict.fromkeys(nodes, version)
            rounds.journal.append("weights_staged", version=version, nodes=nodes)
            await fleet.call_each(rounds.trainer.owner_nodes, "loaded", role="training", version=version)
