"""The micro-batches of a lease through the stages of a pipeline: all forward, then all backward (GPipe).

Every stage has the samples and knows the shape of what comes, so only hidden states and their gradients travel. What a
stage keeps are the activations of one lease. Between two neighbours all states go up before any gradient comes down;
a send is therefore always met by a receive, also where the operations of a pair are carried out in the order of
posting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Shape = tuple[int, ...]


def run_forward_backward(
    group: dist.ProcessGroup,
    shapes: Sequence[Shape],
    forward: Callable[[int, Tensor | None], Tensor],
    like: Tensor,
) -> None:
    """Run micro-batches 0..len(shapes)-1 through this stage.

    group: the stages in order. shapes: of the hidden states of each micro-batch. forward(i, received): the stage's
    hidden states, on the last stage the loss; received is None on the first. like: dtype and device of hidden states.
    """
    stage, last = group.rank(), group.size() - 1
    received: list[Tensor | None] = []
    made: list[Tensor] = []
    sent: list[tuple[Any, Tensor]] = []  # tensors under way must stay
    for i, shape in enumerate(shapes):
        received.append(_receive(group, stage - 1, shape, like).requires_grad_() if stage else None)
        made.append(forward(i, received[i]))
        if stage < last:
            _send(group, stage + 1, made[i].detach(), sent)
    for i, shape in enumerate(shapes):
        made[i].backward(None if stage == last else _receive(group, stage + 1, shape, like))
        if stage:
            _send(group, stage - 1, received[i].grad, sent)
        made[i] = received[i] = None
    for work, _ in sent:
        work.wait()


def _receive(group: dist.ProcessGroup, peer: int, shape: Shape, like: Tensor) -> Tensor:
    buffer = like.new_empty(shape)
    group.recv([buffer], peer, 0).wait()
    return buffer


def _send(group: dist.ProcessGroup, peer: int, tensor: Tensor, sent: list[tuple[Any, Tensor]]) -> None:
    tensor = tensor.contiguous()
    sent.append((group.send([tensor], peer, 0), tensor))


@torch.no_grad()
def gather_bytes(group: dist.ProcessGroup, mine: bytes, limit: int, device: torch.device) -> list[bytes]:
    """A few bytes of every rank, at all of them. limit: the most that any has; ValueError if this rank has more."""
    if len(mine) > limit:
        raise ValueError(f"{len(mine)} bytes do not fit in {limit}")
    framed = torch.frombuffer(bytearray(len(mine).to_bytes(4, "little") + mine.ljust(limit, b"\0")), dtype=torch.uint8)
    everyone = [torch.empty(limit + 4, dtype=torch.uint8, device=device) for _ in range(group.size())]
    dist.all_gather(everyone, framed.to(device), group=group)
    result = []
    for data in (bytes(tensor.cpu().numpy()) for tensor in everyone):
        result.append(data[4 : 4 + int.from_bytes(data[:4], "little")])
    return result
