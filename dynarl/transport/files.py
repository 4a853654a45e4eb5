"""Our own checkpoint as an end of a transition. numpy only, no pickle.

A checkpoint is, per rank that owns something, one data file and one manifest::

    DIR/rank-00003.data     pieces one after the other, row-major
    DIR/rank-00003.json     {"ranks": all that wrote, "pieces": [[kind, tensor, box, dtype, offset], ...],
                             "scalars": {...}}

Each element of the state is written once, by the lowest rank that holds it. Because the boxes are written down, a
checkpoint may be read at any other layout, and only the bytes that a rank needs are read. Whatever is stored as two
bytes is handled as uint16: nothing here computes with it. Files appear under their names only when complete; who asked
for the checkpoint marks it so once every rank has answered.
"""

from __future__ import annotations

import json
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Iterable, Mapping, NamedTuple, Protocol, Sequence

import numpy as np

from dynarl.transport.messages import Fragment, cut, num_bytes
from dynarl.vps.box import Box, intersect, subtract, volume
from dynarl.vps.spec import ITEMSIZE

RAW = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
DATA, MANIFEST = "rank-{:05d}.data", "rank-{:05d}.json"
FORMAT = 1


class FileError(ValueError):
    """A file does not hold what it should. Names the file, and the tensor and box where there is one."""


class Spec(Protocol):
    """What is needed of a ModelSpec."""

    dtype: str
    tensors: Sequence[Any]

    def itemsize(self, kind: str) -> int: ...


def fill(source: Any, endpoint: Any, fragments: Iterable[Fragment], item_bytes: Mapping[str, int], limit: int) -> int:
    """Give `endpoint` these fragments from a StagedModel or a CheckpointReader, `limit` bytes at a time.

    Returns the bytes read. This is how a rank loads a model or a checkpoint: everybody reads what it needs.
    """
    buffer, total = memoryview(bytearray(limit)), 0
    for size, part in cut(fragments, item_bytes, limit):
        source.pack(part, buffer[:size])
        endpoint.unpack(part, buffer[:size])
        total += size
    return total


# ---- our own checkpoint


def owned_once(spec: Spec, layout: Any, rank: int, kinds: Iterable[str]) -> list[Fragment]:
    """What `rank` has to write: what it holds, without what a lower rank holds too.

    >>> from dynarl.vps.layout import EngineLayout
    >>> from dynarl.vps.presets import preset
    >>> spec = preset("smollm2-135m")
    >>> sum(volume(f.box) for r in range(4) for f in owned_once(spec, EngineLayout(tp=1, dp=4), r, ["param"]))
    134515008
    """
    result = []
    for kind in kinds:
        held = layout.pieces(spec, kind)
        first = np.searchsorted(held.tensor, np.arange(len(spec.tensors) + 1))
        for number in np.nonzero(held.rank == rank)[0].tolist():
            tensor = int(held.tensor[number])
            others = slice(first[tensor], first[tensor + 1])
            lo, hi = held.lo[number], held.hi[number]
            hit = (held.rank[others] < rank) & (held.lo[others] < hi).all(1) & (lo < held.hi[others]).all(1)
            rest = [_box(lo, hi)]
            for other in (np.nonzero(hit)[0] + others.start).tolist():
                taken = _box(held.lo[other], held.hi[other])
                rest = [left for box in rest for left in subtract(box, taken)]
            axes = len(spec.tensors[tensor].shape)
            result += [Fragment(kind, tensor, box[:axes]) for box in rest]
    return result


def _box(lo: np.ndarray, hi: np.ndarray) -> Box:
    return tuple(zip(lo.tolist(), hi.tolist()))


class CheckpointWriter:
    """Writes one rank's part. `snapshot` copies it into host memory, after which training may go on; `write` puts it on
    disk from a thread. The memory is kept for the next snapshot.
    """

    def __init__(self, spec: Spec, rank: int, fragments: Sequence[Fragment]):
        self._spec, self._rank, self._fragments = spec, rank, list(fragments)
        self._item_bytes = {f.kind: spec.itemsize(f.kind) for f in self._fragments}
        self._size = num_bytes(self._fragments, self._item_bytes)
        self._memory: mmap.mmap | None = None
        self._scalars: dict[str, Any] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future | None = None

    def snapshot(self, endpoint: Any, scalars: Mapping[str, Any], limit: int = 64 << 20) -> None:
        """Copy the pieces out of `endpoint`, `limit` bytes at a time; scalars: anything JSON can say.

        Waits for a write that is still under way, and raises its error.
        """
        if self._writing is not None:
            self._writing.result()
        if self._memory is None:
            self._memory = mmap.mmap(-1, max(1, self._size))
        view, at = memoryview(self._memory), 0
        for size, fragments in cut(self._fragments, self._item_bytes, limit):
            endpoint.pack(fragments, view[at : at + size])
            at += size
        self._scalars = json.loads(json.dumps(dict(scalars)))

    def write(self, directory: Path, ranks: Sequence[int]) -> Future:
        """Start writing the snapshot; the files are complete and durable when the future has its result, the bytes
        written. ranks: all that write a part.
        """
        if self._memory is None:
            raise RuntimeError("snapshot has not been called")
        self._writing = self._thread.submit(self._write, Path(directory), list(ranks), self._scalars)
        return self._writing

    def close(self) -> None:
        self._thread.shutdown()
        self._memory = None

    def _write(self, directory: Path, ranks: list[int], scalars: dict[str, Any]) -> int:
        directory.mkdir(parents=True, exist_ok=True)
        at, pieces = 0, []
        for kind, tensor, box in self._fragments:
            name, dtype = self._spec.tensors[tensor].name, self._spec.kind(kind).dtype
            pieces.append([kind, name, box, dtype, at])
            at += volume(box) * self._item_bytes[kind]
        about = {
            "format": FORMAT,
            "rank": self._rank,
            "ranks": ranks,
            "bytes": at,
            "pieces": pieces,
            "scalars": scalars,
        }
        write_durably(directory / DATA.format(self._rank), memoryview(self._memory)[:at])
        # Last: a manifest vouches for its data.
        write_durably(directory / MANIFEST.format(self._rank), json.dumps(about, separators=(",", ":")).encode())
        return at


