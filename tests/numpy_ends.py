"""Endpoints of numpy arrays whose values say where they belong, for tests of what moves between them."""

from __future__ import annotations

import numpy as np

from dynarl.transport.memory import View, spans_of
from dynarl.vps.box import intersect, volume
from dynarl.vps.execute import cast

DTYPES = {"param": np.uint16, "master": np.uint32, "exp_avg": np.uint32, "exp_avg_sq": np.uint32}


def coded(spec, kind: str, tensor: int, box) -> np.ndarray:
    """Values that say where they belong. A parameter is the cast of its master: the same whether shipped or derived."""
    if kind == "param":
        return cast(coded(spec, "master", tensor, box).view(np.float32), np.dtype(np.uint16), "bfloat16")
    shape = spec.tensors[tensor].shape
    index = np.zeros([hi - lo for lo, hi in box], np.uint64)
    for axis, (lo, hi) in enumerate(box):
        steps = np.arange(lo, hi, dtype=np.uint64).reshape([-1 if a == axis else 1 for a in range(len(box))])
        index = index * np.uint64(shape[axis]) + steps
    salt = np.uint64(40503 * (tensor + 1) + 977 * list(DTYPES).index(kind))
    # Without bit 30 it is never the number of an infinity or of a NaN.
    return ((index + np.uint64(1)) * np.uint64(2654435761) + salt).astype(np.uint32) & np.uint32(0xBFFFFFFF)


class Arrays:
    """Endpoint over {(kind, tensor): [(box, array)]} at the source and at the destination."""

    def __init__(self, spec, source, destination):
        self.spec, self.source, self.destination = spec, source, destination

    @classmethod
    def of_layouts(cls, spec, rank: int, source, destination, kinds) -> Arrays:
        """Source filled with address-coded values, destination with zeros."""

        def boxes(layout):
            held: dict = {}
            for piece in layout.owned(spec, rank) if rank in layout.ranks else ():
                if piece.kind in kinds:
                    held.setdefault((piece.kind, spec.index[piece.tensor.name]), []).append(piece.box)
            return held

        full = {key: [(b, coded(spec, *key, b)) for b in found] for key, found in boxes(source).items()}
        empty = {
            key: [(b, np.zeros([hi - lo for lo, hi in b], DTYPES[key[0]])) for b in found]
            for key, found in boxes(destination).items()
        }
        return cls(spec, full, empty)

    def pack(self, fragments, out) -> None:
        at = 0
        for kind, tensor, box in fragments:
            value = self._read(self.source, kind, tensor, box)
            if value is None:
                value = self._read(self.destination, kind, tensor, box)
            assert value is not None, f"{kind} {tensor} {box} is not here"
            out[at : at + value.nbytes] = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
            at += value.nbytes
        assert at == len(out)

    def unpack(self, fragments, data) -> None:
        at = 0
        for kind, tensor, box in fragments:
            value = np.frombuffer(data, DTYPES[kind], volume(box), at).reshape([hi - lo for lo, hi in box])
            self._write(kind, tensor, box, value)
            at += value.nbytes
        assert at == len(data)

    def spans(self, fragments, arriving):
        found = []
        for kind, tensor, box in fragments:
            stores = [self.destination] if arriving else [self.source, self.destination]
            whole = [
                (held, array)
                for store in stores
                for held, array in store.get((kind, tensor), ())
                if intersect(held, box) == box
            ]
            if not whole:
                return None
            held, array = whole[0]
            part = array[_within(box, held)]
            found += spans_of(box, [View(box, part.ctypes.data, part.strides, part.itemsize)])
        return found

    def copy_local(self, local) -> None:
        for how, _, (kind, tensor, box) in local:
            if how == "keep":
                self._write(kind, tensor, box, self._read(self.source, kind, tensor, box))
            else:
                master = self._read(self.destination, "master", tensor, box)
                self._write(kind, tensor, box, cast(master.view(np.float32), np.dtype(np.uint16), "bfloat16"))

    def digests(self) -> dict[str, int]:
        """Sum of all received values by kind: enough to tell two runs apart."""
        sums: dict[str, int] = {}
        for (kind, _), held in self.destination.items():
            sums[kind] = sums.get(kind, 0) + sum(int(array.sum(dtype=np.uint64)) for _, array in held)
        return {kind: value & 0xFFFFFFFF for kind, value in sums.items()}

    def wrong(self) -> list:
        """Places at the destination that hold another value than their own."""
        return [
            (key, box)
            for key, held in self.destination.items()
            for box, array in held
            if not np.array_equal(array, coded(self.spec, *key, box))
        ]

    def _read(self, store, kind, tensor, box):
        result, missing = None, volume(box)
        for held, array in store.get((kind, tensor), ()):
            both = intersect(held, box)
            if both == box:
                return array[_within(box, held)]
            if both is not None:
                if result is None:
                    result = np.empty([hi - lo for lo, hi in box], array.dtype)
                result[_within(both, box)] = array[_within(both, held)]
                missing -= volume(both)
        return result if not missing else None

    def _write(self, kind, tensor, box, value) -> None:
        for held, array in self.destination[kind, tensor]:
            if intersect(held, box) == box:
                array[_within(box, held)] = value
                return
        raise KeyError((kind, tensor, box))


def _within(inner, outer) -> tuple[slice, ...]:
    return tuple(slice(lo - base, hi - base) for (lo, hi), (base, _) in zip(inner, outer))
