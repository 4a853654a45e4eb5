"""Trainer state on disk: the weights in Hugging Face form, the optimizer as one file per rank. No pickle.

    DIR/model/                     a complete Hugging Face directory
    DIR/optimizer/rank0.json       number of ranks; step counters and learning rate
    DIR/optimizer/rank0.safetensors

A file holds logical pieces, "KIND:TENSOR:ROWS:COLUMNS" with half-open intervals, each piece of the model in one file
only. So a run may be restored in any other layout. Files appear by rename; whoever asked for the checkpoint marks it
complete once every owner has answered.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dynarl.roles.training.state import Bound
from dynarl.vps.box import Box, intersect, volume


class CheckpointError(RuntimeError):
    """A checkpoint cannot be restored into this trainer."""


def save(trainer: Any, directory: str) -> None:
    """Write this owner's part; all owners must call."""
    trainer.export(os.path.join(directory, "model"))
    root = Path(directory) / "optimizer"
    root.mkdir(parents=True, exist_ok=True)
    bound = _bound(trainer)
    tensors = {
        _key(kind, bound.spec.tensors[tensor].name, box): view.contiguous()
        for kind in bound.kinds
        if kind != "param"
        for tensor, box, view, (first, _) in bound.pieces(kind)
        if first
    }
    path = root / f"rank{trainer.groups.all.rank()}"
    about = {"ranks": trainer.groups.all.size(), "scalars": bound.scalars()}
    _replace(path.with_suffix(".safetensors"), lambda partial: save_file(tensors, partial))
    _replace(path.with_suffix(".json"), lambda partial: partial.write_text(json.dumps(about)))


@torch.no_grad()
def restore(trainer: Any, directory: str) -> None:
    """Take weights and optimizer state of any layout. Raises CheckpointError if they do not fit in here."""
    trainer.load(os.path.join(directory, "model"))
    bound = _bound(trainer)
    with _Pieces(Path(directory) / "optimizer") as stored:
        for kind in bound.kinds:
            if kind == "param":
                continue
            for tensor, box, view, _ in bound.pieces(kind):
                name, missing = bound.spec.tensors[tensor].name, volume(box)
                for both, data in stored.read(kind, name, box):
                    view[tuple(slice(lo - base, hi - base) for (lo, hi), (base, _) in zip(both, box))].copy_(data)
                    missing -= volume(both)
                if missing:
                    raise CheckpointError(f"{directory} lacks {missing} of {volume(box)} elements of {kind} of {name}")
        bound.set_scalars(stored.scalars)


def _bound(trainer: Any) -> Bound:
    if trainer.optimizer is None:
        raise RuntimeError("a borrowed trainer has no optimizer state")
    return Bound(trainer.shard)


def _key(kind: str, name: str, box: Box) -> str:
    return ":".join([kind, name, *(f"{lo}-{hi}" for lo, hi in box)])


class _Pieces:
    """The pieces of all files of a directory."""

    def __init__(self, root: Path):
        about = {path: json.loads(path.read_text()) for path in sorted(root.glob("rank*.json"))}
        if not about:
            raise CheckpointError(f"{root} holds no optimizer state")
        first = next(iter(about.values()))
        if len(about) != first["ranks"]:
            raise CheckpointError(f"{root} holds the files of {len(about)} of {first['ranks']} ranks")
        self.scalars = first["scalars"]
        self._paths = [path.with_suffix(".safetensors") for path in about]

    def __enter__(self) -> _Pieces:
        self._files = [safe_open(path, framework="pt").__enter__() for path in self._paths]
        self._index: dict[tuple[str, str], list[tuple[Box, str, Any]]] = {}
        for file in self._files:
            for key in file.keys():
                kind, name, *cuts = key.split(":")
                box = tuple(tuple(map(int, cut.split("-"))) for cut in cuts)
                self._index.setdefault((kind, name), []).append((box, key, file))
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            file.__exit__(*error)

    def read(self, kind: str, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """(box, data) of every stored piece of `box`."""
        for stored, key, file in self._index.get((kind, name), ()):
            if (both := intersect(stored, box)) is not None:
                cut = tuple(slice(lo - base, hi - base) for (lo, hi), (base, _) in zip(both, stored))
                yield both, file.get_slice(key)[cut]


def _replace(path: Path, write: Any) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write(partial)
    os.replace(partial, path)
