"""The training state of one rank as logical pieces: what Megatron keeps, by (kind, tensor, box).

    param                 a box of a local parameter
    master                the fp32 copy that the optimizer steps on: a flat interval of the local parameter (ZeRO-1).
                          With fp32 parameters it is a part of the parameter itself, not a copy
    exp_avg, exp_avg_sq   Adam's moments, the same interval. Before the first step Adam has none: they are made, zeros

Every piece is a strided view of the live storage; nothing is gathered or reordered. Beside the tensors move the
scalars:

    steps     of Adam, of "dense" parameters and of "expert" ones, which may have an optimizer of their own. torch's
              Adam counts in a tensor per parameter, up in place, so every parameter gets one of its own: a shared one
              would be counted up once per parameter
    lr        of every parameter group

There is no loss scale (bfloat16 and float32 need none). Random numbers: training draws none (no dropout; weights come
from checkpoints), so no generator moves: a rank keeps the one it has. Whoever adds dropout must derive its seeds from
(run seed, layout coordinates, step), for ranks that join have no history.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynarl.roles.training.shard import MOMENTS, Shard
from dynarl.transport.endpoint import Fragment
from dynarl.transport.memory import Span, View, copy, spans_of
from dynarl.vps.box import Box, intersect, volume
from dynarl.vps.digest import axis_weights, column_weights, digest_box, tensor_weight
from dynarl.vps.spec import EMBEDDING
from dynarl.vps.train_layout import Part, Placement

# Elements that a digest looks at at a time: what it needs of memory, in 8-byte numbers.
DIGEST_ELEMENTS = 1 << 20


class State:
    """The endpoint of a rank (see transport.endpoint): a shard as the source, the next one as the destination."""

    def __init__(self, source: Shard | None, target: Shard | None):
        self.source = None if source is None else Bound(source)
        self.target = None if target is None else Bound(target)

    def pack(self, fragments: Sequence[Fragment], out: memoryview) -> None:
        if len(out):
            self.pack_tensor(fragments, torch.from_numpy(np.frombuffer(out, np.uint8)))

    def unpack(self, fragments: Sequence[Fragment], data: memoryview) -> None:
        if len(data):
            bytes_ = np.frombuffer(data, np.uint8)
            # torch wants memory that may be written to, though nothing is written here.
            self.unpack_tensor(fragments, torch.from_numpy(bytes_ if bytes_.flags.writeable else bytes_.copy()))

    @torch.no_grad()
    def pack_tensor(self, fragments: Sequence[Fragment], out: Tensor) -> None:
        """As `pack`, to bytes on any device."""
        at = 0
        for fragment in fragments:
            views, box = self._held(fragment), fragment[2]
            size = volume(box) * views[0][1].element_size()
            value, in_place = _typed(out[at : at + size], views[0][1].dtype, box)
            for inner, view in views:
                value[_within(inner, box)].copy_(view)
            if not in_place:
                out[at : at + size].copy_(value.flatten().view(torch.uint8))
            at += size
        _check_size(out, at)

    @torch.no_grad()
    def unpack_tensor(self, fragments: Sequence[Fragment], data: Tensor) -> None:
        """As `unpack`, of bytes on any device."""
        at = 0
        for kind, tensor, box in fragments:
            views = self._arriving(kind, tensor, box)
            size = volume(box) * views[0][1].element_size()
            value, in_place = _typed(data[at : at + size], views[0][1].dtype, box)
            if not in_place:
                value.flatten().view(torch.uint8).copy_(data[at : at + size])
            for inner, view in views:
                _put(view, value[_within(inner, box)])
            at += size
        _check_size(data, at)

    def spans(self, fragments: Sequence[Fragment], arriving: bool) -> list[Span] | None:
        """Where the bytes of the fragments lie, or will; None: not in the host's memory, or not row by row."""
        found: list[Span] = []
        for fragment in fragments:
            views = self._arriving(*fragment) if arriving else self._held(fragment)
            if views[0][1].device.type != "cpu":
                return None
            spans = spans_of(fragment[2], [_view(*view) for view in views])
            if spans is None:
                return None
            found += spans
        return found

    @torch.no_grad()
    def put(self, kind: str, tensor: int, box: Box, value: Tensor) -> None:
        """Write a box at the destination; a value of another type is cast."""
        for inner, view in self._arriving(kind, tensor, box):
            view.copy_(value[_within(inner, box)])

    @torch.no_grad()
    def copy_local(self, local: Iterable[Any]) -> None:
        for how, fragment in ((each.how, each.fragment) for each in local):
            kind, tensor, box = fragment
            if how == "derive":
                self.derive(tensor, box)
                continue
            for inner, view in self._arriving(kind, tensor, box):
                for part, old in self._source_views(kind, tensor, inner):
                    _put(view[_within(part, inner)], old)

    @torch.no_grad()
    def derive(self, tensor: int, box: Box) -> None:
        """Cast a part of a parameter at the destination from its master: from that which was kept, as long as the cache
        has it, else from that which has come."""
        for inner, view in self._arriving("param", tensor, box):
            kept = self.source.covering("master", tensor, inner) if self.source is not None else []
            for part, master in kept or self._arriving("master", tensor, inner):
                view[_within(part, inner)].copy_(master)

    def digests(self) -> dict[str, int]:
        """{kind: number mod 2**64} of the destination, of the source where there is none; {} of neither."""
        bound = self.target or self.source
        return {} if bound is None else bound.digests()

    def _held(self, fragment: Fragment) -> list[tuple[Box, Tensor]]:
        for bound in (self.source, self.target):
            if bound is not None and (views := bound.covering(*fragment)):
                return views
        raise KeyError(f"{fragment} is neither held here nor has it arrived")

    def _source_views(self, kind: str, tensor: int, box: Box) -> list[tuple[Box, Tensor]]:
        if self.source is None or not (views := self.source.covering(kind, tensor, box)):
            raise KeyError(f"{kind} of tensor {tensor}, {box}, is not held here")
        return views

    def _arriving(self, kind: str, tensor: int, box: Box) -> list[tuple[Box, Tensor]]:
        if self.target is None or not (views := self.target.covering(kind, tensor, box)):
            raise KeyError(f"{kind} of tensor {tensor}, {box}, has no place here")
        return views


