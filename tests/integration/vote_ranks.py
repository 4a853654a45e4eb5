"""Program of one agent under mpirun: votes, for test_mpi_votes.

    mpirun -n 3 python vote_ranks.py DIRECTORY

Writes a JSON object per rank.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import mpi4py
import numpy as np

mpi4py.rc.threads = True
mpi4py.rc.thread_level = "funneled"

from mpi4py import MPI  # noqa: E402

from dynarl.agent.remapper import TAG_SPACE, PhaseTimeout, Remapper  # noqa: E402

ALL = [0, 1, 2]


async def main(rank: int) -> dict:
    remapper = Remapper(MPI.COMM_WORLD)

    async def vote(epoch: int, digest: int = 7, ranks: list[int] = ALL, ready: bool = True, limit_s: float = 20.0):
        try:
            return list((await remapper.vote(epoch, ranks, ready, digest, limit_s)).values())
        except PhaseTimeout as error:
            return str(error)

    found = {}
    if rank == 0:  # calls nothing of MPI, so nobody can reach it
        time.sleep(1.0)
    found["first comes late"] = await vote(5, limit_s=20.0 if rank == 0 else 0.3)
    others = [np.full(3, -99) for _ in range(1000)]  # they take the memory that is free
    going = asyncio.create_task(remapper.keep_going())
    await asyncio.sleep(1.5)
    found["in use"] = len(remapper._late)
    del others
    found["communicator of that number"] = remapper.communicator(5, ALL).allreduce(rank)
    found["all alike"] = [await vote(6), await vote(6)]
    found["another digest"] = await vote(7, digest=7 + (rank == 2))
    found["not ready"] = await vote(8, ready=rank != 1)
    found["alone"] = await vote(9, ranks=[rank])
    found["late one's tag again"] = await vote(5 + TAG_SPACE, digest=8 + (rank == 2))
    going.cancel()
    return found


if __name__ == "__main__":
    rank = MPI.COMM_WORLD.Get_rank()
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(asyncio.run(main(rank))))
