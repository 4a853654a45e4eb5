"""A cheap digest of model weights that notices a changed, missing or misplaced byte.

The CRC-32 of the data section of the safetensors files, in file order: swapping two chunks changes it, unlike a sum.
It guards against faults, not against an adversary. About 1 GB/s; light enough for the agent, which has no torch.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Iterable, Iterator

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
