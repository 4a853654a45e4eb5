"""MPI between agents, in short bounded phases only: votes, and communicators for moves of state.

An idle agent never sits in an MPI call (MPI polls, and would burn a core): the controller first makes sure that every
member is ready, then all members enter together. What is started is non-blocking and tested with a pause, up to a
deadline, so a peer that does not come costs the phase and not the job. Only `Create_group` blocks; a watchdog ends the
agent (and so the step, which the controller relaunches) should it never return.

A vote takes a message to the first member and one back, and no communicator: members are other ones at almost every
change of roles, and to make a communicator takes many times as long as the vote, during which the agent spins.

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

# Highest tag that MPI promises everywhere is 32767. Votes have tags of their own: Open MPI makes a communicator by
# messages in the world that have the tag which it was given.
TAG_SPACE = FIRST_VOTE_TAG = 16000
# How often MPI is called when nothing goes on.
PROGRESS_S = 0.25


class PhaseTimeout(RuntimeError):
    """An MPI phase did not complete by its deadline."""


class Remapper:
    """Votes of an epoch's members, and communicators. Ranks are world ranks; nobody else sends messages in the world."""

    def __init__(self, world: MPI.Intracomm):
        self._world = world
        self._communicators: dict[tuple[int, ...], MPI.Intracomm] = {}
        self._late: list[MPI.Request] = []  # of votes that were cut short; they keep the memory that MPI still uses

    def communicator(self, number: int, ranks: list[int]) -> MPI.Intracomm:
        """The communicator of `ranks` (this rank among them). number: of the transition that it is for.

        Built by Create_group, which only the members call, and kept for the next transition with the same members.
        """
        key = tuple(sorted(ranks))
        if key in self._communicators:
            return self._communicators[key]
        world_group = self._world.Get_group()
        group = world_group.Incl(key)
        with _watchdog(60.0, f"MPI Create_group of ranks {list(key)} (transition {number})"):
            communicator = self._world.Create_group(group, tag=number % TAG_SPACE)
        group.Free()
        world_group.Free()
        self._communicators[key] = communicator
        return communicator

    def forget(self, ranks: list[int]) -> None:
        """Drop the communicator of `ranks`: a phase on it was cut short, so the members build a new one together."""
        self._communicators.pop(tuple(sorted(ranks)), None)

    async def keep_going(self) -> None:
        """Let MPI finish what it began, for ever."""
        while True:
            self._world.Iprobe(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
            self._late = [request for request in self._late if not request.Test()]
            await asyncio.sleep(PROGRESS_S)

    async def vote(self, epoch: int, ranks: list[int], ready: bool, digest: int, timeout_s: float) -> dict:
        """All members say whether they are ready and which digest they computed (an unsigned 32-bit number).

        The digest depends on the epoch: what is left of a vote that was cut short is never taken for a yes.
        Returns {"agreed", "ready", "same_digest"}; `agreed` only if all are ready with one digest. Raises PhaseTimeout.
        """
        first, *others = sorted(ranks)
        mine = np.array([int(ready), digest, -digest], dtype=np.int64)
        least, tag, what = mine.copy(), FIRST_VOTE_TAG + epoch % TAG_SPACE, f"vote of epoch {epoch}"
        deadline = time.monotonic() + timeout_s
        if self._world.rank == first:
            told = np.empty((len(others), len(mine)), dtype=np.int64)
            received = [self._world.Irecv(row, rank, tag) for row, rank in zip(told, others)]
            await self._complete(received, deadline, what)
            least = np.min([mine, *told], axis=0)
            await self._complete([self._world.Isend(least, rank, tag) for rank in others], deadline, what)
        else:
            requests = [self._world.Isend(mine, first, tag), self._world.Irecv(least, first, tag)]
            await self._complete(requests, deadline, what)
        all_ready, same = bool(least[0]), np.array_equal(least[1:], mine[1:])
        return {"agreed": all_ready and same, "ready": all_ready, "same_digest": same}

    async def _complete(self, requests: list[MPI.Request], deadline: float, what: str) -> None:
        """Wait without holding up the agent: one that does not answer its controller meanwhile is taken for lost."""
        pause_s = 0.0001
        while not MPI.Request.Testall(requests):
            if time.monotonic() > deadline:
                for request in requests:  # a message may still be on its way out: Open MPI takes none back
                    request.Cancel()
                self._late += requests
                raise PhaseTimeout(f"{what} did not complete in time")
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
