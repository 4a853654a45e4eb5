"""The part of `dynarl bench vps` that has torch: a transition of four processes of one machine, done in several ways.

    mailbox     ours, through shared memory between the processes of a node
    gloo        ours, over torch.distributed
    scatter     gather to the first owner, exchange between first owners, scatter; by the same executor as "mailbox"
    checkpoint  torch.distributed.checkpoint: save, then load at the other layout, on tmpfs

All of them begin with the same arrays and must end with the same: masters and moments cut by ZeRO-1, parameters on
all their ranks. "checkpoint" writes and reads parameters, the others cast them from the masters that arrive; what both
ends of the pipeline have of the tied embedding's optimizer state it loads on one only, so it moves less. One process of
four: `python -m dynarl.bench.vps_torch RANK DIRECTORY`.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from dynarl.bench.arrays import Arrays, Held
from dynarl.bench.vps_live import DESTINATION, MODEL, RANKS, ROUNDS, SOURCE, TUNING
from dynarl.bench.vps_mail import Mail
from dynarl.transport.files import owned_once
from dynarl.transport.planning import ByNode, Request, describe
from dynarl.transport.torch_p2p import execute
from dynarl.vps.digest import digest_box
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
    """(save, load) of all state. In DESTINATION parameters are whole, so each rank loads its own as plain tensors."""
    spec = endpoint.spec

    def sharded(layout: TrainLayout, held: Held, kinds: Sequence[str]) -> dict[str, ShardedTensor]:
        mine: dict[str, list[Shard]] = {f"{kind}/{tensor.name}": [] for kind in kinds for tensor in spec.tensors}
        for kind, tensor, box in owned_once(spec, layout, rank, kinds):
            for whole, array in held[kind, tensor]:
                if whole == box:
                    shard = Shard.from_tensor_and_offsets(_tensor(kind, array), [lo for lo, _ in box], rank)
                    mine[f"{kind}/{spec.tensors[tensor].name}"].append(shard)
        shapes = {tensor.name: tensor.shape for tensor in spec.tensors}
        return {
            name: ShardedTensor._init_from_local_shards(shards, *shapes[name.partition("/")[2]])
            for name, shards in mine.items()
        }

    source = sharded(SOURCE, endpoint.source, ALL_KINDS)
    target: dict[str, Any] = dict(sharded(DESTINATION, endpoint.destination, OPTIMIZER))
    for (kind, tensor), ((_, array), *_) in endpoint.destination.items():
        if kind == "param":
            target[f"param/{spec.tensors[tensor].name}"] = _tensor(kind, array)
    return (
        lambda: dcp.save(dict(source), checkpoint_id=str(directory)),
        lambda: dcp.load(dict(target), checkpoint_id=str(directory)),
    )


def _tensor(kind: str, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).view(torch.bfloat16 if kind == "param" else torch.float32)


def checked(endpoint: Arrays, layout: TrainLayout, rank: int) -> dict[str, int]:
    """Digests of a destination, each element counted once; the destination is zeros afterwards."""
    mine: dict[str, int] = {}
    for kind, tensor, box in owned_once(endpoint.spec, layout, rank, ALL_KINDS):
        part = endpoint.find(endpoint.destination, kind, tensor, box)
        mine[kind] = mine.get(kind, 0) + digest_box(endpoint.spec.tensors[tensor].name, kind, box, part)
    everybody: list[Any] = [None] * RANKS
    dist.all_gather_object(everybody, mine)
    for pieces in endpoint.destination.values():
        for _, array in pieces:
            array[...] = 0
    return {kind: sum(each.get(kind, 0) for each in everybody) % 2**64 for kind in ALL_KINDS}


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

    plain = TensorArrays(spec, rank, SOURCE, DESTINATION, ALL_KINDS)
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
    ends = {
        "mailbox": (arrays, destination),
        "gloo": (arrays, destination),
        "scatter": (stage, DESTINATION),
        "checkpoint": (plain, DESTINATION),
    }
    expected: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, act in ways.items():
            for each in (mail, *detour):
                each.reset()
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            act()
            used = time.process_time() - used
            dist.barrier()
            if number:
                seconds[name].append(time.perf_counter() - began)
                cpu[name].append(used)
            else:
                found = checked(*ends[name], rank)
                expected = expected or found
                if found != expected:
                    raise RuntimeError(f"{name} brought other state than mailbox")
            if rank == 0:
                shutil.rmtree(work / "checkpoint", ignore_errors=True)
    total = torch.tensor([mail.bytes_received])
    dist.all_reduce(total)
    all_cpu = torch.tensor([statistics.median(listed) for listed in cpu.values()], dtype=torch.float64)
    dist.all_reduce(all_cpu)
    if rank == 0:
        medians = {name: statistics.median(listed) for name, listed in seconds.items()}
        figures = {
            "bytes": int(total),
            "seconds": medians,
            "cpu_s": dict(zip(ways, all_cpu.tolist())),
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
