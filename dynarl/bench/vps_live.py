"""`dynarl bench vps`, the parts that move bytes: transitions between four processes of this machine, against baselines.

    wire       bytes per second of our MPI executor, packing and unpacking included, against raw MPI messages of the
               same sizes between the same ranks
    sync       weights of a tiny model from two owners to the staged model of every node: milliseconds
    state      time of a transition against torch.distributed.checkpoint, and against gather, exchange, scatter
    weights    time of weights alone against megatron.core.resharding
    phases     CPU time of a trainer's change of layout, phase by phase

Between processes of one machine MPI is a copy in memory, or through the loopback device, and takes the cores that
packing needs. `link_rate` (such as "4gbit") makes it a wire: the ranks run in a network of their own, the rate of which
is limited. That needs root.

Every figure is a median over rounds in which the candidates take turns, all in one run; what counts is their ratio. Run
`python -m dynarl.bench.vps_live NAME` for one part; `run(NAME)` returns its figures. The environment may say
DYNARL_BENCH_ROUNDS, and in DYNARL_BENCH_TUNING, as JSON, fields of the Request such as {"piece_bytes": 1048576}.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from dynarl.bench.arrays import Arrays
from dynarl.errors import DynarlError
from dynarl.parent import die_with_parent
from dynarl.slurm.environ import identity, model_settings
from dynarl.transport.carrier import Carrier
from dynarl.transport.mailbox import Mailbox
from dynarl.transport.messages import Lanes, Schedule
from dynarl.transport.planning import Request, describe, plan_rank, schedule_of
from dynarl.vps.train_layout import TrainLayout

RANKS = 4
ROUNDS = int(os.environ.get("DYNARL_BENCH_ROUNDS", "7"))
KINDS = ("master", "exp_avg", "exp_avg_sq")
# 40 million parameters; 560 MB with optimizer state.
MODEL = dict(
    model_type="llama", num_hidden_layers=8, hidden_size=512, num_attention_heads=8, num_key_value_heads=4,
    intermediate_size=1536, vocab_size=16384, tie_word_embeddings=True, torch_dtype="bfloat16",
)  # fmt: skip
TUNING = json.loads(os.environ.get("DYNARL_BENCH_TUNING", "{}"))
# Every rank sends and receives.
SOURCE, DESTINATION = TrainLayout(tp=2, dp=2), TrainLayout(tp=1, pp=2, dp=2)


# Parts that mpirun starts (functions here), and those whose processes find each other through torch (modules).
TORCH_PARTS = {
    "state": "dynarl.bench.vps_torch",
    "weights": "dynarl.bench.vps_weights",
    "phases": "dynarl.bench.vps_phases",
}
TCP = ("btl", "tcp,self", "btl_tcp_if_include", "lo", "oob_tcp_if_include", "lo")


def run(part: str, link_rate: str | None = None, tcp: bool = False) -> dict[str, Any]:
    """Figures of one part. link_rate: of the network between the ranks, in tc's units; tcp: MPI through the loopback
    device instead of shared memory (so it is with link_rate). Raises DynarlError."""
    work = Path(tempfile.mkdtemp(prefix="dynarl-bench-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        if part in TORCH_PARTS:
            programs = [[sys.executable, "-m", TORCH_PARTS[part], str(rank), str(work)] for rank in range(RANKS)]
        else:
            programs = [_under_mpirun(part, work, link_rate, tcp or link_rate is not None)]
        _together(programs, work)
        return json.loads((work / "result.json").read_text())
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _under_mpirun(part: str, work: Path, link_rate: str | None, tcp: bool) -> list[str]:
    if shutil.which("mpirun") is None:
        raise DynarlError("mpirun is not on the PATH: load the site's MPI module")
    command = ["mpirun", "--oversubscribe", "-n", str(RANKS)]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    for name, value in zip(TCP[::2], TCP[1::2]) if tcp else ():
        command += ["--mca", name, value]
    command += [sys.executable, "-m", "dynarl.bench.vps_live", part, "--work", str(work)]
    if link_rate is None:
        return command
    limit = f"tc qdisc add dev lo root tbf rate {link_rate} burst 512kb latency 20ms"
    return ["unshare", "--net", "sh", "-ec", f'ip link set lo up; {limit}; exec "$@"', "sh", *command]


def _together(programs: list[list[str]], work: Path) -> None:
    """Run programs at the same time. Raises DynarlError with the end of what a failing one said."""
    logs = [work / f"log{i}" for i in range(len(programs))]
    settings = model_settings(None) | identity("training", 0)
    processes = []
    for program, log in zip(programs, logs):
        with log.open("wb") as file:
            processes.append(subprocess.Popen(program, stdout=file, stderr=file, env=settings | dict(os.environ)))
    failed = [i for i, process in enumerate(processes) if process.wait()]
    if failed or not (work / "result.json").exists():
        text = logs[failed[0] if failed else 0].read_text(errors="replace")
        raise DynarlError(f"the benchmark ended without a result:\n{text[-3000:]}")


# ---- wire


def wire(work: Path) -> None:
    """One rank under mpirun."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    request = Request(MODEL, describe(SOURCE), describe(DESTINATION), list(KINDS), RANKS, 1, **TUNING)
    lanes = _lanes(request, rank)
    mailbox = Mailbox.create(work / f"rank-{rank}", *lanes.needs())
    ours, theirs = get_context("fork").Pipe()
    worker = get_context("fork").Process(target=_worker, args=(theirs, mailbox.path, request, rank), daemon=True)
    worker.start()  # before MPI is

    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    from dynarl.transport.mpi import Exchange, Lane

    world = MPI.COMM_WORLD
    exchange = Exchange([Lane(rank, lanes, mailbox)], request.places, {node: node for node in range(RANKS)})
    raw = _Raw(world, lanes.schedule)
    results: dict[str, list[dict[str, float]]] = {"ours": [], "raw": [], "raw, all at once": []}

    def transition(number: int) -> dict[str, float]:
        mailbox.reset()
        ours.send("run")
        phases = asyncio.run(exchange.run(world, number, 120.0))
        return phases | ours.recv()

    for number in range(ROUNDS + 1):
        for name, act in (("ours", transition), ("raw", raw.by_round), ("raw, all at once", raw.at_once)):
            world.Barrier()
            began = time.perf_counter()
            phases = act(number) or {}
            seconds = time.perf_counter() - began
            slowest = world.allreduce(seconds, MPI.MAX)
            if number:  # the first is for page faults and connections
                results[name].append({"seconds": slowest, **phases})
    ours.send("stop")
    total = world.allreduce(exchange.bytes_received)
    if rank == 0:
        seconds = {name: statistics.median(r["seconds"] for r in listed) for name, listed in results.items()}
        figures = {
            "bytes": total,
            "seconds": seconds,
            "bytes_per_s": {name: total / s for name, s in seconds.items()},
            "ratio_to": {name: s / seconds["ours"] for name, s in seconds.items() if name != "ours"},
            "phases_of_rank_0": {
                name: statistics.median(r[name] for r in results["ours"])
                for name in ("pack_s", "unpack_s", "local_s", "wait_s", "wire_s", "waited_s")
            },
        }
        (work / "result.json").write_text(json.dumps(figures))
    world.Barrier()


