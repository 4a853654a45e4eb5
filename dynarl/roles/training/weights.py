"""Weights between a Hugging Face directory and the shard of this rank.

One form for everything: warm start, weight sync, borrowed trainers and checkpoints read and write the same directory, a
complete Hugging Face model with one model.safetensors.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Mapping

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from dynarl.vps.digest import INDEX_FILE, WEIGHTS_FILE
from dynarl.vps.hf_megatron import Arch, Shard, hf_shapes, is_replicated, shards

SMALL_FILE_BYTES = 64 << 20


def read_arch(model_dir: str | os.PathLike[str]) -> Arch:
    return Arch.from_config(json.loads((Path(model_dir) / "config.json").read_text()))


def small_files(model_dir: str | os.PathLike[str]) -> dict[str, bytes]:
    """config.json, tokenizer and the like: what an exported directory needs beside the weights."""
    return {
        path.name: path.read_bytes()
        for path in sorted(Path(model_dir).iterdir())
        if path.is_file()
        and ".safetensors" not in path.name
        and not path.name.startswith(".")
        and path.suffix not in (".bin", ".pt", ".tmp")
        and path.stat().st_size < SMALL_FILE_BYTES
    }


@torch.no_grad()
def load_shard(
    params: Mapping[str, torch.Tensor], arch: Arch, model_dir: str | os.PathLike[str], tp: int, rank: int
) -> None:
    """Fill `params` (Megatron name -> parameter) of one rank in place. Only the bytes of this rank are read.

    Raises ValueError where the checkpoint lacks a tensor or has one of another shape.
    """
    shapes = hf_shapes(arch)
    with _Checkpoint(Path(model_dir)) as checkpoint:
        for shard in shards(arch, tp, rank):
            target, at = params[shard.name], 0
            if tuple(target.shape) != shard.shape:
                raise ValueError(f"{shard.name} has shape {tuple(target.shape)}, its layout says {shard.shape}")
            for piece in shard.slices:
                data = checkpoint.read(piece.tensor, shapes[piece.tensor], shard.axis, piece.start, piece.stop)
                target.narrow(shard.axis, at, piece.stop - piece.start).copy_(data)
                at += piece.stop - piece.start
            target.narrow(shard.axis, at, shard.shape[shard.axis] - at).zero_()


def export(
    params: Mapping[str, torch.Tensor],
    arch: Arch,
    files: Mapping[str, bytes],
    model_dir: str | os.PathLike[str],
    group: dist.ProcessGroup,
) -> None:
    """Write the model of `group` (its tensor-parallel ranks) to `model_dir`; rank 0 writes, all ranks must call.

    The weights appear by a rename, last, so a reader never sees half a model.
    """
    leader = dist.get_global_rank(group, 0)
    if group.rank() != 0:
        for shard in shards(arch, group.size(), group.rank()):
            if not is_replicated(shard):
                dist.send(params[shard.name].detach().contiguous(), leader, group=group)
        return
    dtype = next(iter(params.values())).dtype
    tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in hf_shapes(arch).items()}
    for rank in range(group.size()):
        for shard in shards(arch, group.size(), rank):
            if rank == 0:
                _scatter(shard, params[shard.name].detach(), tensors)
            elif not is_replicated(shard):
                received = torch.empty_like(params[shard.name])
                dist.recv(received, dist.get_global_rank(group, rank), group=group)
                _scatter(shard, received, tensors)
    write_model(tensors, files, model_dir)


def write_model(
    tensors: Mapping[str, torch.Tensor], files: Mapping[str, bytes], model_dir: str | os.PathLike[str]
) -> None:
    """Write a complete Hugging Face directory; the weights are renamed into place last."""
    directory = Path(model_dir)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    partial = directory / f".{WEIGHTS_FILE}.{os.getpid()}.tmp"
    save_file(dict(tensors), partial, metadata={"format": "pt"})
    os.replace(partial, directory / WEIGHTS_FILE)


def _scatter(shard: Shard, data: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    at = 0
    for piece in shard.slices:
        size = piece.stop - piece.start
        tensors[piece.tensor].narrow(shard.axis, piece.start, size).copy_(data.narrow(shard.axis, at, size))
        at += size


class _Checkpoint:
    """Slices of tensors of a directory with one safetensors file, or several and an index."""

    def __init__(self, model_dir: Path):
        self._dir = model_dir
        index = model_dir / INDEX_FILE
        self._file_of = json.loads(index.read_text())["weight_map"] if index.exists() else {}
        self._open: dict[str, safe_open] = {}

    def __enter__(self) -> _Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._open.values():
            file.__exit__(*error)

    def read(self, name: str, shape: tuple[int, ...], axis: int, start: int, stop: int) -> torch.Tensor:
        file = self._file_of.get(name, WEIGHTS_FILE)
        if file not in self._open:
            self._open[file] = safe_open(self._dir / file, framework="pt").__enter__()
        try:
            view = self._open[file].get_slice(name)
        except Exception as error:
            raise ValueError(f"{self._dir / file} has no tensor {name}") from error
        if tuple(view.get_shape()) != shape:
            raise ValueError(
                f"{self._dir / file}: {name} has shape {tuple(view.get_shape())}, config.json says {shape}"
            )
        return view[start:stop] if axis == 0 else view[:, start:stop]


def parameters_by_name(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by their Megatron name, wrappers left out."""
    return {name.removeprefix("module."): parameter for name, parameter in module.named_parameters()}
