"""Cheap digests of model state that notice a changed, missing or misplaced byte: of files, and of boxes of tensors.

Of files: the CRC-32 of the data section of the safetensors files, in file order: swapping two chunks changes it, unlike a sum.
It guards against faults, not against an adversary. About 1 GB/s; light enough for the agent, which has no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Iterable, Iterator

import numpy as np

from dynarl.vps.box import Box

CHUNK_BYTES = 4 << 20
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def digest_chunks(chunks: Iterable[bytes | memoryview]) -> str:
    """Digest of bytes that arrive piece by piece.

    >>> digest_chunks([b"ab", b"c"]) == digest_chunks([b"abc"]) == "352441c2"
    True
    """
    crc = 0
    for chunk in chunks:
        crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


def digest_weights(model_dir: str | os.PathLike[str]) -> str:
    """Digest of the weights of a Hugging Face directory. Raises ValueError if a file is cut short."""
    return digest_chunks(chunk for path in weight_files(model_dir) for chunk in _data_section(path))


def weight_files(model_dir: str | os.PathLike[str]) -> list[Path]:
    """model.safetensors, or the files that its index names, by name."""
    directory = Path(model_dir)
    if (directory / INDEX_FILE).exists():
        names = set(json.loads((directory / INDEX_FILE).read_text())["weight_map"].values())
        return [directory / name for name in sorted(names)]
    return [directory / WEIGHTS_FILE]


def _data_section(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        header = file.read(8)
        start = 8 + int.from_bytes(header, "little")
        if len(header) < 8 or os.fstat(file.fileno()).st_size < start:
            raise ValueError(f"{path} is cut short: no safetensors header")
        file.seek(start)
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


# ---- digests of state that is cut into boxes


def row_weights(name: str, lo: int, hi: int) -> np.ndarray:
    """Weights of rows lo..hi-1 of a tensor in its digest, odd, uint64."""
    return _weights(name, b"row", lo, hi)


def column_weights(name: str, lo: int, hi: int) -> np.ndarray:
    """Weights of columns lo..hi-1 of a tensor in its digest, odd, uint64. A tensor of one axis has one column."""
    return _weights(name, b"column", lo, hi)


def digest_box(name: str, box: Box, array: np.ndarray) -> int:
    """Digest mod 2**64 of a box of tensor `name` (its name in the model): additive over disjoint boxes, whatever the cuts.

    The sum over elements of bits * row weight * column weight. An element at another place counts another amount, so what
    arrives permuted is noticed, which a norm or a sum would not. (Where all elements are equal, as in moments before the
    first step, there is no permutation to notice.)

    >>> values = np.arange(12, dtype=np.float32).reshape(3, 4)
    >>> halves = digest_box("w", ((0, 1), (0, 4)), values[:1]) + digest_box("w", ((1, 3), (0, 4)), values[1:])
    >>> halves % 2**64 == digest_box("w", ((0, 3), (0, 4)), values) != digest_box("w", ((0, 3), (0, 4)), values[::-1])
    True
    """
    array = np.ascontiguousarray(array)
    bits = array.view({2: np.int16, 4: np.int32, 8: np.int64}[array.itemsize]).astype(np.int64).view(np.uint64)
    (lo, hi), (left, right) = (*box, (0, 1))[:2]
    sums = bits.reshape(hi - lo, right - left) @ column_weights(name, left, right)
    return int((sums * row_weights(name, lo, hi)).sum(dtype=np.uint64))


def _weights(name: str, axis: bytes, lo: int, hi: int) -> np.ndarray:
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8, person=axis).digest(), "little")
    # splitmix64 (S. Vigna) at positions lo..hi-1 of the sequence that the name and the axis choose.
    x = np.uint64(key) + np.arange(lo + 1, hi + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31) | np.uint64(1)
