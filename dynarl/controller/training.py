"""The trainer as a whole: owners that hold the optimizer, borrowed workers that lend their gradients, one step for all.

Owners (home role training) form one torch world with Megatron's groups; every other training worker is a replica of its
own (tensor parallel inside the node) and joins only the standalone reduction group. At a step each borrowed gradient
buffer is summed into an owner's of the same tensor rank, along a tree; then the owners reduce among themselves, clip
and step.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import msgspec

from dynarl.config.schema import Config
from dynarl.controller.epochs import Weights
from dynarl.controller.fleet import Fleet
from dynarl.controller.replicas import Place, Replica, inside_nodes

BUILD_TIMEOUT_S = 600.0
STEP_TIMEOUT_S = 600.0


class Trainer:
    """All training workers. `places` of a node are its devices in order; owners come first in the reduction world."""

    def __init__(self, config: Config, fleet: Fleet, home: dict[str, str], may: dict[str, frozenset[str]]):
        self._config, self._fleet = config, fleet
        devices = range(config.cluster.devices_per_node)
        self._width = config.training.tp  # workers of a replica
        self.owner_nodes = [n for n in home if home[n] == "training"]
        self.borrowed_nodes = [n for n in home if home[n] != "training" and "training" in may[n]]
        self.owners: list[Place] = [(n, d) for n in self.owner_nodes for d in devices]
        self.borrowed: list[Place] = [(n, d) for n in self.borrowed_nodes for d in devices]
        cuts = range(0, len(self.owners), self._width)
        owners = [Replica(tuple(self.owners[i : i + self._width])) for i in cuts]
        self.num_owner_replicas = len(owners)
        self.replicas = owners + inside_nodes(self.borrowed_nodes, config.cluster.devices_per_node, self._width)
        self._generation = itertools.count(1)
        self._joined: list[Place] = []
        self._store = ""

    @property
    def everyone(self) -> list[Place]:
        return self.owners + self.borrowed

    @property
    def borrowed_replicas(self) -> list[Replica]:
        return self.replicas[self.num_owner_replicas :]

    @property
    def leader(self) -> Place:
        return self.owners[0]

    async def _on(self, place: Place, method: str, timeout_s: float = STEP_TIMEOUT_S, **args: Any) -> Any:
        return await self._fleet.worker(place[0], "training", place[1], method, timeout_s=timeout_s, **args)

    async def build(self, version: int) -> None:
        """Build owners and borrowed replicas from the staged weights of `version`, and the reduction group over all."""
        self._store = await self._on(self.leader, "serve_store", host=self._host(self.leader[0]))
        world = f"owners-{next(self._generation)}"
        await asyncio.gather(
            *(self._build(place, self._store, world, rank, len(self.owners), True, version)
              for rank, place in enumerate(self.owners)),
            *(self.build_node(node, version) for node in self.borrowed_nodes))
        await self.join()

    async def build_node(self, node: str, version: int) -> None:
        """Build the borrowed replicas of one node; they take part once everybody has joined again."""
        for places in (r.places for r in self.borrowed_replicas if r.nodes == (node,)):
            store = await self._on(places[0], "serve_store", host=self._host(node))
            world = f"{node}-{places[0][1]}-{next(self._generation)}"
            await asyncio.gather(
                *(self._build(p, store, world, rank, self._width, False, version) for rank, p in enumerate(places))
            )

    async def _build(
        self, place: Place, store: str, world: str, rank: int, size: int, owner: bool, version: int
    ) -> None:
        await self._on(
            place,
            "build",
            timeout_s=BUILD_TIMEOUT_S,
            config=msgspec.to_builtins(self._config),
            store=store,
            world=world,
            rank=rank,
            size=size,
            owner=owner,
            model_dir=self.staged(place[0], version),
            version=version,
        )

    def _host(self, node: str) -> str:
        return self._fleet.agents[node].host

    def staged(self, node: str, version: int) -> str:
        return str(Path(self._fleet.agents[node].staging) / f"v{version}")

    async def join(self, without: frozenset[str] = frozenset()) -> None:
        """(Re)make the reduction group over all living training workers; nodes in `without` are left out."""
        name = f"reduction-{next(self._generation)}"
        places = [p for p in self.everyone if p[0] not in without]
        await asyncio.gather(*(self._on(p, "join_reduction", store=self._store, name=name, rank=rank, size=len(places))
                               for rank, p in enumerate(places)))
        self._joined = places

    async def begin(self, step: int, loss: str, without: frozenset[str] = frozenset()) -> None:
        """Zero gradients everywhere."""
        await asyncio.gather(
            *(self._on(p, "begin", step=step, loss=loss) for p in self.everyone if p[0] not in without)
        )

    async def step(self, contributors: set[str], global_tokens: int, lr: float) -> dict[str, float]:
        """Sum the gradients of the borrowed workers on `contributors` (nodes) into the owners' and step. Returns
        {grad_norm, lr}.
        """
        trees = self.trees([r for r in self.borrowed_replicas if contributors.issuperset(r.nodes)])
        members = {rank for tree in trees for rank in tree}
        if trees:
            await asyncio.gather(*(self._on(self._joined[rank], "reduce", members=trees) for rank in sorted(members)))
        answers = await asyncio.gather(*(self._on(p, "step", global_tokens=global_tokens, lr=lr) for p in self.owners))
        return answers[0]

    def trees(self, borrowed: list[Replica]) -> list[list[int]]:
        """Who sums with whom: per owner a list of reduction ranks, itself first, then those at the same position of
        their replicas. Owners without a helper are left out."""
        trees = []
        for index, owner in enumerate(self.replicas[: self.num_owner_replicas]):
            helpers = borrowed[index :: self.num_owner_replicas]
            for position, place in enumerate(owner.places) if helpers else ():
                trees.append([self._joined.index(p) for p in (place, *(r.places[position] for r in helpers))])
        return trees

    async def export(self, version: int) -> Weights:
        """Write the owners' weights as `version` into the leader's staging."""
        answers = await asyncio.gather(
            *(
                self._on(p, "export", model_dir=self.staged(self.leader[0], version), version=version)
                for p in self.owners
            )
        )
        await asyncio.gather(
            *(self._fleet.call(n, "loaded", role="training", version=version) for n in self.owner_nodes)
        )
        return Weights(version, answers[0]["digest"], answers[0]["bytes"])

    async def save(self, directory: Path) -> None:
        await asyncio.gather(*(self._on(p, "save", dir=str(directory)) for p in self.owners))

    async def restore(self, directory: Path) -> None:
        await asyncio.gather(*(self._on(p, "restore", dir=str(directory)) for p in self.owners))
