"""How a plan is made: from the pieces of two layouts to who keeps, sends, receives and derives what, and when.

Everything about a tensor follows from who holds and needs that tensor, from the sizes of the model and from the
degrees; so planning for one rank is the same computation on the tensors that it has or will have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from dynarl.vps import relabel as relabelling
from dynarl.vps.box import Pieces
from dynarl.vps.chunks import Chunks, divide, golden
from dynarl.vps.layout import Layout
from dynarl.vps.overlap import Cells, concat, disjoint, expand, holds, join, subtract, volumes
from dynarl.vps.rounds import num_rounds, round_of
from dynarl.vps.routes import route
from dynarl.vps.spec import ModelSpec

DEFAULT_BUDGET = 1 << 30
# Part of every digest; raised when the same inputs would give another plan.
VERSION = 1
# Fragments below a hundredth of the mean size of tensors are sent to every receiver by a holder.
WORTH_PASSING_ON = 100
# Ranks of each layout that are looked at to size chunks.
SAMPLE = 8


@dataclass(frozen=True, eq=False)
class Parts:
    """Boxes with the rank that acts on them and the chunk they belong to, sorted by tensor, place and rank."""

    rank: np.ndarray
    tensor: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    chunk: np.ndarray

    @classmethod
    def of(cls, pieces: Pieces, chunk: np.ndarray) -> Parts:
        order = np.lexsort((pieces.rank, pieces.lo[:, 1], pieces.lo[:, 0], pieces.tensor))
        columns = (pieces.rank, pieces.tensor, pieces.lo, pieces.hi, chunk)
        return cls(*(np.asarray(column)[order] for column in columns))

    def select(self, which: np.ndarray) -> Parts:
        return Parts(*(getattr(self, f)[which] for f in ("rank", "tensor", "lo", "hi", "chunk")))

    @property
    def elements(self) -> np.ndarray:
        return volumes(self.lo, self.hi)


@dataclass(frozen=True, eq=False)
class Moves:
    """The part of a plan that kinds with the same cuts share, as arrays."""

    kinds: tuple[str, ...]
    width: int  # bytes of one element of all kinds together
    sent: Parts  # rank: the receiver
    sender: np.ndarray
    hop: np.ndarray
    round: np.ndarray  # numbered through over all steps
    kept: Parts
    derived: Parts
    released: Parts
    destination: Parts  # everything that the destination holds (chunk: 0)

    def of_rank(self, rank: int) -> Moves:
        """What concerns one rank."""
        mine = (self.sent.rank == rank) | (self.sender == rank)
        local = {f: getattr(self, f) for f in ("kept", "derived", "released", "destination")}
        return replace(
            self,
            sent=self.sent.select(mine),
            sender=self.sender[mine],
            hop=self.hop[mine],
            round=self.round[mine],
            **{name: parts.select(parts.rank == rank) for name, parts in local.items()},
        )


class Planner:
    """The inputs of a plan, checked, and the way to it. `only`: plan for this rank."""

    def __init__(
        self,
        spec: ModelSpec,
        src: Layout,
        dst: Layout,
        kinds: Sequence[str],
        budget_bytes: int | None,
        held: Mapping[str, Pieces] | None,
        ranks_per_node: int | None,
        only: int | None = None,
    ):
        self.spec, self.src, self.dst = spec, src.checked(spec), dst.checked(spec)
        self.kinds = tuple(dict.fromkeys(kinds))
        self.budget = DEFAULT_BUDGET if budget_bytes is None else int(budget_bytes)
        self.held = dict(held or {})
        self.ranks_per_node = ranks_per_node or 1
        self.only = only
        if not self.kinds:
            raise ValueError("a transition needs kinds of state to move")
        if self.budget < 1 or self.ranks_per_node < 1:
            raise ValueError(f"budget_bytes and ranks_per_node must be positive, not {budget_bytes}, {ranks_per_node}")
        for kind in self.kinds:
            spec.kind(kind)
            if kind not in dst.kinds:
                raise ValueError(f"the destination holds no {kind!r}, only {', '.join(dst.kinds)}")
        others = (np.unique(pieces.rank).tolist() for pieces in self.held.values())
        self.ranks = tuple(sorted(set(src.ranks) | set(dst.ranks) | {rank for some in others for rank in some}))
        if only is not None and only not in self.ranks:
            raise ValueError(f"rank {only} is in neither layout")

    def plan(self, relabel: bool) -> dict[str, Any]:
        """The fields of a Plan."""
        chunks = self.chunks()
        mine = None if self.only is None else self.tensors_of(self.only)
        needs = [self.need(kinds, chunks, mine) for kinds in self.groups()]
        dst, saved = self.dst, 0
        if relabel:
            order, saved = relabelling.best(self.overlap(needs), self.dst.ranks, self.ranks_per_node)
            dst = self.dst.relabelled(order)
            new = np.zeros(max(self.dst.ranks) + 1, np.int64)
            new[list(self.dst.ranks)] = order
            needs = [need.renamed(new) for need in needs]
        moves = tuple(self.moves(need, chunks) for need in needs)
        planned = self.ranks
        if self.only is not None:
            moves, planned = tuple(m.of_rank(self.only) for m in moves), (self.only,)
        return {
            "spec": self.spec,
            "src": self.src,
            "dst": dst,
            "kinds": self.kinds,
            "ranks": self.ranks,
            "planned": planned,
            "budget_bytes": self.budget,
            "num_chunks": chunks.count,
            "moves": moves,
            "digest": self.digest(dst),
            "held": self.held,
            "ranks_per_node": self.ranks_per_node,
            "bytes_saved_by_relabelling": saved,
        }

    # ---- sizes

    def groups(self) -> list[tuple[str, ...]]:
        """Kinds that are cut alike and held by the same: planned once."""
        groups: dict[Any, list[str]] = {}
        for kind in self.kinds:
            key = (self.spec.kind(kind).sharded_as, kind in self.src.kinds, id(self.held.get(kind)))
            groups.setdefault(key, []).append(kind)
        return [tuple(kinds) for kinds in groups.values()]

    def width(self, kinds: Sequence[str]) -> int:
        return sum(self.spec.itemsize(kind) for kind in kinds)

    def chunks(self) -> Chunks:
        """From the sizes of the model and of some ranks, the same ones on every rank."""
        nbytes = self.spec.sizes * self.width(self.kinds)
        largest, part = 0, 0.0
        for layout in (self.src, self.dst):
            held, touched = {}, {}
            for kinds in self.groups():
                pieces = layout.pieces(self.spec, kinds[0], _sample(layout.ranks))
                for rank in np.unique(pieces.rank).tolist():
                    mine = pieces.of_rank(rank)
                    held[rank] = held.get(rank, 0) + int(mine.volume.sum()) * self.width(kinds)
                    touched.setdefault(rank, []).append(mine.tensor)
            for rank, tensors in touched.items():
                part = max(part, held[rank] / int(nbytes[np.unique(np.concatenate(tensors))].sum()))
            largest = max(held.values(), default=0)
        return divide(self.spec.shapes[:, 0], nbytes, self.budget, largest, part)

    # ---- geometry

    def tensors_of(self, rank: int) -> np.ndarray:
        """Mask of the tensors that a rank has or will have."""
        mine = np.zeros(len(self.spec.sizes), bool)
        for kind in (kinds[0] for kinds in self.groups()):
            for layout in (self.src, self.dst):
                mine[layout.pieces(self.spec, kind, [rank]).tensor] = True
            if kind in self.held:
                mine[self.held[kind].of_rank(rank).tensor] = True
        return mine

    def pieces(self, layout: Layout, kind: str, mine: np.ndarray | None) -> Pieces:
        """What all ranks hold of some tensors (mask; None: of all)."""
        if mine is None:
            return layout.pieces(self.spec, kind)
        pieces = layout.pieces(self.spec, kind, _holders(layout, self.spec, mine))
        return pieces.select(mine[pieces.tensor])

    def need(self, kinds: tuple[str, ...], chunks: Chunks, mine: np.ndarray | None) -> Need:
        """Source and destination of some kinds, cut into chunks."""
        kind = kinds[0]
        source = chunks.cut(self.pieces(self.src, kind, mine))
        holders = source
        if kind in self.held:
            held = self.held[kind]
            holders = concat(source, chunks.cut(held if mine is None else held.select(mine[held.tensor])))
        destination = self.pieces(self.dst, kind, mine)
        rest, derived = destination, destination.select(np.zeros(0, np.int64))
        if kind == "param" and "master" in self.kinds:
            rest, derived = subtract(destination, self.pieces(self.dst, "master", mine))
        return Need(kinds, source, disjoint(holders), destination, chunks.cut(derived), disjoint(rest))

    def overlap(self, needs: list[Need]) -> np.ndarray:
        """Bytes that each rank of the destination (rows) holds of what each of them needs (columns), in their order."""
        return sum(
            relabelling.overlap(need.holders, need.rest, need.fragments, self.dst.ranks) * self.width(need.kinds)
            for need in needs
        )

    def moves(self, need: Need, chunks: Chunks) -> Moves:
        """Who keeps, sends and receives what of some kinds, and when."""
        cell, wanted, lo, hi = need.fragments
        tensor = need.holders.tensor[cell]
        part = chunks.part(tensor, lo[:, 0])
        # Fragments of one part take different turns.
        turn = (chunks.turn[part] + golden(np.arange(len(part)) - np.searchsorted(part, part))) % 1.0
        fragment, nth = expand(need.rest.num_holders[wanted])
        rank = need.rest.rank[need.rest.start[wanted[fragment]] + nth]
        self.check_complete(need, fragment, rank, volumes(lo, hi))
        has_it = holds(need.holders, cell[fragment], rank)
        chunk = chunks.chunk[part]

        def parts(which: np.ndarray) -> Parts:
            f = fragment[which]
            return Parts(rank[which], tensor[f], lo[f], hi[f], chunk[f])

        worth = volumes(lo, hi) * (len(self.spec.sizes) * WORTH_PASSING_ON) >= self.spec.parameters
        sender, hop = route(
            need.holders, cell, tensor, turn, fragment[~has_it], rank[~has_it], self.ranks_per_node, worth
        )
        sent = parts(~has_it)
        ranks, n = np.array(self.ranks, np.int64), len(self.ranks)
        pair = round_of(np.searchsorted(ranks, sender), np.searchsorted(ranks, sent.rank), n)
        return Moves(
            kinds=need.kinds,
            width=self.width(need.kinds),
            sent=sent,
            sender=sender,
            hop=hop,
            round=(sent.chunk + hop) * num_rounds(n) + pair,
            kept=parts(has_it),
            derived=Parts.of(need.derived, chunks.of(need.derived)),
            released=Parts.of(need.source, chunks.of(need.source)),
            destination=Parts.of(need.destination, np.zeros(len(need.destination), np.int64)),
        )

    def check_complete(self, need: Need, fragment: np.ndarray, rank: np.ndarray, elements: np.ndarray) -> None:
        """Raise ValueError if some rank needs what nobody holds."""
        got, wanted = np.zeros((2, max(self.ranks) + 1), np.int64)
        np.add.at(got, rank, elements[fragment])
        np.add.at(wanted, need.rest.rank, np.repeat(need.rest.volume, need.rest.num_holders))
        if (short := np.nonzero(got < wanted)[0]).size:
            r = int(short[0])
            raise ValueError(
                f"rank {r} needs {int(wanted[r])} elements of {need.kinds[0]!r} at the destination, "
                f"but the source holds only {int(got[r])} of them"
            )

    def digest(self, dst: Layout) -> str:
        """Of everything that the plan follows from; computed without planning, and the same on every rank."""
        state = hashlib.sha256()
        layouts = (_description(self.src), _description(dst))
        facts = (VERSION, layouts, self.kinds, self.budget, self.ranks_per_node, self.ranks)
        state.update(repr(facts).encode())
        state.update(repr([(kind, self.spec.kind(kind)) for kind in self.kinds]).encode())
        state.update(_names_and_shapes(self.spec))
        for kind in sorted(self.held):
            pieces = self.held[kind]
            for array in (pieces.rank, pieces.tensor, pieces.lo, pieces.hi):
                state.update(kind.encode() + np.ascontiguousarray(array, np.int64).tobytes())
        return state.hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class Need:
    """Both sides of a transition of some kinds."""

    kinds: tuple[str, ...]
    source: Pieces  # what is released, cut into chunks
    holders: Cells  # source and held copies, cut into chunks
    destination: Pieces
    derived: Pieces  # of the destination, cut into chunks
    rest: Cells  # of the destination
    known: list = field(default_factory=list)

    @property
    def fragments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(cell of `holders`, cell of `rest`, lo, hi), sorted by tensor and place."""
        if not self.known:
            wanted, cell = join(self.rest, self.holders)
            lo = np.maximum(self.rest.lo[wanted], self.holders.lo[cell])
            hi = np.minimum(self.rest.hi[wanted], self.holders.hi[cell])
            order = np.lexsort((lo[:, 1], lo[:, 0], self.rest.tensor[wanted]))
            self.known.append((cell[order], wanted[order], lo[order], hi[order]))
        return self.known[0]

    def renamed(self, new: np.ndarray) -> Need:
        """The same with ranks of the destination under other numbers."""

        def pieces(some: Pieces) -> Pieces:
            return Pieces(new[some.rank], some.tensor, some.lo, some.hi)

        index = np.repeat(np.arange(len(self.rest)), self.rest.num_holders)
        rank = new[self.rest.rank]
        order = np.lexsort((rank, index))
        return replace(
            self,
            destination=pieces(self.destination),
            derived=pieces(self.derived),
            rest=replace(self.rest, rank=rank[order]),
        )


