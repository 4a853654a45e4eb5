"""Executes a plan between the ranks of a torch process group: NCCL between GPUs, gloo between CPUs.

A rank goes through the steps of its plan: it keeps what it has, exchanges with one peer per round, derives what follows
from what has arrived. In a round both sides post their send and their receive before either waits, and rounds come in
one order on all ranks, so nobody ever waits for an operation that the other side will not post. Staging is one buffer
for each direction, as large as the largest message of a round, or as `limit_bytes` where messages are larger: then both
sides cut them by the same rule.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dynarl.transport.endpoint import Fragment, num_bytes
from dynarl.vps.box import volume
from dynarl.vps.spec import ModelSpec

LIMIT_BYTES = 64 << 20
LIMIT_S = 300.0


class TensorEndpoint(Protocol):
    """An endpoint that packs on the device (see transport.endpoint)."""

    def pack_tensor(self, fragments: Sequence[Fragment], out: torch.Tensor) -> None: ...

    def unpack_tensor(self, fragments: Sequence[Fragment], data: torch.Tensor) -> None: ...

    def copy_local(self, local: Any) -> None: ...


def execute(
    plan: Any,
    endpoint: TensorEndpoint,
    rank: int,
    group: dist.ProcessGroup,
    positions: Mapping[int, int],
    device: torch.device,
    limit_bytes: int = LIMIT_BYTES,
    limit_s: float = LIMIT_S,
) -> int:
    """Do all that `plan` (a dynarl.vps.plan.Plan) asks of `rank`. All its ranks must call. Returns bytes received.

    positions: of each rank of the plan in `group`. Raises RuntimeError when a peer is gone, or has not come within
    `limit_s` from the start on: it may wait for one that is gone. The group is of no use then.
    """
    deadline = time.monotonic() + limit_s
    staging = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
    received = 0
    for step in plan.steps(rank):
        endpoint.copy_local(Keep(fragment) for fragment in step.keep)
        for exchange in step.exchanges:
            out, into = (list(_messages(plan.spec, some, limit_bytes)) for some in (exchange.out, exchange.into))
            for i in range(max(len(out), len(into))):
                received += _exchange(
                    plan.spec,
                    endpoint,
                    out[i] if i < len(out) else [],
                    into[i] if i < len(into) else [],
                    staging,
                    group,
                    positions[exchange.peer],
                    deadline,
                )
        endpoint.copy_local(Derive(fragment) for fragment in step.derive)
    return received


class Keep:
    """A fragment that stays on this rank."""

    how = "keep"

    def __init__(self, fragment: Fragment):
        self.fragment = fragment


class Derive(Keep):
    """A fragment that is cast from its master."""

    how = "derive"


def _exchange(
    spec: ModelSpec,
    endpoint: TensorEndpoint,
    out: Sequence[Fragment],
    into: Sequence[Fragment],
    staging: list[torch.Tensor],
    group: dist.ProcessGroup,
    peer: int,
    deadline: float,
) -> int:
    sending, receiving = (num_bytes(spec, some) for some in (out, into))
    for i, size in enumerate((sending, receiving)):
        if len(staging[i]) < size:
            staging[i] = staging[i].new_empty(size)
    if sending:
        endpoint.pack_tensor(out, staging[0][:sending])
    mine, theirs = staging[0][:sending], staging[1][:receiving]
    # NCCL carries out the operations of a pair one after the other unless they are one group: two sends would wait for
    # each other's receive.
    grouped = mine.device.type == "cuda"
    if grouped:
        group._start_coalescing(mine.device)
    works = [group.send([mine], peer, 0)] if sending else []
    if receiving:
        works.append(group.recv([theirs], peer, 0))
    if grouped:
        works = [group._end_coalescing(mine.device)]
    for work in works:
        work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
    if receiving:
        endpoint.unpack_tensor(into, theirs)
    return receiving


def _messages(spec: ModelSpec, fragments: Sequence[Fragment], limit: int) -> Iterator[list[Fragment]]:
    """Fragments cut into messages of at most `limit` bytes (or one row), in order."""
    message: list[Fragment] = []
    size = 0
    for kind, tensor, box in fragments:
        (lo, hi), *rest = box
        row = spec.itemsize(kind) * (volume(tuple(rest)) if rest else 1)
        while lo < hi:
            rows = min(hi - lo, max((limit - size) // row, 0 if message else 1))
            if rows:
                message.append((kind, tensor, ((lo, lo + rows), *rest)))
                lo, size = lo + rows, size + rows * row
            if lo < hi:
                yield message
                message, size = [], 0
    if message:
        yield message