def write_durably(path: Path, content: bytes | memoryview) -> None:
    """Write a file that is there completely or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb", buffering=0) as file:
            view = memoryview(content)
            while view:
                view = view[file.write(view[: 64 << 20]) :]
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


class _Recorded(NamedTuple):
    box: Box
    file: int
    offset: int
    item_bytes: int


class CheckpointReader:
    """The pieces in a checkpoint directory, whoever wrote them. An endpoint to read from: `pack` takes any boxes.

    scalars: by rank that wrote them.
    """

    def __init__(self, directory: Path, spec: Spec):
        self.directory, self._spec = Path(directory), spec
        manifests = sorted(self.directory.glob("rank-*.json"))
        if not manifests:
            raise FileError(f"{directory} holds no checkpoint")
        index = {tensor.name: number for number, tensor in enumerate(spec.tensors)}
        self.scalars: dict[int, dict[str, Any]] = {}
        self._files: list[tuple[Path, int, np.ndarray | None]] = []
        self._pieces: dict[tuple[str, int], list[_Recorded]] = {}
        ranks: set[int] = set()
        for path in manifests:
            about = json.loads(path.read_text())
            if about.get("format") != FORMAT:
                raise FileError(f"{path} has format {about.get('format')!r}, this version reads {FORMAT}")
            ranks |= set(about["ranks"])
            self.scalars[about["rank"]] = about["scalars"]
            self._add(path.with_suffix(".data"), about, index)
        if absent := sorted(ranks - self.scalars.keys()):
            raise FileError(f"{directory} lacks the part of rank {absent[0]}: {MANIFEST.format(absent[0])}")

    def _add(self, path: Path, about: dict[str, Any], index: Mapping[str, int]) -> None:
        size = path.stat().st_size if path.exists() else -1
        if size != about["bytes"]:
            state = "is not there" if size < 0 else f"has {size} bytes"
            raise FileError(f"{path} {state}, its manifest says {about['bytes']}: {_first_lost(about, size)}")
        self._files.append((path, size, None))
        for kind, name, box, dtype, offset in about["pieces"]:
            if name not in index:
                raise FileError(f"{path}: {name} is no tensor of this model")
            box, shape = tuple(map(tuple, box)), tuple(self._spec.tensors[index[name]].shape)
            if len(box) != len(shape) or any(not 0 <= lo < hi <= n for (lo, hi), n in zip(box, shape)):
                raise FileError(f"{path}: {kind} of {name} has box {_say(box)}, the model's shape is {shape}")
            if dtype != (wanted := self._spec.kind(kind).dtype):
                raise FileError(f"{path}: {kind} of {name} {_say(box)} is {dtype}, the model's is {wanted}")
            recorded = _Recorded(box, len(self._files) - 1, offset, ITEMSIZE[dtype])
            self._pieces.setdefault((kind, index[name]), []).append(recorded)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({kind for kind, _ in self._pieces}))

    def pack(self, fragments: Sequence[Fragment], out: memoryview) -> None:
        """Read boxes. Raises FileError when one is not completely recorded."""
        at = 0
        for kind, tensor, box in fragments:
            at += self._read(kind, tensor, box, out, at)

    def _read(self, kind: str, tensor: int, box: Box, out: memoryview, at: int) -> int:
        recorded = self._pieces.get((kind, tensor), [])
        item_bytes = self._spec.itemsize(kind)
        target = np.frombuffer(out, RAW[item_bytes], volume(box), at).reshape([hi - lo for lo, hi in box])
        found = 0
        for piece in recorded:
            both = intersect(box, piece.box)
            if both is not None:
                held = self._array(piece)[_within(both, piece.box)]
                target[_within(both, box)] = held
                found += held.size
        if found != target.size:
            lost = [box]
            for piece in recorded:
                lost = [rest for b in lost for rest in subtract(b, piece.box)]
            name = self._spec.tensors[tensor].name
            what = f"lacks {_say(lost[0])}" if lost else f"holds parts twice of {_say(box)}"
            raise FileError(f"{self.directory} {what} of {kind} of {name}")
        return target.nbytes

    def _array(self, piece: _Recorded) -> np.ndarray:
        path, size, data = self._files[piece.file]
        if data is None:
            with path.open("rb") as file:
                data = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
            self._files[piece.file] = (path, size, data)
        count = volume(piece.box)
        raw = RAW[piece.item_bytes]
        return np.frombuffer(data, raw, count, piece.offset).reshape([hi - lo for lo, hi in piece.box])


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(box, outer))


def _first_lost(about: dict[str, Any], size: int) -> str:
    """The first piece that a file of `size` bytes cannot hold."""
    for kind, name, box, dtype, offset in about["pieces"]:
        if offset + volume(box) * ITEMSIZE[dtype] > size:
            return f"{kind} of {name} {_say(box)} is lost"
    return "it holds something else"


def _say(box: Iterable[Sequence[int]]) -> str:
    """[0:4, 2:8]"""
    return "[" + ", ".join(f"{lo}:{hi}" for lo, hi in box) + "]"
