"""Work handed to a worker, done one micro-batch at a time in the order in which it arrived.

A lease is a set of samples that is either worked off completely or given back untouched: once its first micro-batch has
run it will be finished. That is what makes "trained exactly once" a fact and not a hope.

Where several workers do a lease together, all of them must run the same leases, though they hear of a cancellation at
different moments. The first of them decides: before each lease it tells the others whether to run or to drop it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist

from dynarl.rl.batching import pack
from dynarl.roles.training.microbatch import Sample, num_tokens

RUN, DROP = 1, 0
Lease = int | str


class LeaseQueue:
    """`run(batches)` does some micro-batches of a lease, one or all, and returns their results; `done(lease, results)`
    follows a lease's last one."""

    def __init__(self, run: Callable[[list[list[Sample]]], list[Any]], done: Callable[[Lease, list[Any]], None]):
        self._run, self._done = run, done
        self._waiting: deque[tuple[Lease, list[Sample]]] = deque()
        self._cancelled: set[Lease] = set()
        self._lease: Lease | None = None
        self._batches: deque[list[Sample]] = deque()
        self._results: list[Any] = []
        self._finished: list[Lease] = []

    def add(self, lease: Lease, samples: list[Sample]) -> None:
        if not samples:
            raise ValueError(f"lease {lease!r} holds no samples")
        self._waiting.append((lease, samples))

    def cancel(self, leases: Sequence[Lease]) -> list[Lease]:
        """Give back those of `leases` that have not been started. The first worker of a replica has the say."""
        given_back = [lease for lease, _ in self._waiting if lease in set(leases) - self._cancelled]
        self._cancelled.update(given_back)
        return given_back

    def work(self, cap_tokens: int, group: dist.ProcessGroup | None, whole: bool = False) -> bool:
        """Run one micro-batch, or all of a lease. Returns whether there is more to do. group: who does it together."""
        if self._lease is None and not self._start_next(cap_tokens, group):
            return False
        batches = [self._batches.popleft() for _ in range(len(self._batches) if whole else 1)]
        self._results.extend(self._run(batches))
        if not self._batches:
            lease, results, self._lease, self._results = self._lease, self._results, None, []
            self._finished.append(lease)
            self._done(lease, results)
        return bool(self._batches or self._waiting)

    def drain(self, cap_tokens: int, group: dist.ProcessGroup | None, whole: bool = False) -> list[Lease]:
        """Work everything off; returns the leases finished since the last drain."""
        while self.work(cap_tokens, group, whole):
            pass
        finished, self._finished = self._finished, []
        return finished

    def _start_next(self, cap_tokens: int, group: dist.ProcessGroup | None) -> bool:
        while self._waiting:
            lease, samples = self._waiting.popleft()
            verdict = self._agree(DROP if lease in self._cancelled else RUN, group)
            self._cancelled.discard(lease)
            if verdict == RUN:
                self._lease = lease
                # Sums do not care for the order, and samples of like length leave little padding.
                samples = sorted(samples, key=num_tokens)
                cuts = pack([num_tokens(sample) for sample in samples], cap_tokens)
                self._batches.extend([samples[index] for index in cut] for cut in cuts)
                return True
        return False

    @staticmethod
    def _agree(verdict: int, group: dist.ProcessGroup | None) -> int:
        if group is None or group.size() == 1:
            return verdict
        message = torch.tensor([verdict], device="cuda" if dist.get_backend(group) == "nccl" else "cpu")
        dist.broadcast(message, group_src=0, group=group)
        return int(message)
