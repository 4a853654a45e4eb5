"""Trainer state on disk: what each owner holds, with the place of every box in the model written beside it. No pickle.

    DIR/state/rank-NNNNN.data, rank-NNNNN.json    see transport.files

Masters and moments are saved, and of buffers, which have no master, the values; parameters are cast from masters on the
way back. A checkpoint may be restored into any layout: every owner reads the boxes that it needs. Saving copies the
state and returns; a thread writes the copy while training goes on. Whoever asked for the checkpoint marks it complete
once every owner has said that its part is on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynarl.roles.training.shard import Shard
from dynarl.roles.training.state import Bound, State
from dynarl.transport.files import CheckpointReader, CheckpointWriter, fill, owned_once
from dynarl.transport.messages import Fragment
from dynarl.vps.layout import Layout
from dynarl.vps.spec import ModelSpec

KINDS = ("master", "exp_avg", "exp_avg_sq")
BUFFER_BYTES = 8 << 20


class CheckpointError(RuntimeError):
    """A checkpoint cannot be restored into this trainer."""


class Saver:
    """Writes the checkpoints of one shard. The memory of the copy is kept for the next one."""

    def __init__(self, shard: Shard):
        self.shard = shard
        spec, layout, rank = shard.arch.spec, shard.layout, shard.rank
        fragments = owned_once(spec, layout, rank, KINDS)
        fragments += [f for f in owned_once(spec, layout, rank, ["param"]) if spec.tensors[f.tensor].buffer]
        self._writer = CheckpointWriter(spec, rank, fragments)
        self._writing: Future | None = None

    def save(self, directory: str) -> None:
        """Copy the state now and write it below `directory` from a thread."""
        self._writer.snapshot(State(self.shard, None), Bound(self.shard).scalars())
        self._writing = self._writer.write(Path(directory) / "state", self.shard.layout.ranks)

    def saved(self) -> bool:
        """Whether it is on disk by now. Raises what went wrong."""
        if self._writing is None:
            raise RuntimeError("save has not been called")
        if self._writing.done():
            self._writing.result()
        return self._writing.done()

    def close(self) -> None:
        self._writer.close()


def restore(shard: Shard, directory: str) -> None:
    """Take state and counters of a checkpoint; every owner for itself. Raises FileError, CheckpointError."""
    spec = shard.arch.spec
    reader = CheckpointReader(Path(directory) / "state", spec)
    scalars = merged(reader.scalars)
    state = State(None, shard)
    sizes = {kind.name: spec.itemsize(kind.name) for kind in spec.kinds}
    for kind in KINDS:
        fill(reader, state, _pieces(spec, shard.layout, shard.rank, kind), sizes, BUFFER_BYTES)
    parameters = list(_pieces(spec, shard.layout, shard.rank, "param"))
    fill(reader, state, [f for f in parameters if spec.tensors[f.tensor].buffer], sizes, BUFFER_BYTES)
    masters = [f._replace(kind="master") for f in parameters if not spec.tensors[f.tensor].buffer]
    fill(reader, _FromMaster(state), masters, sizes, BUFFER_BYTES)
    Bound(shard).set_scalars(scalars)


def merged(scalars: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Step counters and learning rate, of which each rank wrote those it has. CheckpointError where they differ."""
    steps: dict[str, int] = {}
    rates = {each["lr"] for each in scalars.values()}
    for rank, each in scalars.items():
        for kind, count in each["steps"].items():
            if steps.setdefault(kind, count) != count:
                raise CheckpointError(f"rank {rank} has made {count} steps, others {steps[kind]}")
    if len(rates) != 1:
        raise CheckpointError(f"ranks have different learning rates: {sorted(rates)}")
    return {"steps": steps, "lr": rates.pop()}


class _FromMaster:
    """Endpoint that takes masters and puts them, cast, where the parameters are."""

    def __init__(self, state: State):
        self._state = state

    @torch.no_grad()
    def unpack(self, fragments: Sequence[Fragment], data: memoryview) -> None:
        at = 0
        for _, tensor, box in fragments:
            shape = [hi - lo for lo, hi in box]
            values = np.frombuffer(data, "<f4", int(np.prod(shape)), at).reshape(shape)
            at += values.nbytes
            self._state.put("param", tensor, box, torch.from_numpy(values.copy()))


def _pieces(spec: ModelSpec, layout: Layout, rank: int, kind: str) -> Iterator[Fragment]:
    held = layout.pieces(spec, kind, [rank])
    for number, tensor in enumerate(held.tensor.tolist()):
        yield Fragment(kind, tensor, held.box(number, len(spec.tensors[tensor].shape)))
