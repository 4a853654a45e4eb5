"""Summing the gradients of borrowed workers into an owner, along a binomial tree of sends and receives.

With members [root, a, b, c, d]::

    round 1   a -> root   c -> b
    round 2   b -> root
    round 4   d -> root

The tree, and with it the order of the additions, depends on the member list alone. Only members take part; the group is
not registered with torch, so a worker that comes or goes costs a new group and no new world.
"""

from __future__ import annotations

from typing import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Two receive buffers of this size are all the memory a reduction needs; large enough to hide the latency of a message.
CHUNK_ELEMENTS = 4 << 20


def tree_sum(buffers: Sequence[Tensor], members: Sequence[int], group: dist.ProcessGroup, layout: int) -> None:
    """Add the flat `buffers` of all members into those of members[0]; everybody else's are zeroed afterwards.

    members: ranks in `group`, this one among them. layout: a number that is equal where the buffers mean the same;
    members that disagree raise ValueError instead of adding apples to pears.
    """
    position = list(members).index(group.rank())
    step = 1
    while step < len(members):
        if position % (2 * step) == step:
            _send(buffers, members[position - step], group, layout)
            break
        if position + step < len(members):
            _receive_and_add(buffers, members[position + step], group, layout)
        step *= 2
    if position:
        for buffer in buffers:
            buffer.zero_()


def _greet(buffers: Sequence[Tensor], peer: int, group: dist.ProcessGroup, layout: int, first: bool) -> None:
    """Exchange what the buffers are, so that both sides refuse at once and neither waits for the other."""
    mine = torch.tensor([layout, *(buffer.numel() for buffer in buffers)], device=buffers[0].device)
    theirs = torch.empty_like(mine)
    for sends in (first, not first):
        (group.send([mine], peer, 0) if sends else group.recv([theirs], peer, 0)).wait()
    if not torch.equal(mine, theirs):
        raise ValueError(
            f"gradient buffers of reduction rank {peer} are laid out as {theirs.tolist()}, mine as {mine.tolist()}"
        )


def _send(buffers: Sequence[Tensor], peer: int, group: dist.ProcessGroup, layout: int) -> None:
    _greet(buffers, peer, group, layout, first=True)
    for buffer in buffers:
        for chunk in buffer.split(CHUNK_ELEMENTS):
            group.send([chunk], peer, 0).wait()


def _receive_and_add(buffers: Sequence[Tensor], peer: int, group: dist.ProcessGroup, layout: int) -> None:
    _greet(buffers, peer, group, layout, first=False)
    for buffer in buffers:
        chunks = buffer.split(CHUNK_ELEMENTS)
        scratch = [torch.empty_like(chunks[0]) for _ in range(min(2, len(chunks)))]
        pending = group.recv([scratch[0][: len(chunks[0])]], peer, 0)
        for index, chunk in enumerate(chunks):
            pending.wait()
            arrived = scratch[index % 2][: len(chunk)]
            if index + 1 < len(chunks):
                # The next chunk travels while this one is added.
                pending = group.recv([scratch[(index + 1) % 2][: len(chunks[index + 1])]], peer, 0)
            chunk.add_(arrived)
