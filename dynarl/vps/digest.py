"""Cheap digests of model state that notice a changed, missing or misplaced element. They guard against faults, not
against an adversary.

Of files: the CRC-32 of the data section of the safetensors files, in file order; swapping two chunks changes it,
unlike a sum. About 1 GB/s; light enough for the agent, which has no torch.

Of boxes in memory, for state that is cut differently before and after a move:

    digest(tensor, kind) = weight * sum over elements of (bits + 1) * row_weight[i] * column_weight[j]   mod 2**64

with weights drawn from the name and the kind, and from the logical index. A sum, so boxes may be cut, ordered and held in any
way: the digests of boxes that tile a tensor add up to that of the tensor. An element elsewhere counts differently, and
one that is missing counts as one less even where it is zero. NaNs are compared by their bits.

Columns side by side that fill eight bytes are one number, which is three to five times as fast as one by one: in such a
word the weight of an element is that of the first, shifted like the element itself. All weights are odd, so one wrong
element is always noticed. Several may cancel if all of them are last in their words and differ in their first bits
only; whole rows, columns or boxes that are wrong have first elements too.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Iterable, Iterator

if TYPE_CHECKING:  # the agent reads weight files without numpy
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


def digest_box(name: str, kind: str, box: Box, array: np.ndarray) -> int:
    """What one box of a tensor adds to its digest, mod 2**64. array: its elements, of 1, 2, 4 or 8 bytes, in the box's
    shape.

    >>> import numpy as np
    >>> whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    >>> left, right = (digest_box("w", "master", ((0, 3), c), whole[:, slice(*c)]) for c in ((0, 1), (1, 4)))
    >>> (left + right) % 2**64 == digest_box("w", "master", ((0, 3), (0, 4)), whole)
    True
    """
    import numpy as np

    if array.shape != tuple(hi - lo for lo, hi in box):
        raise ValueError(f"{name} ({kind}): an array of shape {array.shape} does not fit the box {box}")
    bits = array.view(f"u{array.dtype.itemsize}")
    if len(box) == 1:
        sums = bits.astype(np.uint64) + np.uint64(1)
    else:
        columns = column_weights(*box[1], array.dtype.itemsize)
        sums = _row_sums(bits, columns, *box[1])
        sums += columns.sum(dtype=np.uint64)
    return int(sums @ axis_weights(0, *box[0])) * tensor_weight(name, kind) % 2**64


def _row_sums(bits: np.ndarray, weights: np.ndarray, lo: int, hi: int) -> np.ndarray:
    """Of each row the sum of its elements, columns lo..hi-1, times their weights: uint64 [rows]."""
    import numpy as np

    per_word = 8 // bits.itemsize
    first, last = min(hi, lo + -lo % per_word) - lo, hi - hi % per_word - lo
    if bits.strides[1] != bits.itemsize or first >= last:
        first = last = hi - lo
    words = axis_weights(1, (lo + first) // per_word, (lo + last) // per_word)
    sums = np.einsum("ij,j->i", bits[:, first:last].view(np.uint64), words[: (last - first) // per_word])
    for some in (each for each in (slice(first), slice(last, None)) if len(weights[each])):
        # Arithmetic on the whole box at once takes ten times as long: einsum widens the elements as it goes along.
        sums += np.einsum("ij,j->i", bits[:, some], weights[some], dtype=np.uint64, casting="unsafe")
    return sums


@lru_cache(maxsize=1 << 14)
def tensor_weight(name: str, kind: str) -> int:
    """An odd number below 2**64."""
    return int.from_bytes(hashlib.sha256(f"{name}\0{kind}".encode()).digest()[:8], "little") | 1


@lru_cache(maxsize=256)
def column_weights(lo: int, hi: int, item_bytes: int) -> np.ndarray:
    """Weights of columns lo..hi-1 of a tensor of two axes: uint64."""
    import numpy as np

    per_word = 8 // item_bytes
    word, place = np.divmod(np.arange(lo, hi), per_word)
    words = axis_weights(1, lo // per_word, -(-hi // per_word))
    return words[word - lo // per_word] << (8 * item_bytes * place).astype(np.uint64)


def axis_weights(axis: int, lo: int, hi: int) -> np.ndarray:
    """Weights of rows (axis 0) or words of columns lo..hi-1: odd uint64."""
    return _weights(axis, 1 << max(hi - 1, 0).bit_length())[lo:hi]


@lru_cache(maxsize=64)
def _weights(axis: int, size: int) -> np.ndarray:
    """The finalizer of splitmix64 over a counter."""
    import numpy as np

    x = np.arange(1, 1 + size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64(axis * 0xD1B54A32D192ED03 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)
