"""The trainer's weights on their way to the memory of the nodes, where roles read them when they become active."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dynarl.controller.epochs import Weights
from dynarl.controller.transitions import Moved
from dynarl.controller.workers import JobFailed
from dynarl.vps.layout import EngineLayout
from dynarl.vps.train_layout import TrainLayout

if TYPE_CHECKING:
    from dynarl.controller.job import Job


class Staging:
    """`versions`: the newest on each node. `lock` is held while staged weights come and go; whoever reads them outside
    an epoch holds it."""

    def __init__(self, job: Job):
        self._job = job
        self.lock = asyncio.Lock()
        self.versions: dict[str, int] = {}
        self._checked: TrainLayout | None = None  # the layout whose staged weights were compared with the trainer's

    async def load(self, source: str, version: int) -> None:
        """Stage the model of a directory on every node."""
        await self._job.fleet.call_each(self._job.home, "stage", version=version, source=source)
        self.versions = dict.fromkeys(self._job.home, version)
        self._checked = None

    async def everywhere(self) -> None:
        """The trainer's weights, as the next version, to all nodes. Former versions are dropped."""
        await self._job.workers.settled()  # they read the weights that go out of use now
        await self._stage(list(self._job.home), keep=[])

    async def refresh_trainers(self, nodes: list[str], keep: int | None = None) -> None:
        """New weights for the trainers on `nodes` alone; version `keep` stays staged beside them, for roles that still
        use it.
        """
        job = self._job
        await job.workers.settled()
        # The owners' nodes too: a replica that is built there later starts from what is staged.
        everybody = [n for n in job.home if keep is not None or n in nodes or n in job.trainer.owner_nodes]
        await self._stage(everybody, keep=[] if keep is None else [keep])
        await job.fleet.call_each(nodes, "refresh", version=job.weights.version)

    async def _stage(self, nodes: list[str], keep: list[int]) -> None:
        """To `nodes`; other versions than the new one and `keep` are dropped there."""
        async with self.lock, self._job.epochs.weights_in_transit():
            await self._stage_next(nodes, keep)

    async def _stage_next(self, nodes: list[str], keep: list[int]) -> None:
        job = self._job
        version, places = job.weights.version + 1, job.trainer.places
        staged = [places.staging_rank(job.trainer.nodes.index(node)) for node in nodes]
        request = job.transition(EngineLayout(dp=len(staged), ranks=tuple(staged)), ["param"])
        job.journal.append("weights_staging", version=version)
        moved = await job.transitions.carry_out(request, version=version)
        found = {node: moved.digests[node]["staged"] for node in nodes}
        if len(set(found.values())) != 1:
            await job.transitions.abort(moved.key, "staged weights differ")
            raise JobFailed(f"weights of version {version} differ after they were staged: {found}")
        if self._checked != job.trainer.layout:
            await self._check(moved)
        await job.transitions.finish(moved, version=version, source=str(job.model_dir), keep=[version, *keep])
        job.weights = Weights(version, found[nodes[0]])
        job.journal.append("weights_staged", version=version, nodes=nodes)
        self.versions |= dict.fromkeys(nodes, version)
        await asyncio.gather(
            *(job.fleet.call(n, "loaded", role="training", version=version) for n in job.trainer.owner_nodes)
        )

    async def _check(self, moved: Moved) -> None:
        """Once for each layout: that what was staged is, tensor by tensor and place by place, what the trainer has. The
        digest of every later version says only that all nodes have the same."""
        job = self._job
        wanted, found = await job.trainer.parameter_digest(), await job.transitions.staged_digests(moved)
        if wrong := [node for node, digests in found.items() if digests["param"] != wanted]:
            await job.transitions.abort(moved.key, "staged weights are not the trainer's")
            raise JobFailed(f"what was staged on {', '.join(wrong)} is not what the trainer has")
        self._checked = job.trainer.layout
