"""Worker process of `dynarl bench vps`: arrays instead of a model, everything else as in a training worker."""

from __future__ import annotations

from typing import Any

from dynarl.bench.arrays import Arrays
from dynarl.roles.worker import Worker, main
from dynarl.transport.planning import RankPlan, Request
from dynarl.transport.worker_side import TransitionSide


class BenchWorker(TransitionSide, Worker):
    role = "training"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._arrays: dict[str, Arrays] = {}

    def open_endpoint(self, request: Request, rank: int, plan: RankPlan) -> Arrays:
        if request.key not in self._arrays:
            self._arrays[request.key] = Arrays(request.spec, rank, *request.layouts(), request.kinds)
        return self._arrays[request.key]


if __name__ == "__main__":
    main(BenchWorker)
