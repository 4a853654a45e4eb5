"""The part of `dynarl bench vps` that has torch: a transition of four processes of one machine, done in several ways.

    mailbox     ours, through shared memory between the processes of a node
    gloo        ours, over torch.distributed
    scatter     gather to the first owner, exchange between first owners, scatter; by the same executor as "mailbox"
    checkpoint  torch.distributed.checkpoint: save, then load at the other layout, on tmpfs

All of them move the same arrays; "checkpoint" moves neither parameters nor replicas, so it moves less. One process of
four: `python -m dynarl.bench.vps_torch RANK DIRECTORY`.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Callable

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from dynarl.bench.arrays import Arrays
from dynarl.bench.vps_live import DESTINATION, MODEL, RANKS, ROUNDS, SOURCE, TUNING
from dynarl.bench.vps_mail import Mail
from dynarl.transport.files import owned_once
from dynarl.transport.planning import ByNode, Request, describe
from dynarl.transport.torch_p2p import execute
from dynarl.vps.layout import ALL_KINDS
from dynarl.vps.plan import plan_for_rank, plan_transition
from dynarl.vps.train_layout import TrainLayout

OPTIMIZER = ("master", "exp_avg", "exp_avg_sq")


class TensorArrays(Arrays):
    """The same for executors that hand out tensors."""

    def pack_tensor(self, fragments: Any, out: torch.Tensor) -> None:
        self.pack(fragments, memoryview(out.numpy()))

    def unpack_tensor(self, fragments: Any, data: torch.Tensor) -> None:
        self.unpack(fragments, memoryview(data.numpy()))

    def cast(self, master: np.ndarray, target: np.ndarray) -> None:
        # One pass; numpy, which has no bfloat16, needs several.
        value = torch.from_numpy(master).view(torch.float32)
        torch.from_numpy(target).view(torch.bfloat16).copy_(value)


def checkpoint(endpoint: Arrays, rank: int, directory: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """(save, load) of the optimizer's state."""
    spec = endpoint.spec

    def sharded(layout: TrainLayout, held: Any) -> dict[str, ShardedTensor]:
        mine: dict[str, list[Shard]] = {f"{kind}/{tensor.name}": [] for kind in OPTIMIZER for tensor in spec.tensors}
        for kind, tensor, box in owned_once(spec, layout, rank, OPTIMIZER):
            for whole, array in held[kind, tensor]:
                if whole == box:
                    offsets = [lo for lo, _ in box]
                    value = torch.from_numpy(array.view(np.float32))
                    mine[f"{kind}/{spec.tensors[tensor].name}"].append(
                        Shard.from_tensor_and_offsets(value, offsets, rank)
                    )
        shapes = {tensor.name: tensor.shape for tensor in spec.tensors}
        return {
            name: ShardedTensor._init_from_local_shards(shards, *shapes[name.partition("/")[2]])
            for name, shards in mine.items()
        }

    source, target = sharded(SOURCE, endpoint.source), sharded(DESTINATION, endpoint.destination)
    return (
        lambda: dcp.save(dict(source), checkpoint_id=str(directory)),
        lambda: dcp.load(dict(target), checkpoint_id=str(directory)),
    )


def relabelled(request: Request) -> Request:
    """The same transition with the destination's ranks in the order that moves fewest bytes."""
    nodes = ByNode(request)
    plan = plan_transition(request.spec, *nodes.layouts, **nodes.options)
    destination = plan.dst.relabelled([nodes.outer(rank) for rank in plan.dst.ranks])
    return msgspec.structs.replace(request, destination=describe(destination))


def main(rank: int, work: Path) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{work}/store", rank=rank, world_size=RANKS)
    request = Request(MODEL, describe(SOURCE), describe(DESTINATION), list(ALL_KINDS), 1, RANKS, **TUNING)
    best = relabelled(request)
    spec, (source, destination) = request.spec, best.layouts()
    arrays = TensorArrays(spec, rank, source, destination, ALL_KINDS)
    mail = Mail("ours", work, rank, best, arrays, dist.barrier)
    plan = plan_for_rank(spec, source, destination, rank, kinds=ALL_KINDS)
    group = dist.group.WORLD

    first, second = owners_only(SOURCE), owners_only(DESTINATION)
    detour = []
    held = None
    for name, before, after, kinds in (
        ("gather", SOURCE, first, OPTIMIZER),
        ("exchange", first, second, ALL_KINDS),  # parameters are cast from the masters
        ("scatter", second, DESTINATION, ALL_KINDS),
    ):
        kinds_there = kinds if name != "exchange" else ALL_KINDS
        stage = TensorArrays(spec, rank, None, after, kinds_there)
        stage.source = held if held is not None else TensorArrays(spec, rank, before, None, kinds).source
        asked = Request(MODEL, describe(before), describe(after), list(kinds), 1, RANKS, **TUNING)
        detour.append(Mail(name, work, rank, asked, stage, dist.barrier))
        held = stage.destination

    plain = TensorArrays(spec, rank, SOURCE, DESTINATION, OPTIMIZER)
    save, load = checkpoint(plain, rank, work / "checkpoint")

    def through_files() -> None:
        save()
        dist.barrier()
        load()

    def by_detour() -> None:
        for mail in detour:
            mail.run()

    ways: dict[str, Callable[[], None]] = {
        "mailbox": mail.run,
        "gloo": lambda: execute(plan, arrays, rank, group, {r: r for r in range(RANKS)}, torch.device("cpu")),
        "scatter": by_detour,
        "checkpoint": through_files,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, act in ways.items():
            for each in (mail, *detour):
                each.reset()
            dist.barrier()
            began = time.perf_counter()
            act()
            dist.barrier()
            if number:
                seconds[name].append(time.perf_counter() - began)
            if rank == 0:
                shutil.rmtree(work / "checkpoint", ignore_errors=True)
    total = torch.tensor([mail.bytes_received])
    dist.all_reduce(total)
    if rank == 0:
        medians = {name: statistics.median(listed) for name, listed in seconds.items()}
        figures = {
            "bytes": int(total),
            "seconds": medians,
            "times_faster": {
                "than torch.distributed.checkpoint": medians["checkpoint"] / medians["mailbox"],
                "than gather, exchange, scatter": medians["scatter"] / medians["mailbox"],
                "gloo, than torch.distributed.checkpoint": medians["checkpoint"] / medians["gloo"],
            },
        }
        (work / "result.json").write_text(json.dumps(figures))
    dist.barrier()


def owners_only(layout: TrainLayout) -> TrainLayout:
    """The first data-parallel replica of a layout, holding everything of its model parallel part."""
    ranks = tuple(rank for rank in layout.ranks if layout.coordinates(rank).dp == 0)
    return TrainLayout(tp=layout.tp, pp=layout.pp, dp=1, zero1=False, ranks=ranks)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
