"""Where a Megatron trainer keeps each part of a model (megatron-core 0.19.2, its local layer specs).

A parameter of a rank is a stack of row blocks of logical tensors, or a column block of one::

    linear_qkv   for each group of the rank: its query heads | its key head | its value head
                 (with tp > groups one group is cut over several ranks, wherever the cut falls)
    linear_fc1   gate rows of the rank | up rows of the rank
    embedding, output_layer    vocabulary rows of the rank; the vocabulary is padded to a multiple of
                 vocab_divisible_by x tp
    linear_proj, linear_fc2    columns of the rank
    norms, router, biases of row-parallel layers    whole on every rank

Masters and moments are those parameters again, cut into flat intervals by ZeRO-1 (zero.py).

Ranks are numbered as Megatron numbers them: tp fastest, then cp, dp, pp; for experts etp, ep, expert-dp, pp. With
ep = 1 and etp = tp experts are in the buffers of the dense parameters, else in buffers of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from dynarl.vps.box import Box, Pieces, collect
from dynarl.vps.layout import (
    ALL_KINDS,
    Layout,
    LayoutError,
    attention_rules,
    check_degrees,
    divides,
    expert_rules,
    padded,
    set_ranks,
)
from dynarl.vps.local import Cut, Place, Table, flat, table
from dynarl.vps.spec import ModelSpec


@dataclass(frozen=True)
class Part:
    """One box of a logical tensor, and where it starts in a local parameter; local slice = box - box.lo + at."""

    tensor: int
    box: Box
    at: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """One parameter of a rank, by its name in its model chunk. Cells that no part covers are vocabulary padding."""

    parameter: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    chunk: int
    expert: bool  # in the buffers of the experts, over the expert-data-parallel group
    buffer: bool = False  # a buffer of the module, not a parameter


class Shards:
    """ZeRO-1 intervals read from live buffers: coordinate -> {(chunk, parameter): (lo, hi)}, as a value."""

    def __init__(self, by_position: Mapping[int, Mapping[tuple[int, str], tuple[int, int]]]) -> None:
        self.by_position = {position: dict(intervals) for position, intervals in by_position.items()}
        self._key = tuple((p, tuple(sorted(intervals.items()))) for p, intervals in sorted(self.by_position.items()))
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shards) and self._key == other._key


class Coordinates(NamedTuple):
    """Place of one rank in the grid of the dense parameters and in that of the experts."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class TrainLayout(Layout):
    """The ranks of a Megatron trainer. World = tp x cp x dp x pp.

    pp_layers: layers of each pipeline stage, or of each of the pp x vpp virtual stages in the order of the layers; a
    count for each stage only is shared evenly by its vpp chunks. etp None: as tp. bucket_size, busbw_padding: as in
    Megatron's DistributedDataParallelConfig; bucket_size None where the reduction of gradients does not overlap.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    vpp: int = 1
    pp_layers: tuple[int, ...] | None = None
    zero1: bool = True
    ranks: tuple[int, ...] | None = None
    vocab_divisible_by: int = 128
    bucket_size: int | None = None
    busbw_padding: bool = False
    kinds: tuple[str, ...] = ALL_KINDS
    shards: Shards | None = None

    def __post_init__(self) -> None:
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        check_degrees(self, ("tp", "pp", "dp", "ep", "etp", "cp", "vpp", "vocab_divisible_by"))
        if self.bucket_size is not None:
            check_degrees(self, ("bucket_size",))
        set_ranks(self, self.tp * self.cp * self.dp * self.pp, "tp x cp x dp x pp")
        world, expert_world = len(self.ranks), self.etp * self.ep * self.pp
        if world % expert_world:
            raise LayoutError(
                f"etp x ep x pp must divide the ranks, but etp is {self.etp}, ep is {self.ep}, pp is {self.pp}, "
                f"which makes {expert_world}, and there are {world} ranks"
            )
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(f"vpp needs pp of 2 or more, but vpp is {self.vpp} and pp is 1")
        if self.pp_layers is not None:
            self._set_pp_layers()

    def _set_pp_layers(self) -> None:
        counts = tuple(self.pp_layers)
        if any(not isinstance(count, int) or count < 0 for count in counts):
            raise LayoutError(f"pp_layers must be counts of layers, not {counts}")
        if len(counts) not in (self.pp, self.pp * self.vpp):
            raise LayoutError(
                f"pp_layers must have an entry for each of {self.pp} stages or of {self.pp * self.vpp} virtual stages "
                f"(pp x vpp), but has {len(counts)}"
            )
        if len(counts) < self.pp * self.vpp:
            odd = [count for count in counts if count % self.vpp]
            if odd:
                raise LayoutError(f"vpp must divide the layers of a stage, but one has {odd[0]} and vpp is {self.vpp}")
            counts = tuple(count // self.vpp for count in counts) * self.vpp
        object.__setattr__(self, "pp_layers", counts)

    # ---- public, beyond Layout

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert."""
        return len(self.ranks) // (self.etp * self.ep * self.pp)

    @property
    def replicas_per_lease(self) -> int:
        """How many neighbouring replicas exchange tokens for their experts, and so work on the same samples."""
        return math.lcm(self.tp, self.etp * self.ep) // self.tp

    @property
    def expert_buffers(self) -> bool:
        """Whether experts have flat buffers and an optimizer of their own."""
        return self._cut.expert_buffers

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a physical rank. Raises LayoutError if it has none."""
        if rank not in self._positions:
            raise LayoutError(f"rank {rank} is not among the {len(self.ranks)} ranks of this layout")
        return self._at(self._positions[rank])

    def stage_layers(self, spec: ModelSpec, stage: int) -> list[range]:
        """Global layer numbers of each model chunk of a pipeline stage."""
        counts = self.pp_layers or (spec.layers // (self.pp * self.vpp),) * (self.pp * self.vpp)
        ends = np.cumsum(counts).tolist()
        return [range(ends[v] - counts[v], ends[v]) for v in range(stage, self.pp * self.vpp, self.pp)]

    def padded_vocab(self, spec: ModelSpec) -> int:
        """Vocabulary rows with padding, over all tp ranks."""
        return padded(spec.vocab, self.vocab_divisible_by * self.tp)

    def placements(self, spec: ModelSpec, rank: int) -> list[Placement]:
        """Every parameter of a rank, chunk by chunk in registration order; buffers stand where their module does."""
        self.checked(spec)
        local = self._table(spec, self.coordinates(rank))
        return [
            Placement(name, template.shape, _parts(spec, local, i), chunk, template.expert, template.buffer)
            for i, (chunk, name, template) in enumerate(local.parameters)
        ]

    def shard_intervals(self, spec: ModelSpec, rank: int) -> dict[tuple[int, str], tuple[int, int]]:
        """(chunk, parameter) -> flat interval of it that the rank's optimizer owns; parameters of which it owns none
        are left out."""
        self.checked(spec)
        local = self._table(spec, self.coordinates(rank))
        lo, hi = (side.tolist() for side in self._intervals(local, self._positions[rank]))
        return {
            (chunk, name): (lo[i], hi[i])
            for i, (chunk, name, template) in enumerate(local.parameters)
            if lo[i] < hi[i] and not template.buffer
        }

    def with_shards(self, shards: Mapping[int, Mapping[tuple[int, str], tuple[int, int]]]) -> Self:
        """Use intervals read from live buffers for these ranks: {rank: {(chunk, parameter): (lo, hi)}}.

        A parameter that is left out is one of which the rank owns nothing. Other ranks go by the formula.
        """
        for rank in shards:
            self.coordinates(rank)
        positions = self._positions
        return dataclasses.replace(self, shards=Shards({positions[rank]: part for rank, part in shards.items()}))

    # ---- Layout

    def _rules(self, spec: ModelSpec) -> Iterator[tuple[bool, str]]:
        tp, name, stages = self.tp, spec.name, self.pp * self.vpp
        yield from attention_rules(spec, tp)
        if not spec.latent:
            rows = (spec.heads + 2 * spec.groups) * spec.head_dim
            yield divides("tp", tp, "rows of the fused query, key and value projection", rows, spec)
        else:
            # Megatron's local specs cut these as well.
            down = spec.latent.kv_rank + spec.latent.rope_dim
            yield divides("tp", tp, "rows of the key/value down projection", down, spec)
            yield divides("tp", tp, "rows of the query down projection", spec.latent.q_rank, spec)
        if len(spec.moe_layers) < spec.layers:
            yield divides("tp", tp, "feed-forward width", spec.ffn, spec)
        if spec.experts:
            yield divides("tp", tp, "width of the shared experts", spec.shared_ffn, spec)
        else:
            yield self.etp == tp, f"etp must be tp for a model without experts, but etp is {self.etp} and tp is {tp}"
        yield from expert_rules(spec, self.ep, self.etp)
        biased = [spec.out_bias, spec.mlp_bias, spec.out_bias and not spec.qkv_bias, spec.mlp_bias and spec.experts > 0]
        biases = "in all linear layers, in the query, key and value projection only, or in none, and in no expert"
        yield biased in ([False] * 4, [True, True, False, False]), f"biases must be {biases}, which {name} does not fit"
        if self.pp_layers is None:
            numbers = f"but {name} has {spec.layers} layers, pp is {self.pp} and vpp is {self.vpp}"
            yield spec.layers % stages == 0, f"pp x vpp must divide the layers unless pp_layers is given, {numbers}"
        else:
            numbers = f"but {name} has {spec.layers} layers and {self.pp_layers} sum up to {sum(self.pp_layers)}"
            yield sum(self.pp_layers) == spec.layers, f"pp_layers must sum up to the layers, {numbers}"

    def _at(self, position: int) -> Coordinates:
        stage = len(self.ranks) // self.pp
        inner, expert = position // self.tp, position // self.etp
        return Coordinates(
            tp=position % self.tp,
            cp=inner % self.cp,
            dp=inner // self.cp % self.dp,
            pp=position // stage,
            etp=position % self.etp,
            ep=expert % self.ep,
            edp=expert // self.ep % self.expert_dp,
        )

    @property
    def _cut(self) -> Cut:
        return Cut(self.tp, self.ep, self.etp, self.pp, self.vocab_divisible_by)

    def _table(self, spec: ModelSpec, at: Coordinates) -> Table:
        chunks = tuple(self.stage_layers(spec, at.pp))
        return table(spec, self._cut, chunks, at.pp == 0, at.pp == self.pp - 1, Place(at.tp, at.etp, at.ep))

    def _pieces(self, spec: ModelSpec, sharded_as: str, positions: Sequence[int]) -> Pieces:
        groups = []
        for position in positions:
            local = self._table(spec, self._at(position))
            whole = sharded_as == "param" or not self.zero1
            boxes = local.boxes if whole else local.cut(*self._intervals(local, position))
            groups.append((self.ranks[position], *boxes))
        return collect(groups)

    def _intervals(self, local: Table, position: int) -> tuple[np.ndarray, np.ndarray]:
        """(lo, hi) [P] of what a rank's optimizer owns of each parameter. Buffers are whole on every rank."""
        lo, hi = np.zeros_like(local.numel), local.numel.copy()
        if not self.zero1:
            return lo, hi
        at = self._at(position)
        dense, expert = (self.dp * self.cp, at.cp + self.cp * at.dp), (self.expert_dp, at.edp)
        for chunk in range(self.vpp):
            # Buckets are for overlapping reduction with the backward pass; only the first chunk of all has that need.
            bucket_size = self.bucket_size if at.pp == 0 and chunk == 0 else None
            for is_expert, (shards, shard) in ((False, dense), (True, expert)):
                which, buffer = flat(local, chunk, is_expert, shards, bucket_size, self.busbw_padding)
                lo[which], hi[which] = buffer.owned(shard)
        if self.shards is not None and position in self.shards.by_position:
            self._read_live(local, self.shards.by_position[position], lo, hi)
        return lo, hi

    def _read_live(self, local: Table, live: Mapping, lo: np.ndarray, hi: np.ndarray) -> None:
        unknown = set(live)
        for i, (chunk, name, template) in enumerate(local.parameters):
            if not template.buffer:
                lo[i], hi[i] = live.get((chunk, name), (0, 0))
                unknown.discard((chunk, name))
                if not 0 <= lo[i] <= hi[i] <= local.numel[i]:
                    numbers = f"{name} of chunk {chunk} has {local.numel[i]} elements and [{lo[i]}, {hi[i]}) is given"
                    raise LayoutError(f"an interval must lie in its parameter, but {numbers}")
        if unknown:
            raise LayoutError(f"intervals must be of parameters of the rank, but it has no {sorted(unknown)[0]}")


def _parts(spec: ModelSpec, local: Table, parameter: int) -> tuple[Part, ...]:
    first, last = np.searchsorted(local.param, (parameter, parameter + 1)).tolist()
    parts = []
    for i in range(first, last):
        tensor = int(local.tensor[i])
        axes = len(spec.tensors[tensor].shape)
        box = tuple(zip(local.lo[i].tolist(), local.hi[i].tolist()))[:axes]
        parts.append(Part(tensor, box, (int(local.at[i]), 0)[:axes]))
    return tuple(parts)
