"""Program of the MPI rank on each node: `python -m mpi4py -m dynarl.agent --controller tcp://... --run-dir DIR
--attempt N`.

Started under `python -m mpi4py`, so that an uncaught exception aborts the world instead of leaving the others waiting.
The role comes in DYNARL_ROLE (MPI's APPNUM is 0 in every component), the node name from slurmd.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

# Nothing may die of these before its handlers are in place: Slurm sends USR1 before the time limit.
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.signal(signal.SIGUSR2, signal.SIG_IGN)

EXIT_MPI = 71
# Agents end one after another: between two, and at most from the first to the last.
APART_S, ALL_APART_S = 0.2, 2.0
# sun_path holds 108 bytes; "/agent.sock" and a terminator go on top.
MAX_SCRATCH_PATH = 90


class WorldError(RuntimeError):
    """MPI came up, but not as the world that Slurm started."""


def init_mpi(timeout_s: float):
    """MPI_Init with a watchdog, and the check that this rank is in the world that was asked for.

    Returns the world communicator. Raises WorldError.
    """
    import mpi4py

    mpi4py.rc.initialize = False
    # Agents call MPI from one thread; the watchdog's thread never does.
    mpi4py.rc.finalize = False

    def expire() -> None:
        print(
            f"dynarl agent: MPI_Init did not return within {timeout_s:g} s. The step's --mpi plugin and the MPI "
            "library probably do not speak the same PMI (try `srun --mpi=list`, set cluster.mpi); MPICH with pmi2 "
            "hangs in heterogeneous steps.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_MPI)

    timer = threading.Timer(timeout_s, expire)
    timer.daemon = True
    timer.start()
    from mpi4py import MPI

    MPI.Init_thread(MPI.THREAD_FUNNELED)
    timer.cancel()
    asked = int(os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS") or 1)
    size = MPI.COMM_WORLD.Get_size()
    if size != asked:
        raise WorldError(
            f"the MPI world has {size} rank(s), Slurm started {asked}: every rank is alone. The library "
            f"({MPI.Get_library_version().splitlines()[0].split(',')[0]}) does not speak the step's --mpi plugin; "
            "see `srun --mpi=list` and set cluster.mpi to pmix")
    return MPI.COMM_WORLD


def make_scratch(configured: str | None, job: str, node: str) -> Path:
    """A private directory for sockets whose path is short enough for a socket address."""
    for base in (configured, os.environ.get("TMPDIR"), "/tmp"):
        if base and os.path.isdir(base) and len(base) + len(job) + len(node) + 20 < MAX_SCRATCH_PATH:
            return Path(tempfile.mkdtemp(prefix=f"dynarl-{job}-{node}-", dir=base))
    raise OSError("no scratch directory with a path short enough for sockets: set cluster.scratch to a short one")


def own_address(interface: str | None, node: str) -> str:
    """The IPv4 address that other nodes reach this one by: of `interface` if given, else of the node's name."""
    if interface:
        import fcntl
        import struct

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            packed = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        return socket.inet_ntoa(packed[20:24])
    return socket.gethostbyname(node)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--controller", required=True)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--scratch")
    parser.add_argument("--staging", default="/dev/shm")
    parser.add_argument("--max-requeues", type=int, default=0)
    parser.add_argument("--interface")
    parser.add_argument("--init-timeout-s", type=float, default=60.0)
    args = parser.parse_args()
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    job = os.environ.get("SLURM_JOB_ID", "0")
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {node} agent %(levelname)s %(message)s")
    world = init_mpi(args.init_timeout_s)

    from mpi4py import MPI

    from dynarl import rundir
    from dynarl.agent import orphan
    from dynarl.agent.agent import Agent
    from dynarl.agent.remapper import Remapper
    from dynarl.slurm.cli_client import CliClient  # pyslurm must not be loaded beside MPI

    watch = orphan.ControllerWatch(rundir.journal(args.run_dir))
    agent = Agent(
        node=node,
        home=os.environ["DYNARL_ROLE"],
        rank=world.Get_rank(),
        remapper=Remapper(world),
        controller=args.controller,
        watch=watch,
        key_dir=rundir.keys(args.run_dir),
        log_dir=rundir.logs(args.run_dir, args.attempt),
        scratch=make_scratch(args.scratch, job, node),
        staging=Path(args.staging) / f"dynarl-{os.getuid()}-{job}-{node}",
        host=own_address(args.interface, node),
        mpi_library=MPI.Get_library_version().splitlines()[0].strip("\0 "),
        world_size=world.Get_size(),
    )

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, agent.request_stop)
        loop.add_signal_handler(signal.SIGINT, agent.request_stop)
        agent.start()
        await agent.run()

    try:
        asyncio.run(serve())
    finally:
        agent.close()
    if watch.gone:
        orphan.settle(CliClient(), args.run_dir, node, args.max_requeues, watch, os.environ)
    # All agents are told to stop together, so this does not wait long; a lone one must not wait for the others for
    # ever.
    finalizer = threading.Timer(5.0, os._exit, [0])
    finalizer.daemon = True
    finalizer.start()
    rank, size = world.Get_rank(), world.Get_size()
    MPI.Finalize()
    # Where two components of a step end at the same moment, Slurm's srun may never end (22.05: for each component it stops
    # the PMIx plugin's one abort agent, and two threads that join the same one at once wait for ever).
    time.sleep(rank * min(APART_S, ALL_APART_S / size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