def _worker(commands: Connection, path: Path, request: Request, rank: int) -> None:
    die_with_parent()
    source, destination = request.layouts()
    endpoint = Arrays(request.spec, rank, source, destination, request.kinds)
    lanes, mailbox = _lanes(request, rank), Mailbox.open(path)
    while commands.recv() == "run":
        commands.send(Carrier(endpoint, lanes, mailbox, {}).run(120.0))


def _lanes(request: Request, rank: int) -> Lanes:
    """What a rank exchanges with others; what stays where it is has no part in the comparison."""
    plan = dataclasses.replace(plan_rank(request, rank), local=())
    return Lanes.of(schedule_of(request, plan), rank, request.places, request.ring_bytes)


class _Raw:
    """The same messages from and to plain buffers, nothing packed."""

    def __init__(self, world: Any, schedule: Schedule):
        self._world, self._schedule = world, schedule
        size = max((m.num_bytes for m in schedule.outgoing + schedule.incoming), default=1)
        self._out = np.ones(size, np.uint8)
        self._into = np.ones((16, size), np.uint8)
        self._all_into = [np.ones(m.num_bytes, np.uint8) for m in schedule.incoming]
        self._all_out = [np.ones(m.num_bytes, np.uint8) for m in schedule.outgoing]

    def by_round(self, number: int) -> None:
        """Round by round, part by part: send and receive posted together, both waited for."""
        from mpi4py import MPI

        steps: dict[tuple[int, int], list[Any]] = {}
        for m in self._schedule.incoming:
            steps.setdefault((m.round, m.part), []).append(
                lambda m=m: self._world.Irecv(self._into[m.part % 16, : m.num_bytes], m.peer, m.part % 32000)
            )
        for m in self._schedule.outgoing:
            steps.setdefault((m.round, m.part), []).append(
                lambda m=m: self._world.Isend(self._out[: m.num_bytes], m.peer, m.part % 32000)
            )
        for step in sorted(steps):
            MPI.Request.Waitall([post() for post in steps[step]])

    def at_once(self, number: int) -> None:
        """Everything posted, then waited for."""
        from mpi4py import MPI

        requests = [
            self._world.Irecv(buffer, m.peer, (m.round * 37 + m.part) % 32000)
            for m, buffer in zip(self._schedule.incoming, self._all_into)
        ]
        requests += [
            self._world.Isend(buffer, m.peer, (m.round * 37 + m.part) % 32000)
            for m, buffer in zip(self._schedule.outgoing, self._all_out)
        ]
        MPI.Request.Waitall(requests)


