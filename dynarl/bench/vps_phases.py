"""The part of `dynarl bench vps` that has all of a trainer: CPU time of each phase of a live change of its layout.

    prepare    groups of the next layout, its model and optimizer without memory (while training goes on)
    plan       every rank plans its part (while training goes on)
    reserve    memory for the new state, step counters and learning rate
    run        the state moves between four processes of one node
    verify     digests of both sides
    adopt      the next shard trains, the old one is freed

Seconds of CPU are those of all four processes together, in user mode and in the kernel; with more processes than cores
that is what decides. The trainer goes to and fro between two layouts; figures are medians over the ways there. One
process of four: `python -m dynarl.bench.vps_phases RANK DIRECTORY`.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dynarl.bench.vps_live import DESTINATION, MODEL, RANKS, ROUNDS, SOURCE, TUNING
from dynarl.bench.vps_mail import Mail
from dynarl.bench.vps_weights import megatron_world
from dynarl.config.schema import Config, Model
from dynarl.roles.training.shard import MOMENTS
from dynarl.roles.training.state import Bound
from dynarl.roles.training.trainer import Trainer
from dynarl.transport.planning import Request, describe, plan_rank, schedule_of
from dynarl.vps.layout import ALL_KINDS
from dynarl.vps.train_layout import TrainLayout


class Meter:
    """Seconds of one phase after the other: elapsed, and of CPU in user mode and in the kernel, all ranks together."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self.rows: dict[str, list[float]] = {}

    def start(self) -> None:
        """What was done before is not counted."""
        dist.barrier(group=self._group)
        self._before = self._now()

    def phase(self, name: str) -> None:
        """What was done since the last call."""
        mine = torch.tensor([now - before for now, before in zip(self._now(), self._before)], dtype=torch.float64)
        slowest = mine[:1].clone()
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        dist.all_reduce(mine, group=self._group)
        self.rows[name] = [slowest.item(), *mine[1:].tolist()]
        self.start()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return time.perf_counter(), usage.ru_utime, usage.ru_stime


def main(rank: int, work: Path) -> None:
    world, model_dir = megatron_world(rank, work)
    group = world.group(range(RANKS))
    trainer = Trainer(Config(model=Model(dtype="bfloat16")), str(model_dir), world, SOURCE, owner=True)
    for kind in MOMENTS:
        for _, (rows, *columns), view, _ in Bound(trainer.shard).pieces(kind):
            # The same on all ranks that have an element.
            value = torch.arange(*rows).sin()
            view.copy_(value[:, None] * torch.arange(*columns[0]).cos() if columns else value)
    meter, found = Meter(group), []
    for number in range(ROUNDS + 1):
        for source, destination in ((SOURCE, DESTINATION), (DESTINATION, SOURCE)):
            rows = change(trainer, rank, work, f"{number}-{source}", source, destination, meter)
            if number and source is SOURCE:
                found.append(rows)
    if rank == 0:
        phases = {
            name: dict(zip(("elapsed_s", "user_s", "kernel_s"), (statistics.median(x) for x in zip(*columns))))
            for name, columns in ((name, [rows[name] for rows in found]) for name in found[0])
        }
        (work / "result.json").write_text(json.dumps(phases))
    dist.barrier(group=group)


def change(
    trainer: Trainer, rank: int, work: Path, name: str, source: TrainLayout, destination: TrainLayout, meter: Meter
) -> dict[str, list[float]]:
    """One change of the layout. Returns what each phase took. Raises RuntimeError where the digests differ."""
    group = trainer.world.group(range(RANKS))
    request = Request(MODEL, describe(source), describe(destination), list(ALL_KINDS), 1, RANKS, **TUNING)
    meter.rows = {}
    meter.start()
    trainer.connect(name, source, destination)
    trainer.prepare(120.0)
    meter.phase("prepare")
    schedule_of(request, plan_rank(request, rank))
    meter.phase("plan")
    scalars = trainer.scalars()
    trainer.allocate(scalars)
    meter.phase("reserve")
    endpoint = trainer.endpoint(source, destination)
    mail = Mail("trainer", work, rank, request, endpoint, lambda: dist.barrier(group=group))
    mail.reset()
    meter.start()
    mail.run()
    meter.phase("run")
    digests = trainer.digests()
    meter.phase("verify")
    everybody = [None] * RANKS
    dist.all_gather_object(everybody, digests, group=group)
    for kind in digests["target"]:
        before, after = (sum(each[side].get(kind, 0) for each in everybody) % 2**64 for side in ("source", "target"))
        if before != after:
            raise RuntimeError(f"{kind} is another one after the change of the layout")
    meter.start()
    trainer.adopt()
    meter.phase("adopt")
    return meter.rows


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