class Bound:
    """The pieces of one shard, which must have memory. Moments that Adam has not made yet are made, as zeros."""

    def __init__(self, shard: Shard):
        self.shard, self.spec = shard, shard.arch.spec
        self._parts: dict[int, list[tuple[Part, Placement]]] = {}
        self._placements = shard.layout.placements(self.spec, shard.rank)
        for placement in self._placements:
            for part in placement.parts:
                self._parts.setdefault(part.tensor, []).append((part, placement))
        self._owned: dict[str, tuple[int, int, Tensor, Any, str]] = {}
        if shard.owner:
            self._bind_optimizers()

    @property
    def kinds(self) -> tuple[str, ...]:
        """What there is to move: parameters, of owners all."""
        return ("param", "master", *MOMENTS) if self.shard.owner else ("param",)

    def covering(self, kind: str, tensor: int, box: Box) -> list[tuple[Box, Tensor]]:
        """[(part of the box, live view of it)]; [] unless all of the box is here."""
        found = list(self._views(kind, tensor, box))
        return found if sum(volume(inner) for inner, _ in found) == volume(box) else []

    @torch.no_grad()
    def digests(self) -> dict[str, int]:
        """Numbers whose sums over all ranks, mod 2**64, are the same for the same state in every layout:

        KIND             of the elements, each of which one rank counts
        KIND/replicas    0: what that rank counts as often as there are further copies, less what those count
        step             of the step counters, parameter by parameter; and step/replicas
        """
        total: dict[str, int] = {}
        for kind in self.kinds:
            for tensor, box, view, (first, copies) in self.pieces(kind):
                name = self.spec.tensors[tensor].name
                counted = {kind: digest_view(name, kind, box, view)}
                if kind == "master":
                    counted["step"] = volume(box) * self.steps_of(tensor, box) * tensor_weight(name, "step")
                for key, value in counted.items():
                    total[key] = total.get(key, 0) + (value if first else 0)
                    others = f"{key}/replicas"
                    total[others] = total.get(others, 0) + (value * (copies - 1) if first else -value)
        return {key: value % 2**64 for key, value in total.items()}

    def pieces(self, kind: str) -> Iterator[tuple[int, Box, Tensor, tuple[bool, int]]]:
        """(tensor, box, live view, (whether this rank is the first that has it, how many have it)) of all there is."""
        for tensor, parts in self._parts.items():
            for part, placement in parts:
                for box, view in self._part_views(kind, placement.parameter, part, part.box):
                    yield tensor, box, view, self._copies(kind, part, placement)

    def steps_of(self, tensor: int, box: Box) -> int:
        """Steps that the optimizer has made on a piece of a master."""
        for part, placement in self._parts[tensor]:
            if intersect(part.box, box) is not None:
                _, _, main, adam, _ = self._owned[placement.parameter]
                return _step_of(adam, main)
        raise KeyError(f"tensor {tensor}, {box}, is not here")

    @torch.no_grad()
    def clear_padding(self) -> None:
        """Zero what has no logical address, so that nothing comes in there: rows behind the last part of a parameter,
        and what the optimizer has of them."""
        for placement in self._placements:
            rows = max((part.at[0] + part.box[0][1] - part.box[0][0] for part in placement.parts), default=0)
            if placement.buffer or rows == placement.shape[0]:
                continue
            self.shard.params[placement.parameter][rows:].zero_()
            if placement.parameter in self._owned:
                start, _, main, adam, _ = self._owned[placement.parameter]
                first = max(0, rows * placement.shape[1] - start)
                for flat in (main, *(adam.state[main][kind] for kind in MOMENTS)):
                    flat.view(-1)[first:].zero_()

    # ---- scalars

    def scalars(self) -> dict[str, Any]:
        """{steps: {"dense": count, "expert": count}, lr: of the parameter groups}.

        Raises ValueError where parameters disagree.
        """
        steps: dict[str, int] = {}
        for name, (_, _, main, adam, which) in self._owned.items():
            count = _step_of(adam, main)
            if steps.setdefault(which, count) != count:
                raise ValueError(f"{name} has made {count} steps, other parameters {steps[which]}")
        rates = {group["lr"] for each in self.shard.optimizers for group in each.optimizer.param_groups}
        return {"steps": steps, "lr": max(rates, default=0.0)}

    def set_scalars(self, scalars: dict[str, Any]) -> None:
        """Take over counters and rate; a tensor of its own for each parameter."""
        for _, _, main, adam, which in self._owned.values():
            _set_step(adam, main, scalars["steps"][which])
        for each in self.shard.optimizers:
            for group in each.optimizer.param_groups:
                group["lr"] = scalars["lr"]

    # ---- inside

    def _bind_optimizers(self) -> None:
        names = {id(param): name for name, param in self.shard.params.items()}
        for optimizer in self.shard.optimizers:
            adam = optimizer.optimizer
            kinds = (
                (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
                (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            )
            for param, main in (pair for models, mains in kinds for m, s in zip(models, mains) for pair in zip(m, s)):
                span = optimizer._get_model_param_range_map(param)["param"]
                name = names[id(param)]
                self._owned[name] = (span.start, span.end, main, adam, "expert" if ".experts." in name else "dense")
                state = adam.state[main]
                for kind in MOMENTS:
                    if kind not in state:
                        state[kind] = torch.zeros_like(main)
                if "step" not in state and isinstance(adam, torch.optim.Adam):
                    _set_step(adam, main, 0)

    def _copies(self, kind: str, part: Part, placement: Placement) -> tuple[bool, int]:
        """(whether this rank is the first one that has this part, how many have it)."""
        layout, tensor = self.shard.layout, self.spec.tensors[part.tensor]
        at = layout.coordinates(self.shard.rank)
        first, copies = True, 1
        if kind == "param" or not layout.zero1:
            first, copies = (at.edp == 0, layout.expert_dp) if placement.expert else (at.dp == 0, layout.dp)
        if not placement.expert:
            if layout.tp > 1 and len(placement.parts) == 1 and placement.shape == tensor.shape:
                first, copies = first and at.tp == 0, copies * layout.tp
            if layout.pp > 1 and self.spec.tied and tensor.name == EMBEDDING:
                first, copies = first and at.pp == 0, copies * 2
        return first, copies

    def _views(self, kind: str, tensor: int, box: Box) -> Iterator[tuple[Box, Tensor]]:
        for part, placement in self._parts.get(tensor, ()):
            if (inner := intersect(part.box, box)) is not None:
                yield from self._part_views(kind, placement.parameter, part, inner)

    def _part_views(self, kind: str, parameter: str, part: Part, box: Box) -> Iterator[tuple[Box, Tensor]]:
        if kind == "param":
            yield box, self.shard.params[parameter].detach()[_local(part, box)]
        elif parameter in self._owned:
            yield from self._optimizer_views(kind, parameter, part, box)

    def _optimizer_views(self, kind: str, name: str, part: Part, box: Box) -> Iterator[tuple[Box, Tensor]]:
        start, stop, main, adam, _ = self._owned[name]
        flat = main.detach() if kind == "master" else adam.state[main][kind]
        parameter = self.shard.params[name]
        columns = parameter.shape[1] if parameter.dim() == 2 else 1
        rows, *more = _local(part, box)
        first, last = (more[0].start, more[0].stop) if more else (0, 1)
        for r0, r1, c0, c1 in _inside(rows.start, rows.stop, first, last, columns, start, stop):
            offset = flat.storage_offset() + r0 * columns + c0 - start
            view = flat.as_strided((r1 - r0, c1 - c0), (columns, 1), offset)
            row = box[0][0] + r0 - rows.start
            if len(box) == 1:
                yield ((row, row + r1 - r0),), view[:, 0]
            else:
                column = box[1][0] + c0 - first
                yield ((row, row + r1 - r0), (column, column + c1 - c0)), view


def _inside(
    top: int, bottom: int, left: int, right: int, columns: int, start: int, stop: int
) -> Iterator[tuple[int, int, int, int]]:
    """Rectangles (top, bottom, left, right) of the cells of one that are in flat interval start..stop-1 of a matrix.

    >>> list(_inside(0, 4, 1, 3, columns=4, start=6, stop=14))  # from (1, 2) to (3, 1)
    [(1, 2, 2, 3), (2, 3, 1, 3), (3, 4, 1, 2)]
    """
    # Rows all of whose cells are in the interval, then the rows that it starts and ends in.
    first, last = max(top, -((left - start) // columns)), min(bottom, (stop - right) // columns + 1)
    found = [(first, last, left, right)] if first < last else []
    for row in {start // columns, (stop - 1) // columns}:
        lo, hi = max(left, start - row * columns), min(right, stop - row * columns)
        if top <= row < bottom and not first <= row < last and lo < hi:
            found.append((row, row + 1, lo, hi))
    yield from sorted(found)


def digest_view(name: str, kind: str, box: Box, view: Tensor) -> int:
    """As vps.digest.digest_box, of a tensor on any device."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[view.element_size()]
    if view.device.type == "cpu":
        # Not `.numpy()`: torch never lets memory go again that it was called on (see Shard.free).
        return digest_box(name, kind, box, np.from_dlpack(view.view(integer)))
    return digest_on_device(name, kind, box, view.view(integer))


def digest_on_device(name: str, kind: str, box: Box, view: Tensor) -> int:
    """As digest_view, in torch's arithmetic. view: integers of the size of the elements."""
    # torch multiplies int64 mod 2**64, which is the same for signed and unsigned numbers.
    weights = [axis_weights(0, *box[0]), *(column_weights(*columns, view.element_size()) for columns in box[1:])]
    rows, *columns = (torch.from_numpy(each.view(np.int64)).to(view.device) for each in weights)
    mask, total = (1 << 8 * view.element_size()) - 1, 0
    height = max(1, DIGEST_ELEMENTS // max(1, view[0].numel())) if len(view) else 1
    for at in range(0, len(view), height):
        bits = view[at : at + height].long().bitwise_and_(mask).add_(1)
        if columns:
            bits = bits.mul_(columns[0]).sum(1)
        total += int((bits * rows[at : at + height]).sum())
    return total * tensor_weight(name, kind) % 2**64


def _put(target: Tensor, value: Tensor) -> None:
    """Copy to where it is to stay. By the C library where it can be, which writes large pieces around the cache."""
    if target.device.type == value.device.type == "cpu" and target.is_contiguous() and value.is_contiguous():
        copy(target.data_ptr(), value.data_ptr(), value.nbytes)
    else:
        target.copy_(value)


def _local(part: Part, box: Box) -> tuple[slice, ...]:
    """Where a box of the tensor is in the local parameter."""
    return tuple(slice(at + lo - p, at + hi - p) for (lo, hi), (p, _), at in zip(box, part.box, part.at))


def _within(inner: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(lo - base, hi - base) for (lo, hi), (base, _) in zip(inner, outer))


def _view(box: Box, tensor: Tensor) -> View:
    size = tensor.element_size()
    return View(box, tensor.data_ptr(), tuple(size * stride for stride in tensor.stride()), size)


def _check_size(data: Tensor, used: int) -> None:
    if used != len(data):
        raise ValueError(f"a message of {len(data)} bytes has {used} bytes of state: its plan is of another dtype")


def _typed(data: Tensor, dtype: torch.dtype, box: Box) -> tuple[Tensor, bool]:
    """Bytes as a box of numbers, and whether in place: not where they begin at an odd address."""
    shape = [hi - lo for lo, hi in box]
    if data.data_ptr() % dtype.itemsize == 0 and data.storage_offset() % dtype.itemsize == 0:
        return data.view(dtype).view(shape), True
    return torch.empty(shape, dtype=dtype, device=data.device), False


def _step_of(adam: torch.optim.Optimizer, main: Tensor) -> int:
    # torch's Adam counts steps per parameter, fused ones (GPU) per group.
    if "step" in adam.state[main]:
        return int(adam.state[main]["step"])
    return max((int(group.get("step", 0)) for group in adam.param_groups), default=0)


def _set_step(adam: torch.optim.Optimizer, main: Tensor, count: int) -> None:
    if isinstance(adam, torch.optim.Adam):
        adam.state[main]["step"] = torch.tensor(float(count))
        return
    for group in adam.param_groups:
        group["step"] = count