def _sample(ranks: tuple[int, ...]) -> list[int]:
    """Some ranks by their place in a layout, the first and the last among them."""
    return [ranks[i] for i in np.unique(np.linspace(0, len(ranks) - 1, SAMPLE).astype(int))]


def _holders(layout: Layout, spec: ModelSpec, tensors: np.ndarray) -> Sequence[int] | None:
    """Ranks that may hold some of these tensors (mask); None: all of them may."""
    pp = getattr(layout, "pp", 1)
    if pp == 1:
        return None
    starts = spec.layer_starts
    per_layer = np.add.reduceat(tensors[: starts[-1]], starts[:-1]) > 0
    # First and last stage hold what lies outside of the layers.
    outside = tensors[: starts[0]].any() or tensors[starts[-1] :].any()
    size = len(layout.ranks) // pp
    ranks: list[int] = []
    for stage in range(pp):
        layers = [layer for chunk in layout.stage_layers(spec, stage) for layer in chunk]
        if (outside and stage in (0, pp - 1)) or per_layer[layers].any():
            ranks += layout.ranks[stage * size : (stage + 1) * size]
    return ranks


def _description(layout: Layout) -> list[Any]:
    """A layout in text that is the same in every process."""
    values = [type(layout).__name__]
    for each in fields(layout):
        name, value = each.name, getattr(layout, each.name)
        if name == "shards" and value is not None:
            value = sorted((position, sorted(parts.items())) for position, parts in value.by_position.items())
        values.append((name, value))
    return values


@lru_cache(maxsize=8)
def _names_and_shapes(spec: ModelSpec) -> bytes:
    state = hashlib.sha256("\n".join(tensor.name for tensor in spec.tensors).encode())
    state.update(np.ascontiguousarray(spec.shapes).tobytes())
    return state.digest()
