"""State of one rank as numpy arrays: the endpoint of benchmarks that need no model."""

from __future__ import annotations

from typing import Any, Iterable, Sequence

import numpy as np

from dynarl.transport.memory import Span, View, spans_of
from dynarl.transport.messages import Fragment
from dynarl.vps.box import Box, volume
from dynarl.vps.digest import digest_box
from dynarl.vps.execute import cast
from dynarl.vps.layout import ALL_KINDS, Layout
from dynarl.vps.spec import LogicalTensor, ModelSpec

ALIGN = 64
PACKED_BYTES = 128 << 10

Held = dict[tuple[str, int], list[tuple[Box, np.ndarray]]]


class Arrays:
    """One array per piece of a source layout and of a destination layout; what is sent is found by its box."""

    def __init__(
        self, spec: ModelSpec, rank: int, source: Layout | None, destination: Layout | None, kinds: Sequence[str]
    ):
        self.spec = spec
        self.source = self._held(rank, source, kinds, filled=True)
        self.destination = self._held(rank, destination, kinds, filled=False)

    def _held(self, rank: int, layout: Layout | None, kinds: Sequence[str], filled: bool) -> Held:
        held: Held = {}
        if layout is None or rank not in layout.ranks:
            return held
        owned = [(t, kind, box) for t, kind, box in layout.owned(self.spec, rank) if kind in kinds]
        sizes = [-(-volume(box) * self.spec.itemsize(kind) // ALIGN) * ALIGN for _, kind, box in owned]
        # One block, as a trainer's buffers are: numpy asks for huge pages for it.
        block = np.empty(sum(sizes), np.uint8)
        block[:] = 0
        at = 0
        for (tensor, kind, box), size in zip(owned, sizes):
            dtype = np.dtype(np.uint16 if self.spec.itemsize(kind) == 2 else np.uint32)
            array = block[at : at + volume(box) * dtype.itemsize].view(dtype).reshape([hi - lo for lo, hi in box])
            if filled:
                array[...] = self._values(tensor, kind, box)
            held.setdefault((kind, self.spec.index[tensor.name]), []).append((box, array))
            at += size
        return held

    def _values(self, tensor: LogicalTensor, kind: str, box: Box) -> np.ndarray:
        """Random numbers, the same for an element wherever it is held; a parameter is the cast of its master."""
        if kind == "param":
            return cast(self._values(tensor, "master", box).view(np.float32), np.dtype(np.uint16), self.spec.dtype)
        draw = np.random.default_rng([ALL_KINDS.index(kind), self.spec.index[tensor.name]])
        mantissas = draw.integers(0, 1 << 23, tensor.shape, np.uint32)
        return mantissas[tuple(slice(lo, hi) for lo, hi in box)] | np.uint32(0x3F800000)

    def pack(self, fragments: Sequence[Fragment], out: memoryview) -> None:
        at = 0
        for kind, tensor, box in fragments:
            part = self.find(self.source, kind, tensor, box)
            if part is None:
                part = self.find(self.destination, kind, tensor, box)
            packed = np.frombuffer(out, part.dtype, part.size, at).reshape(part.shape)
            # In pieces that are not written around the cache: MPI is to find them there.
            height = max(1, PACKED_BYTES * len(part) // max(1, part.nbytes))
            for row in range(0, len(part), height):
                packed[row : row + height] = part[row : row + height]
            at += part.nbytes

    def unpack(self, fragments: Sequence[Fragment], data: memoryview) -> None:
        at = 0
        for kind, tensor, box in fragments:
            part = self.find(self.destination, kind, tensor, box)
            part[...] = np.frombuffer(data, part.dtype, part.size, at).reshape(part.shape)
            at += part.nbytes

    def spans(self, fragments: Sequence[Fragment], arriving: bool) -> list[Span]:
        found = []
        for kind, tensor, box in fragments:
            part = self.find(self.source, kind, tensor, box) if not arriving else None
            if part is None:
                part = self.find(self.destination, kind, tensor, box)
            found += spans_of(box, [View(box, part.ctypes.data, part.strides, part.itemsize)])
        return found

    def copy_local(self, local: Iterable[Any]) -> None:
        for item in local:
            kind, tensor, box = item.fragment
            target = self.find(self.destination, kind, tensor, box)
            if item.how == "keep":
                target[...] = self.find(self.source, kind, tensor, box)
            else:
                master = self.find(self.source, "master", tensor, box)
                if master is None:
                    master = self.find(self.destination, "master", tensor, box)
                self.cast(master, target)

    def digests(self) -> dict[str, int]:
        """Of the destination."""
        total: dict[str, int] = {}
        for (kind, tensor), pieces in self.destination.items():
            for box, array in pieces:
                total[kind] = total.get(kind, 0) + digest_box(self.spec.tensors[tensor].name, kind, box, array)
        return {kind: value % 2**64 for kind, value in total.items()}

    def cast(self, master: np.ndarray, target: np.ndarray) -> None:
        target[...] = cast(master.view(np.float32), target.dtype, self.spec.dtype)

    @staticmethod
    def find(held: Held, kind: str, tensor: int, box: Box) -> np.ndarray | None:
        """The part of the array that holds a box; a fragment lies in one piece."""
        for outer, array in held.get((kind, tensor), ()):
            if outer == box:
                return array
            if all(a <= lo and hi <= b for (lo, hi), (a, b) in zip(box, outer)):
                return array[tuple(slice(lo - base, hi - base) for (lo, hi), (base, _) in zip(box, outer))]
        return None
