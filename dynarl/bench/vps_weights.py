"""The part of `dynarl bench vps` that has Megatron: weights alone, from a trainer to one of another layout.

    mailbox     ours, through shared memory between the processes of a node
    gloo        ours, over torch.distributed
    megatron    megatron.core.resharding, over torch.distributed

Plans are made before and kept, on both sides. One process of four: `python -m dynarl.bench.vps_weights RANK DIRECTORY`.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dynarl.bench.vps_live import DESTINATION, MODEL, RANKS, ROUNDS, SOURCE, TUNING
from dynarl.bench.vps_mail import Mail
from dynarl.config.schema import Config, Model
from dynarl.roles.training import megatron_cpu, torch_world
from dynarl.roles.training.state import State
from dynarl.roles.training.trainer import Trainer
from dynarl.transport.planning import Request, describe
from dynarl.transport.staged import StagedModel
from dynarl.transport.torch_p2p import execute
from dynarl.vps.plan import plan_for_rank


class _HostTorch:
    """torch for a Megatron module that takes streams and pinned memory for granted."""

    def __init__(self) -> None:
        stream = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda other: None)
        self.cuda = SimpleNamespace(
            Stream=lambda *args: stream,
            current_stream=lambda *args: stream,
            stream=lambda *args: contextlib.nullcontext(),
            synchronize=lambda *args: None,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.empty(*args, **options)


class Refit:
    """Megatron's own way, on a machine without CUDA. `bytes_received`: in the last call, from other ranks."""

    def __init__(self, source: Any, target: Any, group: dist.ProcessGroup):
        from megatron.core.resharding import execution, refit
        from megatron.core.resharding.copy_services import gloo_copy_service

        for module in (execution, gloo_copy_service):
            module.torch = _HostTorch()
        self.bytes_received = 0
        service = gloo_copy_service.GlooCopyService(group=group)
        submit = service.submit_recv

        def submit_recv(tensor: torch.Tensor, src_rank: int, *args: Any, **options: Any) -> None:
            self.bytes_received += tensor.nbytes if src_rank != group.rank() else 0
            submit(tensor, src_rank, *args, **options)

        service.submit_recv = submit_recv
        self._swap = lambda: refit.swap_model_weights([source], [target], service, group=group)

    def run(self) -> None:
        self.bytes_received = 0
        self._swap()


def write_model(directory: Path) -> None:
    request = Request(MODEL, describe(SOURCE), describe(DESTINATION), ["param"], 1, RANKS, **TUNING)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": 512, "rms_norm_eps": 1e-6}))
    model = StagedModel.create(directory / "model.safetensors", request.spec)
    draw = np.random.default_rng(0)
    for array in model.arrays:
        array[...] = draw.standard_normal(array.shape, np.float32).view(np.uint32) >> 16
    model.complete()


def megatron_world(rank: int, work: Path) -> tuple[torch_world.World, Path]:
    """The world of all ranks, and the directory of a model that is written in it once."""
    warnings.filterwarnings("ignore")
    megatron_cpu.install()
    store = dist.FileStore(str(work / "store"), RANKS)
    model_dir = work / "model"
    if rank == 0:
        write_model(model_dir)
        store.set("written", "yes")
    store.get("written")
    return torch_world.World(store, "bench", rank, torch_world.compute_device("cpu"), 600.0), model_dir


def main(rank: int, work: Path) -> None:
    world, model_dir = megatron_world(rank, work)
    group = world.group(range(RANKS))
    trainer = Trainer(Config(model=Model(dtype="bfloat16")), str(model_dir), world, SOURCE, owner=True)
    trainer.connect("next", SOURCE, DESTINATION)
    trainer.prepare(120.0)
    trainer.allocate(trainer.scalars())
    source, target = trainer.shard, trainer.next

    def barrier() -> None:
        dist.barrier(group=group)

    request = Request(MODEL, describe(SOURCE), describe(DESTINATION), ["param"], 1, RANKS, **TUNING)
    state = State(source, target)
    mail = Mail("ours", work, rank, request, state, barrier)
    plan = plan_for_rank(trainer.arch.spec, SOURCE, DESTINATION, rank, kinds=("param",))
    refit = Refit(source.model, target.model, group)
    ways: dict[str, Callable[[], Any]] = {
        "mailbox": mail.run,
        "gloo": lambda: execute(plan, state, rank, group, {r: r for r in range(RANKS)}, world.device),
        "megatron": refit.run,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    expected: list[torch.Tensor] = []
    for number in range(ROUNDS + 1):
        for name, act in ways.items():
            with torch.no_grad():
                for parameter in target.params.values():
                    parameter.zero_()
            mail.reset()
            barrier()
            began, used = time.perf_counter(), time.process_time()
            act()
            used = time.process_time() - used
            barrier()
            if number:
                seconds[name].append(time.perf_counter() - began)
                cpu[name].append(used)
            values = [parameter.detach().clone() for parameter in target.params.values()]
            expected = expected or values
            if not all(torch.equal(a, b) for a, b in zip(expected, values, strict=True)):
                raise RuntimeError(f"{name} brought other weights than mailbox")
    totals = torch.tensor([mail.bytes_received, refit.bytes_received])
    dist.all_reduce(totals, group=group)
    all_cpu = torch.tensor([statistics.median(listed) for listed in cpu.values()], dtype=torch.float64)
    dist.all_reduce(all_cpu, group=group)
    if rank == 0:
        medians = {name: statistics.median(listed) for name, listed in seconds.items()}
        figures = {
            "bytes_received": {"ours": int(totals[0]), "megatron": int(totals[1])},
            "seconds": medians,
            "cpu_s": dict(zip(ways, all_cpu.tolist())),
            "times_faster_than_megatron": {n: medians["megatron"] / medians[n] for n in ("mailbox", "gloo")},
        }
        (work / "result.json").write_text(json.dumps(figures))
    barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