# ---- weights to every node

TINY = dict(
    model_type="qwen2", num_hidden_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=192, vocab_size=64, tie_word_embeddings=True, torch_dtype="float32",
)  # fmt: skip


def sync(work: Path) -> None:
    """One agent under mpirun: weights of a tiny model from two owners to the staged model of each of four nodes."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    answer = asyncio.run(_sync(work, MPI.COMM_WORLD))
    everybody = MPI.COMM_WORLD.gather(answer)
    if everybody is not None:
        phases = {
            name: statistics.median(max(a["phases"][i][name] for a in everybody) for i in range(len(answer["phases"])))
            for name in everybody[0]["phases"][0]
        }
        figures = {
            "parameters": everybody[0]["parameters"],
            "median_ms": statistics.median(answer["ms"]),
            "fastest_ms": min(answer["ms"]),
            "first_ms": answer["first_ms"],
            "phases_ms": {name: 1e3 * value for name, value in phases.items()},
        }
        (work / "result.json").write_text(json.dumps(figures))
    MPI.COMM_WORLD.Barrier()


async def _sync(work: Path, world: Any) -> dict[str, Any]:
    import msgspec
    import zmq
    import zmq.asyncio
    from mpi4py import MPI

    from dynarl.agent.remapper import Remapper
    from dynarl.agent.transitions import Transitions
    from dynarl.rpc import Link
    from dynarl.slurm.environ import for_worker
    from dynarl.vps.layout import EngineLayout

    rank, nodes = world.Get_rank(), list(range(RANKS))
    socket = zmq.asyncio.Context().socket(zmq.ROUTER)
    address = f"ipc://{work}/agent-{rank}"
    socket.bind(address)
    up = asyncio.Event()

    class Events:
        def event_up(self, peer: str, **_: Any) -> None:
            up.set()

    link = Link(socket, Events(), routed=True)
    serving = asyncio.ensure_future(link.serve())
    program = [
        sys.executable,
        "-m",
        "dynarl.bench.vps_worker",
        "--socket",
        address,
        "--name",
        "w0",
        "--parent",
        str(os.getpid()),
    ]
    worker = subprocess.Popen(
        program, env=for_worker(os.environ, {}) | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    )
    await up.wait()
    transitions = Transitions(
        rank, Remapper(world), link.call, lambda device: "w0", lambda name: worker.pid, work / f"node{rank}"
    )
    owners, everywhere = TrainLayout(dp=2, ranks=(0, 1)), EngineLayout(dp=RANKS, ranks=range(RANKS, 2 * RANKS))
    request = Request(TINY, describe(owners), describe(everywhere), ["param"], RANKS, 1)
    plain, times, phases = msgspec.to_builtins(request), [], []
    for number in range(1, 42):
        world.Barrier()
        began, cpu = time.perf_counter(), time.process_time()
        prepared = await transitions.prepare(plain, nodes, 30.0)
        path = work / f"node{rank}" / f"v{number}" / "model.safetensors"
        parts = await transitions.run(prepared["key"], number, nodes, 30.0, destination=str(path), verify=True)
        await transitions.finish(prepared["key"], 30.0)
        times.append(world.allreduce(1e3 * (time.perf_counter() - began), MPI.MAX))
        parts.pop("digests")
        phases.append(parts | {"prepare_s": prepared["seconds"], "agent_cpu_s": time.process_time() - cpu})
    worker.terminate()
    worker.wait()
    transitions.close()
    serving.cancel()
    return {"ms": times[1:], "first_ms": times[0], "phases": phases[1:], "parameters": request.spec.parameters}


PARTS: dict[str, Callable[[Path], None]] = {"wire": wire, "sync": sync}


def main() -> None:
    parser = argparse.ArgumentParser(description="Transitions between four processes, against baselines")
    parser.add_argument("part", choices=sorted({**PARTS, **TORCH_PARTS}))
    parser.add_argument("--work", type=Path, help="directory of a run under way (set for its ranks)")
    parser.add_argument("--link-rate", help="rate of the network between the ranks, such as 4gbit; needs root")
    parser.add_argument("--tcp", action="store_true", help="MPI through the loopback device")
    args = parser.parse_args()
    if args.work is not None:
        PARTS[args.part](args.work)
    else:
        print(json.dumps(run(args.part, args.link_rate, args.tcp), indent=2))


if __name__ == "__main__":
    main()
