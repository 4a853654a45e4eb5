"""The supervised stage before GRPO: the trainer learns from demonstrations that the task writes."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, Iterable

from dynarl.controller.replicas import Replica
from dynarl.rl.schedule import supervised_lr
from dynarl.wire import CallError

if TYPE_CHECKING:
    from dynarl.controller.job import Job

# A replica joins only if it gets at least this many demonstrations of a step: below, sending it new weights after each
# step takes longer than its share of the work.
LEAST_SHARE = 16


class WarmStart:
    """Gets the trainers' events while it runs, like an iteration."""

    def __init__(self, job: Job):
        self._job, self._config = job, job.config.warm_start
        self._open: dict[int, asyncio.Future[dict[str, float]]] = {}
        self._left: dict[int, set[str]] = {}  # lease -> nodes that are not done with it

    async def run(self) -> float:
        """All steps. Returns the last loss. Raises CallError when a worker dies on the way."""
        job, config = self._job, self._config
        replicas = self._replicas()
        nodes = list(dict.fromkeys(node for replica in replicas for node in replica.nodes))
        await job.enter(dict.fromkeys(nodes, "training"), "warm start")
        alone = set(nodes) <= set(job.trainer.owner_nodes)
        loss, drawn = math.nan, self._draw(replicas, 0)
        for step in range(config.steps):
            began = job.clock()
            await job.trainer.begin(step, "sft")
            batches, drawn = await drawn, self._draw(replicas, step + 1)
            stats = await asyncio.gather(*(self._train(replica, step * len(replicas) + i, batch)
                                           for i, (replica, batch) in enumerate(zip(replicas, batches))))
            tokens = sum(s["tokens"] for s in stats)
            loss = sum(s["loss"] for s in stats) / tokens
            async with job.critical:
                await job.trainer.step(set(nodes), int(tokens), supervised_lr(config.lr, step, config.steps))
            if not alone:
                await job.staging.refresh_trainers(nodes)
            job.writer.log(
                0,
                {
                    "warm_start/loss": loss,
                    "warm_start/step": step + 1,
                    "timing_s/warm_start_step": job.clock() - began,
                },
            )
            job.last_event = job.clock()
        await drawn
        return loss

    def _replicas(self) -> list[Replica]:
        """The replicas that take part, owners first; each gets an equal share of a step's demonstrations."""
        trainer = self._job.trainer
        most = max(trainer.num_owner_replicas, min(len(trainer.replicas), self._config.batch_size // LEAST_SHARE))
        return trainer.replicas[: min(most, self._config.batch_size)]

    def _draw(self, replicas: list[Replica], step: int) -> asyncio.Future[list[list[dict]]]:
        """Ask for the demonstrations of a step, a share from each replica's own node, ahead of their use."""
        first, size = step * self._config.batch_size, self._config.batch_size
        bounds = [first + i * size // len(replicas) for i in range(len(replicas) + 1)]
        return asyncio.gather(*(self._job.fleet.call(node, "demonstrations", start=low, count=high - low)
                                for (node, *_), low, high in zip((r.nodes for r in replicas), bounds, bounds[1:])))

    async def _train(self, replica: Replica, lease: int, samples: list[dict]) -> dict[str, float]:
        """Accumulate the gradient of demonstrations at one replica; returns its statistics."""
        done = self._open[lease] = asyncio.get_running_loop().create_future()
        self._left[lease] = set(replica.nodes)
        await asyncio.gather(
            *(
                self._job.fleet.call(node, "demonstrate", lease=lease, devices=replica.on(node), samples=samples)
                for node in replica.nodes
            )
        )
        return await done

    def event_trained(self, node: str, *, lease: int, stats: dict[str, float]) -> None:
        left = self._left.get(lease, set())
        left.discard(node)
        if not left and (done := self._open.pop(lease, None)) is not None and not done.done():
            done.set_result(stats)

    def event_finished(self, node: str, **_: Any) -> None:
        pass

    event_scored = event_finished

    def worker_lost(self, node: str, role: str, held: Iterable[str] = ()) -> None:
        """Start again from the last checkpoint: a step without one of its shares is another step."""
        if role == "training":
            for done in self._open.values():
                if not done.done():
                    done.set_exception(CallError(f"a training worker on {node} died in the warm start"))
