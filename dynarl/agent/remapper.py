"""MPI between agents, in short bounded phases only: communicators, and votes over them.

An idle agent never sits in an MPI call (MPI polls, and would burn a core): the controller first makes sure that every
member is ready, then all members enter together. Collectives are started non-blocking and tested with a pause, up to a
deadline, so a peer that does not come costs the phase and not the job. Only `Create_group` blocks; a watchdog ends the
agent (and so the step, which the controller relaunches) should it never return.

Between phases MPI is called once in a while: it may still have something to send for a peer that is not done (over a
connection that was just being made, for one).
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

import numpy as np
from mpi4py import MPI

# Highest tag that MPI promises everywhere is 32767.
TAG_SPACE = 32000
# How often MPI is called when nothing goes on.
PROGRESS_S = 0.25


class PhaseTimeout(RuntimeError):
    """An MPI phase did not complete by its deadline."""


class Remapper:
    """Votes over communicators of an epoch's members. Ranks are world ranks."""

    def __init__(self, world: MPI.Intracomm):
        self._world = world
        self._communicators: dict[tuple[int, ...], MPI.Intracomm] = {}

    def communicator(self, epoch: int, ranks: list[int]) -> tuple[MPI.Intracomm, bool]:
        """The communicator of `ranks` (this rank among them) and whether it was built now.

        Built by Create_group, which only the members call, and kept for the next epoch with the same members.
        """
        key = tuple(sorted(ranks))
        if key in self._communicators:
            return self._communicators[key], False
        world_group = self._world.Get_group()
        group = world_group.Incl(key)
        with _watchdog(60.0, f"MPI Create_group of ranks {list(key)} (epoch {epoch})"):
            communicator = self._world.Create_group(group, tag=epoch % TAG_SPACE)
        group.Free()
        world_group.Free()
        self._communicators[key] = communicator
        return communicator, True

    def forget(self, ranks: list[int]) -> None:
        """Drop the communicator of `ranks`: a phase on it was cut short, so the members build a new one together."""
        self._communicators.pop(tuple(sorted(ranks)), None)

    async def keep_going(self) -> None:
        """Let MPI finish what it began, for ever."""
        while True:
            self._world.Iprobe(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
            await asyncio.sleep(PROGRESS_S)

    async def vote(self, epoch: int, ranks: list[int], ready: bool, digest: int, timeout_s: float) -> dict:
        """All members say whether they are ready and which digest they computed (an unsigned 32-bit number).

        Returns {"agreed", "ready", "same_digest", "built"}; `agreed` only if all are ready with one digest.
        """
        communicator, built = self.communicator(epoch, ranks)
        mine = np.array([int(ready), digest, -digest], dtype=np.int64)
        least = np.empty_like(mine)
        request = communicator.Iallreduce(mine, least, op=MPI.MIN)
        await _complete(request, timeout_s, f"vote of epoch {epoch}")
        all_ready, same = bool(least[0]), int(least[1]) == -int(least[2])
        return {"agreed": all_ready and same, "ready": all_ready, "same_digest": same, "built": built}


async def _complete(request: MPI.Request, timeout_s: float, what: str) -> None:
    """Wait without holding up the agent: one that does not answer its controller meanwhile is taken for lost."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.0001
    while not request.Test():
        if time.monotonic() > deadline:
            raise PhaseTimeout(f"{what} did not complete within {timeout_s:.1f} s")
        await asyncio.sleep(pause_s)
        pause_s = min(0.002, pause_s * 1.5)


class _watchdog:
    """Ends the process with a message when the block inside takes longer than `timeout_s`."""

    def __init__(self, timeout_s: float, what: str):
        self._timer = threading.Timer(timeout_s, self._expire, [f"{what} did not return within {timeout_s:g} s"])
        self._timer.daemon = True

    @staticmethod
    def _expire(message: str) -> None:
        print(
            f"dynarl agent: {message}; ending this rank so that the step can be started again",
            file=sys.stderr,
            flush=True,
        )
        os._exit(70)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
