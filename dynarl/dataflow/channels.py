"""Channels of complete groups between two components, which pass them on in chunks.

A chunk of 1 lets every group through at once: the components work side by side. `all` holds everything back until
upstream has ended: they work in turn. In between, a larger chunk wakes downstream less often, and later::

    put a, put b            chunk 3: gathered, not offered
    put c                   a, b, c are offered
    put d, the last one     the end of the data: d is offered as well, alone

What has been offered stays so: a group that is lost with a worker and comes back is not gathered again.

Pure: no clock, no sockets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from dynarl.hypergraph.workflow import Workflow


class Channel:
    """One channel of one iteration. chunk: groups; total: that will be put before upstream has ended."""

    def __init__(self, chunk: int | Literal["all"], total: int):
        self._chunk, self._total = total if chunk == "all" else chunk, total
        self._gathered: dict[str, None] = {}  # ordered
        self._offered: set[str] = set()

    @property
    def offered(self) -> Collection[str]:
        """Names of the groups that downstream may have."""
        return self._offered

    @property
    def num_gathered(self) -> int:
        """Groups that are held back until their chunk is full."""
        return len(self._gathered)

    def put(self, name: str) -> list[str]:
        """Upstream is done with a group. Returns those that are offered from now on, in the order of coming."""
        if name in self._offered or name in self._gathered:
            return []
        self._gathered[name] = None
        ended = len(self._offered) + len(self._gathered) == self._total
        if len(self._gathered) < self._chunk and not ended:
            return []
        chunk, self._gathered = list(self._gathered), {}
        self._offered.update(chunk)
        return chunk


def into(workflow: Workflow, role: str, chunks: Mapping[str, int | Literal["all"]], total: int) -> Channel:
    """The channel from which `role` takes groups. chunks: by name of the channel; where it is not named, 1.

    >>> from dynarl.hypergraph.workflow import declared
    >>> channel = into(declared("grpo"), "inference", {"trajectories": 2}, total=3)
    >>> channel.put("g0"), channel.put("g1"), channel.put("g2")
    ([], ['g0', 'g1'], ['g2'])
    """
    names = [name for name in workflow.taken_by(role) if name in workflow.chunked]
    return Channel(chunks.get(names[0], 1) if names else 1, total)
