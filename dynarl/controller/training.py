"""The trainer as a whole: owners that hold the optimizer, borrowed workers that lend their gradients, one step for all.

Every training worker has a fixed rank, whatever it is used for. Owners (home role training) form one layout. A replica
of borrowed workers is a layout of its own, of the same degrees, inside one node, and joins only the reduction group. At
a step each borrowed gradient buffer is summed, along a tree, into that of the owner at the same place of its replica;
then the owners reduce among themselves, clip and step.

Between two iterations the owners may change to another layout, on other nodes as well: what the new one needs is built
while the old one trains, the state moves by a transition, and until all have adopted it the old layout is whole.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from dynarl.config.degrees import Degrees, vocab_multiple
from dynarl.config.schema import Config
from dynarl.controller.fleet import Fleet
from dynarl.controller.nodes import all_homes, with_trainers
from dynarl.controller.replicas import Place, Replica, inside_nodes, layout_on, of_layout
from dynarl.scheduler.policy import capabilities
from dynarl.transport.messages import Places
from dynarl.transport.planning import describe
from dynarl.vps.train_layout import TrainLayout
from dynarl.wire import CallError

BUILD_TIMEOUT_S = 600.0
STEP_TIMEOUT_S = 600.0


class Trainer:
    """All training workers; owners come first in the reduction world. `home`: home roles as they follow from `layout`,
    that of the owners, and from `base_home`, those of the split."""

    def __init__(self, config: Config, fleet: Fleet, home: dict[str, str], degrees: Degrees):
        self._config, self._fleet, self.base_home = config, fleet, home
        self.nodes = list(home)
        self.places = Places(len(self.nodes), config.cluster.devices_per_node)
        # Always an owner.
        self.leader: Place = (next(node for node in home if home[node] == "training"), 0)
        self._sometimes = {n for each in all_homes(config, home) for n, role in each.items() if role == "training"}
        self._generation = itertools.count(1)
        self.joined: list[Place] = []
        self._store = ""
        self._next: TrainLayout | None = None  # that is being prepared
        self._set_layout(self.layout_of(degrees))

    def layout_of(self, degrees: Degrees) -> TrainLayout:
        """The owners in a layout of these degrees. Raises ConfigError where there are too few nodes for it."""
        home = with_trainers(self._config, self.base_home, degrees.nodes)
        ranks = [self.rank(place) for place in self._on_nodes([n for n in home if home[n] == "training"])]
        return layout_on(ranks, degrees.tp, degrees.pp, degrees.ep, vocab_multiple(self._config))

    def rebase(self, home: dict[str, str]) -> None:
        """Other home roles, that the next layout is made from; `rehome` does so where the layout stays."""
        self.base_home = home

    def rehome(self) -> None:
        self._set_layout(self.layout)

    def _set_layout(self, layout: TrainLayout) -> None:
        self.layout = layout
        self.owners = self.places_of(layout)
        self.owner_nodes = list(dict.fromkeys(node for node, _ in self.owners))
        self.home = with_trainers(self._config, self.base_home, len(self.owner_nodes))
        may = capabilities(self._config.policy, self.home)
        self.borrowed_nodes = [n for n in self.nodes if n not in self.owner_nodes and "training" in may[n]]
        owners = of_layout(layout, self.place)
        self.num_owner_replicas = len(owners)
        width = len(owners[0].places)
        self.replicas = owners + inside_nodes(self.borrowed_nodes, self._config.cluster.devices_per_node, width)
        # Nodes on which a replica does not fit lend nothing.
        self.borrowed = [place for replica in self.borrowed_replicas for place in replica.places]

    def places_of(self, layout: TrainLayout) -> list[Place]:
        """Its workers, node by node."""
        return [self.place(rank) for rank in sorted(layout.ranks)]

    def _on_nodes(self, nodes: Iterable[str]) -> list[Place]:
        return [(node, device) for node in nodes for device in range(self._config.cluster.devices_per_node)]

    def rank(self, place: Place) -> int:
        return self.places.worker_rank(self.nodes.index(place[0]), place[1])

    def place(self, rank: int) -> Place:
        return self.nodes[self.places.node_of(rank)], self.places.device_of(rank)

    @property
    def everyone(self) -> list[Place]:
        return self.owners + self.borrowed

    @property
    def borrowed_replicas(self) -> list[Replica]:
        return self.replicas[self.num_owner_replicas :]

    @property
    def spare(self) -> list[Place]:
        """Workers that do nothing now, but own a part of another layout of this run."""
        return [p for p in self._on_nodes(self.nodes) if p[0] in self._sometimes and p not in self.everyone]

    @property
    def _both(self) -> list[Place]:
        """Owners, and those of the next layout."""
        joining = self.places_of(self._next) if self._next is not None else []
        return list(dict.fromkeys([*self.owners, *joining]))

    async def _on(self, place: Place, method: str, timeout_s: float = STEP_TIMEOUT_S, **args: Any) -> Any:
        return await self._fleet.worker(place[0], "training", place[1], method, timeout_s=timeout_s, **args)

    async def _on_owners(self, method: str, timeout_s: float = STEP_TIMEOUT_S, **args: Any) -> list[Any]:
        return await self._on_each(self.owners, method, timeout_s, **args)

    async def _on_each(
        self, places: list[Place], method: str, timeout_s: float = STEP_TIMEOUT_S, **args: Any
    ) -> list[Any]:
        """The same call to all of these. Raises the first error, after all have answered."""
        answers = await asyncio.gather(
            *(self._on(place, method, timeout_s, **args) for place in places), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    async def build(self, version: int) -> None:
        """Build owners and borrowed replicas from the staged weights of `version`, and the reduction group over all."""
        self._store = await self._on(self.leader, "serve_store", host=self._fleet.agents[self.leader[0]].host)
        world, fields = f"trainers-{next(self._generation)}", _fields(self.layout)
        await asyncio.gather(
            *(self._build(place, world, fields, True, version) for place in self.owners),
            self._build_others(world, version, self.nodes),
        )
        await self.join()

    async def build_node(self, node: str, version: int) -> None:
        """Build the borrowed replicas of one node; they take part once everybody has joined again."""
        # A new name: under the old one they would find processes that are gone.
        await self._build_others(f"{node}-{next(self._generation)}", version, [node])

    async def _build_others(self, world: str, version: int, nodes: Iterable[str]) -> None:
        """Borrowed replicas on these nodes, and the worlds of spare workers there."""
        await asyncio.gather(
            *(self._build_replica(r, world, version) for r in self.borrowed_replicas if r.nodes[0] in nodes),
            *(self._on(place, "enter", timeout_s=BUILD_TIMEOUT_S, **self._common(place, world, version))
              for place in self.spare if place[0] in nodes),
        )  # fmt: skip

    async def _build_replica(self, replica: Replica, world: str, version: int) -> None:
        layout = layout_on(
            [self.rank(place) for place in replica.places],
            self.layout.tp, self.layout.pp, self.layout.ep, self.layout.vocab_divisible_by,
        )
        await asyncio.gather(*(self._build(p, world, _fields(layout), False, version) for p in replica.places))

    async def _build(self, place: Place, world: str, layout: dict[str, Any], owner: bool, version: int) -> None:
        await self._on(
            place,
            "build",
            timeout_s=BUILD_TIMEOUT_S,
            **self._common(place, world, version),
            size=len(layout["ranks"]),
            owner=owner,
            version=version,
            layout=layout,
        )

    def _common(self, place: Place, world: str, version: int) -> dict[str, Any]:
        return {
            "config": msgspec.to_builtins(self._config),
            "store": self._store,
            "world": world,
            "rank": self.rank(place),
            "model_dir": self.staged(place[0], version),
        }

    def staged(self, node: str, version: int) -> str:
        return str(Path(self._fleet.agents[node].staging) / f"v{version}")

    async def join(self, without: frozenset[str] = frozenset()) -> None:
        """(Re)make the reduction group over all living training workers; nodes in `without` are left out."""
        name = f"reduction-{next(self._generation)}"
        places = [p for p in self.everyone if p[0] not in without]
        await asyncio.gather(*(self._on(p, "join_reduction", store=self._store, name=name, rank=rank, size=len(places))
                               for rank, p in enumerate(places)))
        self.joined = places

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
            await asyncio.gather(*(self._on(self.joined[rank], "reduce", members=trees) for rank in sorted(members)))
        answers = await asyncio.gather(*(self._on(p, "step", global_tokens=global_tokens, lr=lr) for p in self.owners))
        return answers[0]

    def trees(self, borrowed: list[Replica]) -> list[list[int]]:
        """Who sums with whom: per owner a list of reduction ranks, itself first, then those at the same position of
        their replicas. Owners without a helper are left out."""
        trees, rank_of = [], {place: rank for rank, place in enumerate(self.joined)}
        for index, owner in enumerate(self.replicas[: self.num_owner_replicas]):
            helpers = borrowed[index :: self.num_owner_replicas]
            for position, place in enumerate(owner.places) if helpers else ():
                trees.append([rank_of[p] for p in (place, *(r.places[position] for r in helpers))])
        return trees

    # --- from one layout to the next

    async def prepare(self, layout: TrainLayout) -> None:
        """Owners, also those to be, begin to build the groups of `layout`, in the background. Returns at once."""
        self._next, name = layout, f"layout-{next(self._generation)}"
        source, target = _fields(self.layout), _fields(layout)
        await self._on_each(self._both, "prepare_layout", name=name, source=source, layout=target)

    async def prepared(self, timeout_s: float) -> int:
        """Wait for that, and for the empty models. Returns the most bytes that a worker will need for its new state."""
        answers = await self._on_each(self._both, "prepared", timeout_s=timeout_s + 5.0, limit_s=timeout_s)
        return max(answer["bytes"] for answer in answers)

    async def discard(self) -> None:
        """Forget the next layout; the one that trains goes on."""
        await asyncio.gather(*(self._on(place, "discard") for place in self._both), return_exceptions=True)
        self._next = None

    async def parameter_digest(self) -> int:
        """Positional digest of the parameters as the owners hold them."""
        each = await self._on_owners("digests")
        return sum(sides["source"]["param"] for sides in each) % 2**64

    async def reserve(self) -> None:
        """Take the memory of the new state; step counters and learning rate go with it."""
        await self._on_each(self._both, "reserve", scalars=_same(await self._on_owners("scalars")))

    async def transfer(self, timeout_s: float) -> int:
        """Move the state to the next layout over torch's process groups. Returns the bytes that workers received."""
        answers = await self._on_each(self._both, "transfer", timeout_s=timeout_s + 5.0, limit_s=timeout_s)
        return sum(answer["bytes_received"] for answer in answers)

    async def digests(self) -> dict[str, Any]:
        """By worker, of both layouts, for `transitions.compare_state`."""
        answers = await self._on_each(self._both, "digests")
        return {f"{node}:{device}": answer for (node, device), answer in zip(self._both, answers)}

    async def adopt(self, layout: TrainLayout, version: int, without: frozenset[str]) -> None:
        """Train in `layout` from now on. Who is not an owner in it is built anew from staged weights, to lend gradients
        in replicas that match or to be an owner later, but for nodes in `without`."""
        await self._on_each(self._both, "adopt")
        self._next = None
        self._set_layout(layout)
        await self._build_others(f"trainers-{next(self._generation)}", version, {*self.nodes} - without)
        await self.join(without)
        # What is staged is not to be loaded into them: their masters are more exact.
        await self._fleet.call_each(self.owner_nodes, "loaded", role="training", version=version)

    # --- checkpoints

    async def snapshot(self, directory: Path) -> None:
        """Owners copy their state and begin to write it below `directory`; training may go on meanwhile."""
        await self._on_owners("save", dir=str(directory))

    async def saved(self) -> None:
        """Wait until what `snapshot` began is on disk. Asked again and again, since who waits does not train."""
        pause_s = 0.01
        while not all(await self._on_owners("saved")):
            await asyncio.sleep(pause_s)
            pause_s = min(0.5, 1.5 * pause_s)

    async def restore(self, directory: Path) -> None:
        """Take the state of a checkpoint, whatever layout wrote it."""
        await self._on_owners("restore", dir=str(directory))


def _fields(layout: TrainLayout) -> dict[str, Any]:
    return {name: value for name, value in describe(layout).items() if name != "layout"}


def _same(each: list[dict[str, Any]]) -> dict[str, Any]:
    """What all owners say of {steps: {kind of optimizer: count}, lr}; not all have all kinds. Raises CallError where
    they disagree."""
    steps: dict[str, int] = {}
    for said in each:
        for kind, count in said["steps"].items():
            if steps.setdefault(kind, count) != count or said["lr"] != each[0]["lr"]:
                raise CallError(f"owners of the optimizer disagree on step counters or learning rate: {each}")
    return {"steps": steps, "lr": each[0]["lr"]}
