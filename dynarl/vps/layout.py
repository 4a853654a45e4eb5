"""Layouts: which rank holds which boxes of which tensors. Everything that moves state goes from one layout to another.

    TrainLayout        ranks of a Megatron trainer: parameters, fp32 masters and moments   (train_layout.py)
    EngineLayout       ranks of rollout engines: parameters
    HFLayout           files of a Hugging Face checkpoint: parameters, whole tensors
    CheckpointLayout   writers of our own checkpoint: all kinds, whole tensors

Layouts are values: frozen, hashable, made of degrees and rank numbers only. What they hold of a model is computed from
its ModelSpec. `ranks` are the physical ranks; the position in that tuple is the coordinate, so that a layout on other
ranks, or on the same ranks in another order, differs in `ranks` only.

>>> from dynarl.vps.presets import preset
>>> spec = preset("smollm2-135m")
>>> layout = EngineLayout(tp=3, ranks=(4, 5, 6)).checked(spec)
>>> next(layout.owned(spec, 5))
Piece(tensor=LogicalTensor(name='model.embed_tokens.weight', shape=(49152, 576), buffer=False), kind='param', \
box=((16384, 32768), (0, 576)))
>>> EngineLayout(tp=2).checked(spec)
Traceback (most recent call last):
    ...
dynarl.vps.layout.LayoutError: tp must divide the attention heads, but smollm2-135m has 9 and tp is 2
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np

from dynarl.vps.box import Box, Pieces, collect
from dynarl.vps.spec import EMBEDDING, OUTPUT, LogicalTensor, ModelSpec

ALL_KINDS = ("param", "master", "exp_avg", "exp_avg_sq")


class LayoutError(ValueError):
    """A layout breaks a rule; the message names the rule and the numbers."""


class Piece(NamedTuple):
    """One box of one tensor, of one kind of state."""

    tensor: LogicalTensor
    kind: str
    box: Box


class Layout:
    """What all layouts can do. Subclasses are frozen dataclasses with the fields `ranks` and `kinds`."""

    ranks: tuple[int, ...]
    kinds: tuple[str, ...]

    def checked(self, spec: ModelSpec) -> Self:
        """This layout. Raises LayoutError (a ValueError) with the rule that `spec` breaks with it."""
        _check(self, spec)
        return self

    def pieces(self, spec: ModelSpec, kind: str, ranks: Sequence[int] | None = None) -> Pieces:
        """What ranks (all, or only these) hold of a kind. Boxes of one rank never overlap; replicas on others do."""
        if kind not in self.kinds:
            return collect([])
        sharded_as = spec.kind(kind).sharded_as
        self.checked(spec)
        if ranks is None:
            return _all_pieces(self, spec, sharded_as)
        positions = self._positions
        return self._pieces(spec, sharded_as, [positions[rank] for rank in ranks if rank in positions])

    def owned(self, spec: ModelSpec, rank: int) -> Iterator[Piece]:
        """Every piece of one rank, kind by kind in the order of `kinds`, tensor by tensor."""
        for kind in self.kinds:
            pieces = self.pieces(spec, kind, [rank])
            for i, index in enumerate(pieces.tensor.tolist()):
                tensor = spec.tensors[index]
                yield Piece(tensor, kind, pieces.box(i, len(tensor.shape)))

    def relabelled(self, ranks: Sequence[int]) -> Self:
        """The same layout on other physical ranks, or on the same ones in another order."""
        return dataclasses.replace(self, ranks=tuple(ranks))

    @property
    def _positions(self) -> dict[int, int]:
        return _positions(self.ranks)

    def _rules(self, spec: ModelSpec) -> Iterator[tuple[bool, str]]:
        """(holds, what is broken if not) of every rule that depends on the model."""
        return iter(())

    def _pieces(self, spec: ModelSpec, sharded_as: str, positions: Sequence[int]) -> Pieces:
        """Pieces of the ranks at some positions. sharded_as: "param" or "master"."""
        raise NotImplementedError


@dataclass(frozen=True)
class EngineLayout(Layout):
    """`dp` rollout instances of `tp` ranks each, as SGLang cuts them. Rank order: tp fastest.

    Query heads, key/value heads (copied where there are fewer of them than ranks), feed-forward width and vocabulary
    are cut by `tp`. Experts go to `ep` blocks of tp / ep ranks, and each is cut over the ranks of its block; with ep
    above tp, experts are whole and the blocks are the ranks of ep / tp instances, which share them. The vocabulary is
    padded to a multiple of `vocab_divisible_by`, and further to one of tp.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    ranks: tuple[int, ...] | None = None
    vocab_divisible_by: int = 64
    kinds: tuple[str, ...] = ("param",)

    def __post_init__(self) -> None:
        check_degrees(self, ("tp", "dp", "ep", "vocab_divisible_by"))
        if self.tp % self.ep and (self.ep % self.tp or self.tp * self.dp % self.ep):
            numbers = f"but tp is {self.tp}, dp is {self.dp} and ep is {self.ep}"
            raise LayoutError(f"ep must divide tp in an engine, or be a multiple of it that divides tp x dp, {numbers}")
        set_ranks(self, self.tp * self.dp, "tp x dp")

    def _rules(self, spec: ModelSpec) -> Iterator[tuple[bool, str]]:
        yield from attention_rules(spec, self.tp)
        if len(spec.moe_layers) < spec.layers:
            yield divides("tp", self.tp, "feed-forward width", spec.ffn, spec)
        yield from expert_rules(spec, self.ep, self._expert_tp, "tp / ep")
        if spec.shared_ffn:
            yield divides("tp", self.tp, "width of the shared experts", spec.shared_ffn, spec)

    def _pieces(self, spec: ModelSpec, sharded_as: str, positions: Sequence[int]) -> Pieces:
        width = max(self.tp, self.ep) if spec.experts else self.tp
        shards = {place: self._shard(spec, place) for place in {position % width for position in positions}}
        return collect((self.ranks[position], *shards[position % width]) for position in positions)

    @property
    def _expert_tp(self) -> int:
        return max(1, self.tp // self.ep)

    def _shard(self, spec: ModelSpec, place: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tensor, lo, hi) of what the rank at a place of one or more instances that share their experts holds."""
        shapes, t = spec.shapes, place % self.tp
        lo, hi = np.zeros_like(shapes), shapes.copy()
        kept = np.ones(len(shapes), bool)
        rows = padded(padded(spec.vocab, self.vocab_divisible_by), self.tp) // self.tp
        for name in (EMBEDDING, *(() if spec.tied else (OUTPUT,))):
            tensor = 0 if name == EMBEDDING else len(shapes) - 1
            lo[tensor, 0], hi[tensor, 0] = min(t * rows, spec.vocab), min((t + 1) * rows, spec.vocab)
            kept[tensor] = lo[tensor, 0] < hi[tensor, 0]
        starts = spec.layer_starts
        for moe in (False, True):
            layers = np.array([layer for layer in range(spec.layers) if (layer in spec.moe_layers) == moe], np.int64)
            if len(layers):
                cut = self._layer_cut(spec, moe, place)
                at = starts[layers][:, None] + np.arange(len(cut[0]))
                kept[at], lo[at], hi[at] = cut
        tensor = np.nonzero(kept)[0].astype(np.int32)
        return tensor, lo[tensor], hi[tensor]

    def _layer_cut(self, spec: ModelSpec, moe: bool, place: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(kept, lo, hi) of every tensor of one layer."""
        parts = spec.layer_tensors(moe)
        kept = np.ones(len(parts), bool)
        lo, hi = np.zeros((len(parts), 2), np.int64), np.array([(*shape, 1)[:2] for _, shape in parts], np.int64)
        t, etp, per_block = place % self.tp, self._expert_tp, spec.experts // self.ep
        for i, (name, shape) in enumerate(parts):
            if ".experts." in name:
                expert = int(name.split(".experts.")[1].split(".")[0])
                kept[i] = expert // per_block == place // etp
                axis = int("down_proj" in name or ".w2." in name)
                lo[i, axis], hi[i, axis] = share(shape[axis], etp, place % etp)
            elif name.startswith(("self_attn.k_proj", "self_attn.v_proj")):
                copies = max(1, self.tp // spec.groups)
                lo[i, 0], hi[i, 0] = share(shape[0], self.tp // copies, t // copies)
            elif name.startswith(ROW_CUT):
                lo[i, 0], hi[i, 0] = share(shape[0], self.tp, t)
            elif name.startswith(COLUMN_CUT) and len(shape) == 2:
                lo[i, 1], hi[i, 1] = share(shape[1], self.tp, t)
        return kept, lo, hi


# Column-parallel layers are cut by rows, row-parallel ones by columns; biases of the latter are whole everywhere.
ROW_CUT = tuple(
    f"{block}.{name}"
    for block, names in (
        ("self_attn", ("q_proj", "q_b_proj", "kv_b_proj")),
        ("mlp", ("gate_proj", "up_proj", "fc1", "shared_experts.gate_proj", "shared_experts.up_proj")),
    )
    for name in names
)
COLUMN_CUT = ("self_attn.o_proj", "mlp.down_proj", "mlp.fc2", "mlp.shared_experts.down_proj")


@dataclass(frozen=True)
class HFLayout(Layout):
    """Whole tensors in the files of a checkpoint. Rank order: file i is with the i-th rank, and so on around.

    files: {file: names of its tensors}; or names of files only, among which the tensors are dealt in their order, about
    as many bytes to each; None: one file with all. There is a rank for each file unless `ranks` says otherwise.
    """

    files: Mapping[str, Sequence[str]] | Sequence[str] | None = None
    ranks: tuple[int, ...] | None = None
    kinds: tuple[str, ...] = ("param",)

    def __post_init__(self) -> None:
        files = self.files if self.files is not None else ("model.safetensors",)
        # Kept as pairs, which can be hashed, and which are what dataclasses.replace() gives.
        named = files.items() if isinstance(files, Mapping) else files
        pairs = (file if isinstance(file, tuple) else (file, None) for file in named)
        files = tuple((file, None if names is None else tuple(names)) for file, names in pairs)
        if not files:
            raise LayoutError("files must name one file at least")
        seen: dict[str, str] = {}
        for file, names in files:
            if names is None and len(set(named is None for _, named in files)) > 1:
                raise LayoutError(f"files must all have names of tensors or none of them, but {file} has none")
            for name in names or ():
                if name in seen:
                    raise LayoutError(f"a tensor must be in one file, but {name} is in {seen[name]} and in {file}")
                seen[name] = file
        object.__setattr__(self, "files", files)
        size = len(files) if self.ranks is None else len(tuple(self.ranks))
        if not 0 < size <= len(files):
            raise LayoutError(f"there must be 1 to {len(files)} ranks for {len(files)} files, not {size}")
        set_ranks(self, size, "files")

    def file_tensors(self, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
        """Names of the tensors of each file, in the order of the model."""
        self.checked(spec)
        names = [tensor.name for tensor in spec.tensors]
        return {
            file: tuple(names[i] for i in tensors.tolist())
            for (file, _), tensors in zip(self.files, self._file_tensors(spec))
        }

    def _rules(self, spec: ModelSpec) -> Iterator[tuple[bool, str]]:
        if self.files[0][1] is None:
            return
        named = {name for _, part in self.files for name in part}
        for name in sorted(named - set(spec.index)):
            yield False, f"files must hold tensors of the model only, but {spec.name} has no {name}"
        missing = [name for name in spec.index if name not in named]
        numbers = f"{len(missing)} of {len(spec.tensors)} are in none, such as {missing[:1]}"
        yield not missing, f"files must hold every tensor, but {numbers}"

    def _file_tensors(self, spec: ModelSpec) -> list[np.ndarray]:
        if self.files[0][1] is None:
            middle = np.cumsum(spec.sizes) - spec.sizes / 2
            file = (middle * len(self.files) / spec.parameters).astype(np.int64)
            return [np.nonzero(file == i)[0].astype(np.int32) for i in range(len(self.files))]
        return [np.array(sorted(spec.index[name] for name in names), np.int32) for _, names in self.files]

    def _pieces(self, spec: ModelSpec, sharded_as: str, positions: Sequence[int]) -> Pieces:
        files = self._file_tensors(spec)
        return whole_tensors(
            spec, [(self.ranks[p], np.sort(np.concatenate(files[p :: len(self.ranks)]))) for p in positions]
        )


@dataclass(frozen=True)
class CheckpointLayout(Layout):
    """Whole tensors dealt to `writers`, all kinds of a tensor to the same one, so that all write about as many bytes.

    The next largest tensor goes to the writer with the fewest elements, ties to the lower number.
    """

    writers: int = 1
    ranks: tuple[int, ...] | None = None
    kinds: tuple[str, ...] = ALL_KINDS

    def __post_init__(self) -> None:
        check_degrees(self, ("writers",))
        set_ranks(self, self.writers, "writers")

    def _pieces(self, spec: ModelSpec, sharded_as: str, positions: Sequence[int]) -> Pieces:
        writer = _dealt(spec, self.writers)
        return whole_tensors(spec, [(self.ranks[p], np.nonzero(writer == p)[0].astype(np.int32)) for p in positions])


# ---- rules that several layouts share


def check_degrees(layout: Layout, names: Sequence[str]) -> None:
    """Raise LayoutError unless these fields are positive integers."""
    for name in names:
        value = getattr(layout, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise LayoutError(f"{name} must be a positive integer, not {value!r}")


def set_ranks(layout: Layout, size: int, formula: str) -> None:
    """Fill in `ranks` and `kinds` of a layout under construction, and check them."""
    ranks = range(size) if layout.ranks is None else layout.ranks
    ranks = tuple(int(rank) for rank in ranks)
    if len(ranks) != size:
        raise LayoutError(f"{formula} must be the number of ranks, but that is {size} and there are {len(ranks)} ranks")
    if len(set(ranks)) < size:
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise LayoutError(f"ranks must differ, but {twice} is there {ranks.count(twice)} times")
    if min(ranks) < 0:
        raise LayoutError(f"ranks must not be negative, but {min(ranks)} is among them")
    object.__setattr__(layout, "ranks", ranks)
    object.__setattr__(layout, "kinds", tuple(layout.kinds))


def divides(degree: str, value: int, what: str, size: int, spec: ModelSpec) -> tuple[bool, str]:
    """The rule that a degree divides a size of the model."""
    return size % value == 0, f"{degree} must divide the {what}, but {spec.name} has {size} and {degree} is {value}"


def attention_rules(spec: ModelSpec, tp: int) -> Iterator[tuple[bool, str]]:
    """The rules on attention heads that trainers and engines share."""
    yield divides("tp", tp, "attention heads", spec.heads, spec)
    if not spec.latent:
        fits = spec.groups % tp == 0 or tp % spec.groups == 0
        numbers = f"but {spec.name} has {spec.groups} and tp is {tp}"
        yield fits, f"tp must divide the key/value heads (query groups) or be a multiple of them, {numbers}"


def expert_rules(spec: ModelSpec, ep: int, etp: int, etp_name: str = "etp") -> Iterator[tuple[bool, str]]:
    """The rules on experts that trainers and engines share."""
    if not spec.experts:
        yield ep == 1, f"ep must be 1 for a model without experts, but ep is {ep} and {spec.name} has none"
        return
    yield divides("ep", ep, "experts", spec.experts, spec)
    yield divides(etp_name, etp, "width of an expert", spec.expert_ffn, spec)


def padded(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // multiple) * multiple


def share(size: int, parts: int, index: int) -> tuple[int, int]:
    """The index-th of equal parts, as a half-open range."""
    return size // parts * index, size // parts * (index + 1)


@lru_cache(maxsize=64)
def _check(layout: Layout, spec: ModelSpec) -> None:
    for holds, rule in layout._rules(spec):
        if not holds:
            raise LayoutError(rule)


@lru_cache(maxsize=8)
def _all_pieces(layout: Layout, spec: ModelSpec, sharded_as: str) -> Pieces:
    return layout._pieces(spec, sharded_as, range(len(layout.ranks)))


@lru_cache(maxsize=64)
def _positions(ranks: tuple[int, ...]) -> dict[int, int]:
    return {rank: position for position, rank in enumerate(ranks)}


@lru_cache(maxsize=16)
def _dealt(spec: ModelSpec, writers: int) -> np.ndarray:
    """The writer of each tensor."""
    writer = np.zeros(len(spec.sizes), np.int64)
    heap = [(0, w) for w in range(writers)]
    for tensor in np.argsort(-spec.sizes, kind="stable").tolist():
        filled, writer[tensor] = heap[0]
        heapq.heapreplace(heap, (filled + int(spec.sizes[tensor]), heap[0][1]))
    return writer


def whole_tensors(spec: ModelSpec, held: Sequence[tuple[int, np.ndarray]]) -> Pieces:
    """Pieces of (rank, indices of tensors that it holds whole)."""
    zero = np.zeros((len(spec.sizes), 2), np.int64)
    return collect((rank, tensors, zero[: len(tensors)], spec.shapes[tensors]) for rank, tensors in held)
