"""The trainer from one layout to the next, between two iterations; what the next one needs is built an iteration ahead.

Cancelled, the old layout goes on: nothing of it is touched before the new one is verified.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING

from dynarl.config import degrees
from dynarl.config.degrees import Degrees
from dynarl.controller.transitions import Moved, compare_state
from dynarl.errors import ConfigError
from dynarl.vps.layout import ALL_KINDS, LayoutError
from dynarl.vps.train_layout import TrainLayout
from dynarl.wire import CallError

if TYPE_CHECKING:
    from dynarl.controller.job import Job

log = logging.getLogger(__name__)

TIMEOUT_S = 300.0
# A layout that was cancelled so often, at the start of as many iterations, is not tried again.
ATTEMPTS = 3


class Recut:
    """Layout changes of one job, as training.layouts says, or a plan that was made while it runs."""

    def __init__(self, job: Job):
        self._job = job
        self._prepared: TrainLayout | None = None  # the next layout, if its groups are being built
        self._planning: asyncio.Future | None = None  # its plan
        self._refused: Counter[Degrees] = Counter()  # how often a layout was cancelled

    async def before(self, number: int) -> None:
        """Change the layout, if another one begins with iteration `number`; and begin to build the one that begins
        after it."""
        job = self._job
        if (layout := await self._other_layout(number)) is not None:
            await self._change(number, layout)
        if (following := await self._other_layout(number + 1)) is not None:
            try:
                await job.trainer.prepare(following)
            except (CallError, TimeoutError) as error:
                await self._stay(number + 1, error)
                return
            self._prepared = following
            if not self._by_torch:
                request = job.transition(following, list(ALL_KINDS))
                self._planning = asyncio.ensure_future(job.transitions.plan(request))

    def _wanted(self, number: int) -> Degrees:
        """Of an iteration: what was planned while the job runs, else what training.layouts says."""
        planned = self._job.progress.plan.get("layout")
        return degrees.parse(planned) if planned else degrees.at(self._job.config.training, number)

    async def _other_layout(self, number: int) -> TrainLayout | None:
        """That of an iteration, if the trainer is in another one and it has not been refused too often."""
        wanted = self._wanted(number)
        if self._refused[wanted] >= ATTEMPTS:
            return None
        try:
            layout = self._job.trainer.layout_of(wanted)
        except (ConfigError, LayoutError) as error:  # nodes were lost
            self._refused[wanted] = ATTEMPTS
            await self._stay(number, error)
            return None
        return layout if layout != self._job.trainer.layout else None

    async def _change(self, number: int, layout: TrainLayout) -> None:
        job, began = self._job, self._job.clock()
        text = str(self._wanted(number))
        phases: dict[str, float] = {}
        job.journal.append("layout_proposed", iteration=number, layout=text)
        try:
            await job.wake_owners(node for node, _ in job.trainer.places_of(layout))
            num_bytes = await self._ready(layout)
            phases["prepare_ms"] = 1e3 * (job.clock() - began)
            stopped = job.clock()
            await job.trainer.reserve()
            phases["allocate_ms"] = 1e3 * (job.clock() - stopped)
            moved = await self._move(layout)
        except (CallError, TimeoutError) as error:
            await self._stay(number, error)
            return
        await job.checkpoints.settle()  # the copy that is being written is the old layout's
        await job.workers.settled()  # borrowed workers are built anew; not beside their revival
        # From here on a fault leads back to the newest checkpoint, which any layout can read.
        async with job.critical:
            if not self._by_torch:
                await job.transitions.finish(moved)
            await job.trainer.adopt(layout, job.weights.version, job.away())
            await self._put_to_sleep()
            job.settle()
            self._prepared = None
            job.progress.layout = text
        job.journal.append(
            "layout_committed", iteration=number, layout=text, phases=phases | moved.phases, bytes=moved.num_bytes,
            bytes_reserved=num_bytes, home=job.home, pause_ms=1e3 * (job.clock() - stopped), durable=True,
        )
        log.info("the trainer is in layout %s after %.0f ms", text, 1e3 * (job.clock() - began))

    async def _ready(self, layout: TrainLayout) -> int:
        """Groups, empty models and the plan are there. Returns the most bytes that a worker will need."""
        if self._prepared != layout:
            await self._job.trainer.prepare(layout)
        elif self._planning is not None:
            await self._planning
        return await self._job.trainer.prepared(TIMEOUT_S)

    async def _move(self, layout: TrainLayout) -> Moved:
        """The state is at both sides, and the same. Raises CallError, TimeoutError."""
        if self._by_torch:
            moved = await self._move_by_torch()
        else:
            moved = await self._job.transitions.carry_out(self._job.transition(layout, list(ALL_KINDS)), TIMEOUT_S)
        if differing := compare_state(moved.digests):
            if not self._by_torch:
                await self._job.transitions.abort(moved.key, f"digests differ: {differing}")
            raise CallError(f"what arrived is not what was sent: {differing}")
        return moved

    @property
    def _by_torch(self) -> bool:
        return self._job.config.training.moved_by == "torch"

    async def _move_by_torch(self) -> Moved:
        trainer, began = self._job.trainer, self._job.clock()
        num_bytes = await trainer.transfer(TIMEOUT_S)
        phases = {"run_ms": 1e3 * (self._job.clock() - began)}
        return Moved("", phases, num_bytes, {"": await trainer.digests()})

    async def _stay(self, number: int, error: Exception) -> None:
        """The old layout goes on."""
        job, wanted = self._job, self._wanted(number)
        await job.trainer.discard()
        self._prepared = None
        self._refused[wanted] += 1
        job.journal.append("layout_cancelled", iteration=number, layout=str(wanted), reason=str(error), durable=True)
        log.warning("the trainer stays as it is: %s", error)

    async def _put_to_sleep(self) -> None:
        """Training workers that were built on nodes whose role is another one."""
        job = self._job
        idle = {p[0] for p in job.trainer.borrowed if job.epochs.roles[p[0]] != "training"} - job.away()
        await asyncio.gather(
            *(job.fleet.worker(n, "training", d, "sleep") for n, d in job.trainer.borrowed if n in idle)
        )

    def give_up(self) -> None:
        """Forget what is being built: the trainer is new, or the job ends."""
        if self._planning is not None:
            self._planning.cancel()
        self._prepared = self._planning = None
