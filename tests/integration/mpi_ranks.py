"""Program of one agent under mpirun: moves address-coded state with worker processes of its own, for test_mpi_exchange.

    mpirun -n 4 python mpi_ranks.py SCENARIO DIRECTORY

Prints one JSON line per rank.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mpi4py  # noqa: E402

mpi4py.rc.threads = True
mpi4py.rc.thread_level = "funneled"

from numpy_ends import Arrays  # noqa: E402

from dynarl.agent.remapper import PhaseTimeout, Remapper  # noqa: E402
from dynarl.agent.transitions import Transitions  # noqa: E402
from dynarl.parent import die_with_parent  # noqa: E402
from dynarl.transport import carrier  # noqa: E402
from dynarl.transport.planning import Request, describe  # noqa: E402
from dynarl.transport.worker_side import TransitionSide  # noqa: E402
from dynarl.vps.layout import EngineLayout  # noqa: E402
from dynarl.vps.train_layout import TrainLayout  # noqa: E402
from dynarl.wire import CallError  # noqa: E402

# The model is tiny; so that there is something to be read in place between the ranks of a node.
carrier.IN_PLACE_BYTES = 256

MODEL = dict(
    model_type="qwen2", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, vocab_size=131, tie_word_embeddings=True, torch_dtype="bfloat16",
)  # fmt: skip


class Side(TransitionSide):
    """A worker with numpy arrays. `dies`: in the middle of a run."""

    def __init__(self, dies: bool):
        self.dies, self.last = dies, None

    def open_endpoint(self, request, rank, made):
        arrays = Arrays.of_layouts(request.spec, rank, *request.layouts(), request.kinds)
        if self.dies:
            arrays.unpack = arrays.pack = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        return arrays

    def endpoint_done(self, request, endpoint, committed):
        self.last = endpoint, committed

    def do_look(self):
        endpoint, committed = self.last
        untouched = all(len(held) for held in endpoint.source.values())
        return {"wrong": len(endpoint.wrong()), "committed": committed, "source_kept": untouched}


def serve(connection, dies: bool) -> None:
    die_with_parent()
    side = Side(dies)
    while True:
        method, args = connection.recv()
        try:
            connection.send((getattr(side, f"do_{method}")(**args), None))
        except Exception as error:
            connection.send((None, f"{type(error).__name__}: {error}"))


class Workers:
    """Stands in for the supervisor and the link to the workers."""

    def __init__(self, devices: int, dying: int | None):
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = {}, {}
        for device in range(devices):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, device == dying), daemon=True)
            process.start()
            theirs.close()
            self.pipes[f"w{device}"], self.processes[f"w{device}"] = ours, process

    async def call(self, name, method, timeout_s=None, **args):
        pipe, process = self.pipes[name], self.processes[name]
        end = time.monotonic() + (timeout_s or 120)
        try:
            pipe.send((method, args))
            while not pipe.poll():
                if not process.is_alive():
                    raise CallError(f"{name} is gone")
                if time.monotonic() > end:
                    raise TimeoutError(f"{name}: no answer to {method}")
                await asyncio.sleep(0.0005)
            value, error = pipe.recv()
        except (EOFError, OSError):
            raise CallError(f"{name} is gone") from None
        if error:
            raise CallError(error)
        return value


SCENARIOS = {
    # devices per node, kinds, source, destination
    "trainer": (1, TrainLayout(tp=2, dp=2), TrainLayout(tp=1, pp=2, dp=2), ["param", "master", "exp_avg"]),
    "two devices": (2, TrainLayout(tp=2, pp=2, dp=2), TrainLayout(tp=4, dp=2), ["param", "master"]),
    "sync": (1, TrainLayout(tp=2, ranks=(0, 1)), EngineLayout(dp=4, ranks=(4, 5, 6, 7)), ["param"]),
    "one way": (1, TrainLayout(ranks=(0,)), EngineLayout(dp=1, ranks=(5,)), ["param"]),
}


async def again(transitions, plain, key, nodes, staging, scenario, world, result) -> None:
    """After a fault that all processes survived: the same transition, this time to the end."""
    target = str(staging / "v9" / "model.safetensors") if scenario == "sync" else None
    if "NoStagingMemory" in result.get("error", ""):
        transitions._directory = Path(sys.argv[2]) / "elsewhere"
    result["prepared_again"] = not (await transitions.prepare(plain, nodes, 90.0))["cached"]
    world.Barrier()
    await transitions.run(key, 99, nodes, 90.0, destination=target)
    await transitions.finish(key, 90.0)


async def late(transitions, key, nodes, staging, directory, index) -> bool:
    """A run that all agents but the first enter late. Returns whether all had entered when this one was done."""
    if index:
        await asyncio.sleep(0.3)
    (directory / f"entered-{index}").touch()
    await transitions.run(key, 2, nodes, 90.0, destination=str(staging / "v2" / "model.safetensors"))
    entered = len(list(directory.glob("entered-*")))
    await transitions.finish(key, 90.0)
    return entered == len(nodes)


async def main(scenario: str, directory: Path) -> dict:
    # The workers are forked before MPI is started.
    fault = os.environ.get("FAULT", "")
    index = int(os.environ["OMPI_COMM_WORLD_RANK"])
    devices, source, destination, kinds = SCENARIOS[scenario]
    staged = isinstance(destination, EngineLayout)
    workers = Workers(devices, 0 if fault == "die" and index == 1 else None)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    nodes = list(range(world.Get_size()))
    staging = Path(os.environ.get("SMALL", directory)) if index == 1 else directory
    staging = staging / f"node{index}"
    transitions = Transitions(
        index,
        Remapper(world),
        workers.call,
        lambda device: f"w{device}",
        lambda name: workers.processes[name].pid,
        staging,
    )
    request = Request(
        MODEL, describe(source), describe(destination), kinds, len(nodes), devices,
        ring_bytes=int(os.environ.get("RING", 1 << 15)), piece_bytes=1 << 12,
    )  # fmt: skip
    import msgspec

    plain = msgspec.to_builtins(request)
    result: dict = {"rank": index}
    target = str(staging / "v1" / "model.safetensors") if staged else None
    key = request.key
    try:
        first = second = None
        try:
            first = await transitions.prepare(plain, nodes, 90.0)
            second = await transitions.prepare(plain, nodes, 90.0)
        finally:
            # The vote: nobody runs what another could not prepare.
            everybody_ready = all(world.allgather(second is not None))
        if not everybody_ready:
            raise ValueError("another node was not ready")
        result["cached"] = [first["cached"], second["cached"]]
        result["phases"] = await transitions.run(
            key, 1, nodes, float(os.environ.get("LIMIT", 90)), destination=target, verify=True
        )
        if scenario == "one way":
            await transitions.finish(key, 90.0)
            result["all_entered"] = await late(transitions, key, nodes, staging, directory, index)
        result["times_ms"] = []
        if fault == "digest" and index == 1:
            raise ValueError("staged: digest differs")
        if not fault and scenario != "one way":
            await transitions.finish(key, 90.0)
            for number in range(2, 8):
                target = str(staging / f"v{number}" / "model.safetensors") if staged else None
                world.Barrier()
                began = time.perf_counter()
                await transitions.prepare(plain, nodes, 90.0)
                await transitions.run(key, number, nodes, 90.0, destination=target)
                await transitions.finish(key, 90.0)
                result["times_ms"].append(round(1e3 * (time.perf_counter() - began), 2))
    except (CallError, PhaseTimeout, OSError, ValueError, RuntimeError) as error:
        result["error"] = f"{type(error).__name__}: {error}"
    # What the controller does: an error anywhere means an abort everywhere.
    if fault:
        await transitions.abort(key, "another node failed", nodes, 60.0)
        result["left"] = (
            sorted(str(p.relative_to(staging)) for p in staging.rglob("*") if p.is_file()) if staging.exists() else []
        )
        if fault != "die":
            os.environ.pop("SMALL", None)
            await again(transitions, plain, key, nodes, staging, scenario, world, result)
    result["looks"] = []
    for name in workers.pipes:
        try:
            result["looks"].append(await workers.call(name, "look", timeout_s=60))
        except (CallError, TimeoutError, TypeError) as error:
            result["looks"].append(str(error))
    if scenario == "sync" and not fault:
        from numpy_ends import coded

        from dynarl.transport.staged import StagedModel
        from dynarl.vps.digest import digest_weights

        model = StagedModel.open(Path(target), request.spec)
        whole = [tuple((0, n) for n in t.shape) for t in request.spec.tensors]
        result["staged_wrong"] = sum(
            not (model.arrays[t] == coded(request.spec, "param", t, box)).all() for t, box in enumerate(whole)
        )
        result["same_digest"] = result["phases"]["digests"]["staged"] == digest_weights(Path(target).parent)
    transitions.close()
    return result


if __name__ == "__main__":
    answer = asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
    (Path(sys.argv[2]) / f"result{answer['rank']}.json").write_text(json.dumps(answer))
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
