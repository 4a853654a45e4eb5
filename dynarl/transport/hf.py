"""Between our checkpoints and Hugging Face directories: the same boxes, other files. numpy only.

Either way the plan is trivial, since one process holds both ends: every whole tensor is read from where its boxes lie.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynarl.transport.files import CheckpointReader, CheckpointWriter, fill, owned_once
from dynarl.transport.messages import Fragment
from dynarl.transport.staged import StagedModel
from dynarl.vps.layout import CheckpointLayout
from dynarl.vps.spec import ModelSpec

SMALL_FILE_BYTES = 64 << 20
BUFFER_BYTES = 8 << 20
OPTIMIZER_KINDS = ("master", "exp_avg", "exp_avg_sq")


class HFError(ValueError):
    """A directory is not what it should be, or would be overwritten."""


def read_spec(model_dir: Path, dtype: str | None = None) -> ModelSpec:
    """The model of a directory with a config.json; dtype: of its parameters, if not that of the config."""
    path = model_dir / "config.json"
    if not path.exists():
        raise HFError(f"{model_dir} has no config.json")
    config = json.loads(path.read_text())
    return ModelSpec.from_hf(config | ({"dtype": dtype, "torch_dtype": dtype} if dtype else {}))


def export_model(checkpoint: Path, target: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> ModelSpec:
    """Write the model of a checkpoint of ours as a Hugging Face directory. The weights appear last, by a rename.

    progress: told the bytes written, tensor by tensor. Raises HFError where `target` holds a model already, FileError
    where the checkpoint is incomplete.
    """
    if (target / "model.safetensors").exists():
        raise HFError(f"{target} holds a model already; it is not overwritten")
    spec = read_spec(checkpoint / "model")
    reader = CheckpointReader(checkpoint / "state", spec)
    sizes = {kind.name: spec.itemsize(kind.name) for kind in spec.kinds}
    target.mkdir(parents=True, exist_ok=True)
    copy_small_files(checkpoint / "model", target)
    model = StagedModel.create(target / "model.safetensors", spec)
    try:
        for number, tensor in enumerate(spec.tensors):
            kind = "param" if tensor.buffer else "master"
            whole = Fragment(kind, number, tuple((0, n) for n in tensor.shape))
            end = model if tensor.buffer else _Cast(model, spec.dtype)
            progress(fill(reader, end, [whole], sizes, BUFFER_BYTES))
        model.complete()
    except BaseException:
        model.discard()
        raise
    return spec


def import_model(source: Path, target: Path) -> ModelSpec:
    """Write a Hugging Face directory as a checkpoint of ours: its weights as masters, moments of zero, no steps.

    Raises HFError where `target` is there already, FileError where weights are missing or of another shape.
    """
    if target.exists() and any(target.iterdir()):
        raise HFError(f"{target} is not empty; nothing is overwritten")
    spec = read_spec(source)
    model = StagedModel.open(source, spec)
    layout = CheckpointLayout()
    fragments = owned_once(spec, layout, 0, OPTIMIZER_KINDS)
    fragments += [f for f in owned_once(spec, layout, 0, ["param"]) if spec.tensors[f.tensor].buffer]
    (target / "model").mkdir(parents=True, exist_ok=True)
    copy_small_files(source, target / "model")
    writer = CheckpointWriter(spec, 0, fragments)
    try:
        writer.snapshot(_Masters(model, spec.dtype), {"steps": {"dense": 0, "expert": 0}, "lr": 0.0})
        writer.write(target / "state", [0]).result()
    finally:
        writer.close()
    return spec


def copy_small_files(source: Path, target: Path) -> None:
    """config.json, tokenizer and the like: what a model directory needs beside the weights. What is there stays."""
    for path in sorted(source.iterdir()):
        if (
            path.is_file()
            and ".safetensors" not in path.name
            and not path.name.startswith(".")
            and path.suffix not in (".bin", ".pt", ".tmp")
            and path.stat().st_size < SMALL_FILE_BYTES
            and not (target / path.name).exists()
        ):
            shutil.copyfile(path, target / path.name)


class _Cast:
    """Endpoint that takes float32 masters and puts them into a model of another type."""

    def __init__(self, model: StagedModel, dtype: str):
        self._model, self._dtype = model, dtype

    def unpack(self, fragments: Sequence[Fragment], data: memoryview) -> None:
        values, at = np.frombuffer(data, "<f4"), 0
        for _, tensor, box in fragments:
            part = self._model.arrays[tensor][tuple(slice(lo, hi) for lo, hi in box)]
            part[...] = from_float32(values[at : at + part.size], self._dtype).reshape(part.shape)
            at += part.size


class _Masters:
    """Endpoint over a model's parameters as float32 masters, with moments of zero."""

    def __init__(self, model: StagedModel, dtype: str):
        self._model, self._dtype = model, dtype

    def pack(self, fragments: Sequence[Fragment], out: memoryview) -> None:
        at = 0
        for kind, tensor, box in fragments:
            part = self._model.arrays[tensor][tuple(slice(lo, hi) for lo, hi in box)]
            if kind == "param":
                value: Any = part
            elif kind == "master":
                value = to_float32(part, self._dtype)
            else:
                value = np.zeros(part.shape, "<f4")
            place = np.frombuffer(out, value.dtype, value.size, at).reshape(value.shape)
            place[...] = value
            at += place.nbytes


def from_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """The raw numbers of float32 values in another type, rounded to the nearest, ties to even.

    >>> [hex(n) for n in from_float32(np.array([1.0, 1.00390625, -0.0], "<f4"), "bfloat16")]
    ['0x3f80', '0x3f80', '0x8000']
    """
    if dtype == "float32":
        return values.view("<u4")
    if dtype == "float16":
        return values.astype("<f2").view("<u2")
    bits = values.view("<u4")
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
    # Rounding must not carry a NaN over to infinity.
    return np.where(np.isnan(values), (bits >> np.uint32(16)).astype("<u2") | np.uint16(0x40), rounded)


def to_float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values of the raw numbers of another type; exact."""
    if dtype == "float32":
        return raw.view("<f4")
    if dtype == "float16":
        return raw.view("<f2").astype("<f4")
    return (raw.astype("<u4") << np.uint32(16)).view("<f4")
