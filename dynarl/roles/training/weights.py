"""Weights between a Hugging Face directory and the ranks of a layout.

One form for everything: warm start, weight sync, borrowed trainers and checkpoints read and write the same directory, a
complete Hugging Face model with one model.safetensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from dynarl.vps.box import Box
from dynarl.vps.digest import INDEX_FILE, WEIGHTS_FILE
from dynarl.vps.spec import ModelSpec
from dynarl.vps.train_layout import Part, TrainLayout

SMALL_FILE_BYTES = 64 << 20


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
    params: Mapping[str, torch.Tensor],
    spec: ModelSpec,
    layout: TrainLayout,
    rank: int,
    model_dir: str | os.PathLike[str],
) -> None:
    """Fill `params` (Megatron name -> parameter) of one rank in place. Only the bytes of this rank are read.

    Raises ValueError where the checkpoint lacks a tensor or has one of another shape.
    """
    with _Checkpoint(Path(model_dir)) as checkpoint:
        for placement in layout.placements(spec, rank):
            target = params[placement.parameter]
            if tuple(target.shape) != placement.shape:
                raise ValueError(
                    f"{placement.parameter} has shape {tuple(target.shape)}, its layout says {placement.shape}"
                )
            if sum(_volume(part.box) for part in placement.parts) < target.numel():
                target.zero_()  # rows of padding
            for part in placement.parts:
                tensor = spec.tensors[part.tensor]
                local(target, part).copy_(checkpoint.read(tensor.name, tensor.shape, part.box))


@torch.no_grad()
def export(
    params: Mapping[str, torch.Tensor],
    spec: ModelSpec,
    layout: TrainLayout,
    group: dist.ProcessGroup,
    files: Mapping[str, bytes],
    model_dir: str | os.PathLike[str],
) -> None:
    """Write the model of a layout to `model_dir`. The first rank of `group`, which is all ranks, writes; all must call.

    The weights appear by a rename, last, so a reader never sees half a model.
    """
    mine = group.rank()
    tensors: dict[str, torch.Tensor] = {}
    if mine == 0:
        dtype = next(iter(params.values())).dtype
        tensors = {tensor.name: torch.empty(tensor.shape, dtype=dtype) for tensor in spec.tensors}
    for position, parameter, part in _once_each(spec, layout):
        if position == mine:
            data = local(params[parameter].detach(), part).contiguous()
        if position == mine == 0:
            _cell(tensors[spec.tensors[part.tensor].name], part.box).copy_(data)
        elif position == mine:
            group.send([data], 0, 0).wait()
        elif mine == 0:
            shape = [hi - lo for lo, hi in part.box]
            data = torch.empty(shape, dtype=dtype, device=next(iter(params.values())).device)
            group.recv([data], position, 0).wait()
            _cell(tensors[spec.tensors[part.tensor].name], part.box).copy_(data)
    if mine == 0:
        write_model(tensors, files, model_dir)


def local(parameter: torch.Tensor, part: Part) -> torch.Tensor:
    """The cells of a local parameter that are one part of a logical tensor."""
    return _cell(parameter, tuple((at, at + hi - lo) for at, (lo, hi) in zip(part.at, part.box)))


def _cell(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(lo, hi) for lo, hi in box)]


def _volume(box: Box) -> int:
    size = 1
    for lo, hi in box:
        size *= hi - lo
    return size


def _once_each(spec: ModelSpec, layout: TrainLayout) -> Iterator[tuple[int, str, Part]]:
    """(position of a rank, its parameter, part) such that each box of the model is there once, rank by rank."""
    seen: set[tuple[int, Box]] = set()
    for position, rank in enumerate(layout.ranks):
        for placement in layout.placements(spec, rank):
            for part in placement.parts:
                if (part.tensor, part.box) not in seen:
                    seen.add((part.tensor, part.box))
                    yield position, placement.parameter, part


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

    def read(self, name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
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
        return view[tuple(slice(lo, hi) for lo, hi in box)]


def parameters_by_name(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by their Megatron name, wrappers left out."""
    return {name.removeprefix("module."): parameter for name, parameter in module.named_parameters()}
