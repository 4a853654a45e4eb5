"""Weights of a Hugging Face directory, for the ranks of a layout."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dynarl.vps.box import Box
from dynarl.vps.digest import INDEX_FILE, WEIGHTS_FILE
from dynarl.vps.spec import ModelSpec
from dynarl.vps.train_layout import Part, TrainLayout


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


def local(parameter: torch.Tensor, part: Part) -> torch.Tensor:
    """The cells of a local parameter that are one part of a logical tensor."""
    return parameter[tuple(slice(at, at + hi - lo) for at, (lo, hi) in zip(part.at, part.box))]


def _volume(box: Box) -> int:
    size = 1
    for lo, hi in box:
        size *= hi - lo
    return size


def write_weights(tensors: Mapping[str, torch.Tensor], model_dir: str | os.PathLike[str]) -> None:
    """Write the weights of a Hugging Face directory; they are renamed into place when they are whole."""
    directory = Path(model_dir)
    directory.mkdir(parents=True, exist_ok=True)
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
