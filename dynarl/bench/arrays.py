"""State of one rank as numpy arrays: the endpoint of benchmarks that need no model."""

from __future__ import annotations

from typing import Any, Iterable, Sequence

import numpy as np

from dynarl.transport.messages import Fragment
from dynarl.vps.box import Box, intersect
from dynarl.vps.digest import digest_box
from dynarl.vps.execute import cast
from dynarl.vps.layout import Layout
from dynarl.vps.spec import ModelSpec

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
        if layout is not None and rank in layout.ranks:
            draw = np.random.default_rng(rank)
            for tensor, kind, box in layout.owned(self.spec, rank):
                if kind in kinds:
                    dtype = np.uint16 if self.spec.itemsize(kind) == 2 else np.uint32
                    shape = [hi - lo for lo, hi in box]
                    array = draw.integers(0, 60000, shape, dtype) if filled else np.zeros(shape, dtype)
                    held.setdefault((kind, self.spec.index[tensor.name]), []).append((box, array))
        return held

    def pack(self, fragments: Sequence[Fragment], out: memoryview) -> None:
        at = 0
        for kind, tensor, box in fragments:
            part = _find(self.source, kind, tensor, box)
            if part is None:
                part = _find(self.destination, kind, tensor, box)
            np.frombuffer(out, part.dtype, part.size, at).reshape(part.shape)[...] = part
            at += part.nbytes

    def unpack(self, fragments: Sequence[Fragment], data: memoryview) -> None:
        at = 0
        for kind, tensor, box in fragments:
            part = _find(self.destination, kind, tensor, box)
            part[...] = np.frombuffer(data, part.dtype, part.size, at).reshape(part.shape)
            at += part.nbytes

    def copy_local(self, local: Iterable[Any]) -> None:
        for item in local:
            kind, tensor, box = item.fragment
            target = _find(self.destination, kind, tensor, box)
            if item.how == "keep":
                target[...] = _find(self.source, kind, tensor, box)
            else:
                master = _find(self.destination, "master", tensor, box)
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


def _find(held: Held, kind: str, tensor: int, box: Box) -> np.ndarray | None:
    """The part of the array that holds a box, a fragment lies in one piece."""
    for outer, array in held.get((kind, tensor), ()):
        if intersect(outer, box) == box:
            return array[tuple(slice(lo - base, hi - base) for (lo, hi), (base, _) in zip(box, outer))]
    return None
