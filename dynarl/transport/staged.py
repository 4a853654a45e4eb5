"""A Hugging Face model as an end of a transition: the tensors of a model.safetensors, mapped into memory. numpy only.

Whatever is stored as two bytes is handled as uint16: nothing here computes with it.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dynarl.transport.files import RAW, FileError, Spec
from dynarl.transport.mailbox import reserve
from dynarl.transport.memory import Span, View, spans_of
from dynarl.transport.messages import Fragment
from dynarl.vps.box import Box, whole
from dynarl.vps.digest import CHUNK_BYTES, digest_box, digest_chunks, weight_files
from dynarl.vps.spec import ITEMSIZE

SAFETENSORS_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class StagedModel:
    """Endpoint over the parameters of a Hugging Face model. `arrays[t]`: tensor t as raw two- or four-byte numbers.

    Made with `create` (then `complete` gives the file its name) or `open`.
    """

    def __init__(self, spec: Spec, arrays: list[np.ndarray], path: Path, part: Path | None, data: memoryview | None):
        self._spec, self.arrays, self.path, self._part, self._data = spec, arrays, path, part, data

    @classmethod
    def create(cls, path: Path, spec: Spec) -> StagedModel:
        """A new model.safetensors whose tensors are all zero, invisible until `complete`. Raises NoStagingMemory."""
        head, offsets = _safetensors_head(spec)
        size = len(head) + (offsets[-1][1] if offsets else 0)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            reserve(descriptor, size, part)
            os.pwrite(descriptor, head, 0)
            memory = mmap.mmap(descriptor, size)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        raw = RAW[ITEMSIZE[spec.dtype]]
        arrays = [
            np.frombuffer(memory, raw, (hi - lo) // raw.itemsize, len(head) + lo).reshape(tensor.shape)
            for tensor, (lo, hi) in zip(spec.tensors, offsets)
        ]
        return cls(spec, arrays, path, part, memoryview(memory)[len(head) : size])

    @classmethod
    def open(cls, path: Path, spec: Spec) -> StagedModel:
        """An existing model, to read: a .safetensors file, or a directory with one or with several and an index.

        Raises FileError where a tensor of `spec` is missing or has another shape or dtype; others are left alone.
        """
        found: dict[str, np.ndarray] = {}
        for file in weight_files(path) if path.is_dir() else [path]:
            found |= _mapped_tensors(file, {t.name: tuple(t.shape) for t in spec.tensors}, spec.dtype)
        if missing := [t.name for t in spec.tensors if t.name not in found]:
            raise FileError(f"{path} has no tensor {missing[0]} (and lacks {len(missing)} of {len(spec.tensors)})")
        return cls(spec, [found[t.name] for t in spec.tensors], path, None, None)

    def pack(self, fragments: Sequence[Fragment], out: memoryview) -> None:
        at = 0
        for kind, tensor, box in fragments:
            part = self._slice(kind, tensor, box)
            _numbers(out, at, part)[...] = part
            at += part.nbytes

    def unpack(self, fragments: Sequence[Fragment], data: memoryview) -> None:
        at = 0
        for kind, tensor, box in fragments:
            part = self._slice(kind, tensor, box)
            part[...] = _numbers(data, at, part)
            at += part.nbytes

    def spans(self, fragments: Sequence[Fragment]) -> list[Span]:
        """Where the bytes of the fragments lie."""
        found = []
        for fragment in fragments:
            part = self._slice(*fragment)
            found += spans_of(fragment[2], [View(fragment[2], part.ctypes.data, part.strides, part.itemsize)])
        return found

    def copy_local(self, local: Any) -> None:
        """Nothing: a new file has nothing yet, and what an old one keeps is there."""

    def digest(self) -> str:
        """CRC-32 of the data, as `digest_weights` computes it of the file."""
        if self._data is None:
            raise ValueError("the digest of a file that is there already is dynarl.vps.digest.digest_weights")
        return digest_chunks(self._data[at : at + CHUNK_BYTES] for at in range(0, len(self._data), CHUNK_BYTES))

    def digests(self) -> dict[str, int]:
        """The positional digest of all parameters, to be compared with the sum over the ranks that sent them."""
        each = zip(self._spec.tensors, self.arrays, strict=True)
        return {"param": sum(digest_box(t.name, "param", whole(t.shape), array) for t, array in each) % 2**64}

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def complete(self) -> None:
        """Give the file its name."""
        if self._part is not None:
            os.replace(self._part, self.path)
        self._part = None

    def discard(self) -> None:
        """Drop a file that was not completed."""
        if self._part is not None:
            self._part.unlink(missing_ok=True)
        self._part = None

    def _slice(self, kind: str, tensor: int, box: Box) -> np.ndarray:
        if kind != "param":
            raise FileError(f"{self.path} holds parameters only, not {kind}")
        return self.arrays[tensor][tuple(slice(lo, hi) for lo, hi in box)]


def _numbers(data: memoryview, at: int, like: np.ndarray) -> np.ndarray:
    return np.frombuffer(data, like.dtype, like.size, at).reshape(like.shape)


@lru_cache(maxsize=4)
def _safetensors_head(spec: Spec) -> tuple[bytes, list[tuple[int, int]]]:
    """Length and header of a file with all tensors in order, and each one's place behind it."""
    offsets, at = [], 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor in spec.tensors:
        end = at + int(np.prod(tensor.shape)) * ITEMSIZE[spec.dtype]
        header[tensor.name] = {
            "dtype": SAFETENSORS_NAMES[spec.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        offsets.append((at, end))
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


def _mapped_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> dict[str, np.ndarray]:
    """The tensors of one safetensors file that are in `shapes`. Raises FileError."""
    memory = _map(path)
    length = int.from_bytes(memory[:8], "little")
    if 8 + length > len(memory):
        raise FileError(f"{path} is cut short: no safetensors header")
    header = json.loads(memory[8 : 8 + length])
    raw, result = RAW[ITEMSIZE[dtype]], {}
    for name in header.keys() & shapes.keys():
        entry, shape = header[name], shapes[name]
        lo, hi = (8 + length + at for at in entry["data_offsets"])
        if tuple(entry["shape"]) != shape:
            raise FileError(f"{path}: {name} has shape {tuple(entry['shape'])}, the model's is {shape}")
        if entry["dtype"] != SAFETENSORS_NAMES[dtype]:
            raise FileError(f"{path}: {name} is {entry['dtype']}, the model's dtype is {dtype}")
        if hi > len(memory):
            raise FileError(f"{path} is cut short: {name} ends at byte {hi} of {len(memory)}")
        result[name] = np.frombuffer(memory, raw, (hi - lo) // raw.itemsize, lo).reshape(shape)
    return result


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < 8:
            raise FileError(f"{path} is cut short: {os.fstat(file.fileno()).st_size} bytes")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
