"""The local parameters of one Megatron rank as arrays: which rows of which logical tensors lie where in which of them.

Names, shapes and order are those of megatron-core 0.19.2's local layer specs. A layer is described once for each place
in the tensor- and expert-parallel grid, by `Template`s; a stage repeats that for its layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from dynarl.vps.box import interval_boxes, joined
from dynarl.vps.layout import padded, share
from dynarl.vps.spec import EMBEDDING, OUTPUT, POSITIONS, ROUTER_BIAS, ModelSpec
from dynarl.vps.zero import FlatBuffer, flat_buffer


@dataclass(frozen=True)
class Cut:
    """The degrees that local parameters depend on."""

    tp: int
    ep: int
    etp: int
    pp: int
    vocab_divisible_by: int

    @property
    def expert_buffers(self) -> bool:
        """Whether experts have flat buffers and an optimizer of their own."""
        return self.ep > 1 or self.etp != self.tp


class Place(NamedTuple):
    """One place in the tensor- and expert-parallel grid."""

    tp: int
    etp: int
    ep: int


class Block(NamedTuple):
    """Rows [row_lo, row_hi) and columns of a logical tensor, stacked from row `at` of a parameter on."""

    tensor: str  # without its layer
    row_lo: int
    row_hi: int
    col_lo: int
    col_hi: int
    at: int


class Template(NamedTuple):
    """A parameter: its name in a layer or model, shape, blocks as wide as itself, and what is special about it."""

    name: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    expert: bool = False  # lies in the buffers of the experts
    own_bucket: bool = False
    buffer: bool = False  # of the module; not a parameter


# ---- templates of the parts of a model


def head_templates(spec: ModelSpec, cut: Cut, place: Place) -> Iterator[Template]:
    """What the first stage holds before its layers."""
    shared = spec.tied and cut.pp > 1
    yield _vocabulary(spec, cut, place, "embedding.word_embeddings.weight", EMBEDDING, shared)
    if spec.positions:
        yield _whole("embedding.position_embeddings.weight", POSITIONS, (spec.positions, spec.hidden))


def tail_templates(spec: ModelSpec, cut: Cut, place: Place) -> Iterator[Template]:
    """What the last stage holds behind its layers."""
    yield from _norm(spec, "decoder.final_layernorm", "model.norm", spec.hidden)
    if not spec.tied:
        yield _vocabulary(spec, cut, place, "output_layer.weight", OUTPUT, False)
    elif cut.pp > 1:
        yield _vocabulary(spec, cut, place, "output_layer.weight", EMBEDDING, True)


def layer_templates(spec: ModelSpec, cut: Cut, place: Place, moe: bool) -> Iterator[Template]:
    """One layer; names without "decoder.layers.N.", tensors without "model.layers.N."."""
    yield from _norm(spec, "input_layernorm", "input_layernorm", spec.hidden)
    yield from _attention(spec, cut, place)
    yield from _norm(spec, "pre_mlp_layernorm", "post_attention_layernorm", spec.hidden)
    if not moe:
        yield from _dense_mlp(spec, cut, place)
        return
    yield _whole("mlp.router.weight", spec.router_suffix, (spec.experts, spec.hidden))
    if spec.router_bias:
        yield _whole("mlp.router.expert_bias", ROUTER_BIAS, (spec.experts,))._replace(buffer=True)
    first, last = share(spec.experts, cut.ep, place.ep)
    for local, expert in enumerate(range(first, last)):
        gate, up, down = (spec.expert_suffix(expert, part) for part in ("gate", "up", "down"))
        name = f"mlp.experts.local_experts.{local}"
        sizes = spec.hidden, spec.expert_ffn, cut.etp, place.etp, cut.expert_buffers
        yield _stacked(f"{name}.linear_fc1.weight", (gate, up), *sizes)
        yield _columns(f"{name}.linear_fc2.weight", down, *sizes)
    if spec.shared_ffn:
        sizes = spec.hidden, spec.shared_ffn, cut.tp, place.tp
        names = tuple(f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up"))
        yield _stacked("mlp.shared_experts.linear_fc1.weight", names, *sizes)
        yield _columns("mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight", *sizes)


def _attention(spec: ModelSpec, cut: Cut, place: Place) -> Iterator[Template]:
    tp, t = cut.tp, place.tp
    width = spec.heads * (spec.latent.value_dim if spec.latent else spec.head_dim)
    yield _columns("self_attention.linear_proj.weight", "self_attn.o_proj.weight", spec.hidden, width, tp, t)
    if spec.out_bias:
        yield _whole("self_attention.linear_proj.bias", "self_attn.o_proj.bias", (spec.hidden,))
    if spec.latent:
        yield from _latent_attention(spec, cut, place)
        return
    yield _qkv(spec, tp, t, "weight")
    if spec.qkv_bias:
        yield _qkv(spec, tp, t, "bias")
    if spec.qk_norm:
        for name in "qk":
            yield from _norm(spec, f"self_attention.{name}_layernorm", f"self_attn.{name}_norm", spec.head_dim)


def _latent_attention(spec: ModelSpec, cut: Cut, place: Place) -> Iterator[Template]:
    latent = spec.latent
    q_rows = spec.heads * (latent.nope_dim + latent.rope_dim)
    kv_rows = spec.heads * (latent.nope_dim + latent.value_dim)
    # The local specs cut the down projections by rows as well and gather what comes out of them.
    if latent.q_rank:
        linears = [("q_down_proj", "q_a_proj", latent.q_rank, spec.hidden)]
        linears += [("q_up_proj", "q_b_proj", q_rows, latent.q_rank)]
    else:
        linears = [("q_proj", "q_proj", q_rows, spec.hidden)]
    linears += [("kv_down_proj", "kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim, spec.hidden)]
    linears += [("kv_up_proj", "kv_b_proj", kv_rows, latent.kv_rank)]
    for name, tensor, rows, columns in linears:
        tensors = (f"self_attn.{tensor}.weight",)
        yield _stacked(f"self_attention.linear_{name}.weight", tensors, columns, rows, cut.tp, place.tp)
    if latent.q_rank:
        yield from _norm(spec, "self_attention.q_layernorm", "self_attn.q_a_layernorm", latent.q_rank)
    yield from _norm(spec, "self_attention.kv_layernorm", "self_attn.kv_a_layernorm", latent.kv_rank)


def _dense_mlp(spec: ModelSpec, cut: Cut, place: Place) -> Iterator[Template]:
    into = ("mlp.gate_proj", "mlp.up_proj") if spec.gated else ("mlp.fc1",)
    out = "mlp.down_proj" if spec.gated else "mlp.fc2"
    tp, t = cut.tp, place.tp
    yield _stacked("mlp.linear_fc1.weight", tuple(f"{x}.weight" for x in into), spec.hidden, spec.ffn, tp, t)
    if spec.mlp_bias:
        yield _stacked("mlp.linear_fc1.bias", tuple(f"{x}.bias" for x in into), 0, spec.ffn, tp, t)
    yield _columns("mlp.linear_fc2.weight", f"{out}.weight", spec.hidden, spec.ffn, tp, t)
    if spec.mlp_bias:
        yield _whole("mlp.linear_fc2.bias", f"{out}.bias", (spec.hidden,))


def _qkv(spec: ModelSpec, tp: int, t: int, what: str) -> Template:
    """Rows t/tp of all groups' [query heads | key head | value head], one group after the other."""
    head, per_group = spec.head_dim, spec.heads // spec.groups
    rows = (spec.heads + 2 * spec.groups) * head // tp
    columns = spec.hidden if what == "weight" else 1
    first, last = t * rows, (t + 1) * rows
    blocks, start = [], 0
    for group in range(spec.groups):
        for name, size in (("q", per_group * head), ("k", head), ("v", head)):
            lo, hi = max(first, start), min(last, start + size)
            if lo < hi:
                shift = group * size - start
                tensor = f"self_attn.{name}_proj.{what}"
                blocks.append(Block(tensor, lo + shift, hi + shift, 0, columns, lo - first))
            start += size
    shape = (rows, columns) if what == "weight" else (rows,)
    return Template(f"self_attention.linear_qkv.{what}", shape, tuple(blocks))


def _vocabulary(spec: ModelSpec, cut: Cut, place: Place, name: str, tensor: str, shared: bool) -> Template:
    rows = padded(spec.vocab, cut.vocab_divisible_by * cut.tp) // cut.tp
    lo, hi = min(place.tp * rows, spec.vocab), min((place.tp + 1) * rows, spec.vocab)
    blocks = (Block(tensor, lo, hi, 0, spec.hidden, 0),) if lo < hi else ()
    return Template(name, (rows, spec.hidden), blocks, own_bucket=shared)


def _norm(spec: ModelSpec, name: str, tensor: str, size: int) -> Iterator[Template]:
    yield _whole(f"{name}.weight", f"{tensor}.weight", (size,))
    if spec.norm_bias:
        yield _whole(f"{name}.bias", f"{tensor}.bias", (size,))


def _whole(name: str, tensor: str, shape: tuple[int, ...]) -> Template:
    rows, columns = (*shape, 1)[:2]
    return Template(name, shape, (Block(tensor, 0, rows, 0, columns, 0),))


def _stacked(
    name: str, tensors: tuple[str, ...], columns: int, rows: int, parts: int, part: int, expert: bool = False
) -> Template:
    """The same share of the rows of each tensor, one below the other; columns 0: the tensors have one axis."""
    lo, hi = share(rows, parts, part)
    blocks = tuple(Block(tensor, lo, hi, 0, columns or 1, i * (hi - lo)) for i, tensor in enumerate(tensors))
    local = len(tensors) * (hi - lo)
    return Template(name, (local, columns) if columns else (local,), blocks, expert)


def _columns(name: str, tensor: str, rows: int, columns: int, parts: int, part: int, expert: bool = False) -> Template:
    lo, hi = share(columns, parts, part)
    return Template(name, (rows, hi - lo), (Block(tensor, 0, rows, lo, hi, 0),), expert)


# ---- all parameters of a rank


@dataclass(frozen=True, eq=False)
class Section:
    """Some templates as arrays, `times` over. P parameters and N blocks of one repetition."""

    templates: tuple[Template, ...]
    rows: np.ndarray  # int64 [P]
    columns: np.ndarray
    expert: np.ndarray  # bool [P]
    own_bucket: np.ndarray
    buffer: np.ndarray
    param: np.ndarray  # int64 [N]: the parameter of each block
    offset: np.ndarray  # int64 [N]: its tensor, from the start of the layer (or of all tensors)
    lo: np.ndarray  # int64 [N, A]
    hi: np.ndarray
    at: np.ndarray  # int64 [N]

    @classmethod
    def of(cls, templates: tuple[Template, ...], index: dict[str, int]) -> Section:
        """index: number of each tensor."""
        blocks = [(p, block) for p, template in enumerate(templates) for block in template.blocks]
        numbers = np.array(
            [(p, index[b.tensor], b.row_lo, b.col_lo, b.row_hi, b.col_hi, b.at) for p, b in blocks], np.int64
        ).reshape(-1, 7)
        shapes = np.array([(*t.shape, 1)[:2] for t in templates], np.int64).reshape(-1, 2)
        flags = np.array([(t.expert, t.own_bucket, t.buffer) for t in templates], bool).reshape(-1, 3)
        param, offset, lo, hi, at = (numbers[:, i] for i in (0, 1, slice(2, 4), slice(4, 6), 6))
        return cls(templates, *shapes.T, *flags.T, param, offset, lo, hi, at)


@dataclass(frozen=True, eq=False)
class Table:
    """All parameters of one place of one pipeline stage: P parameters made of N blocks, in registration order."""

    sections: tuple[tuple[int, int | None, Section], ...]  # (chunk, number of the layer in it, templates)
    rows: np.ndarray  # int64 [P]
    columns: np.ndarray
    chunk: np.ndarray
    expert: np.ndarray  # bool [P]
    own_bucket: np.ndarray
    buffer: np.ndarray
    param: np.ndarray  # int64 [N]
    tensor: np.ndarray
    lo: np.ndarray  # int64 [N, A]
    hi: np.ndarray
    at: np.ndarray  # int64 [N]

    @cached_property
    def numel(self) -> np.ndarray:
        """Elements of each parameter, padding included."""
        return self.rows * self.columns

    @cached_property
    def parameters(self) -> tuple[tuple[int, str, Template], ...]:
        """(chunk, name in the chunk, template) of each parameter."""
        return tuple(
            (chunk, template.name if layer is None else f"decoder.layers.{layer}.{template.name}", template)
            for chunk, layer, section in self.sections
            for template in section.templates
        )

    @cached_property
    def boxes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tensor, lo, hi) of all that the parameters hold, rows that follow each other in one box."""
        return joined(self.tensor, self.lo, self.hi)

    def cut(self, lo_P: np.ndarray, hi_P: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tensor, lo, hi) of flat intervals of the parameters."""
        columns = self.columns[self.param]
        start, stop = self.at * columns, (self.at + self.hi[:, 0] - self.lo[:, 0]) * columns
        lo, hi = np.maximum(lo_P[self.param], start) - start, np.minimum(hi_P[self.param], stop) - start
        touched = np.nonzero(lo < hi)[0]
        index, box_lo, box_hi = interval_boxes(lo[touched], hi[touched], columns[touched])
        block = touched[index]
        return joined(self.tensor[block], self.lo[block] + box_lo, self.lo[block] + box_hi)


@lru_cache(maxsize=1024)
def table(spec: ModelSpec, cut: Cut, chunks: tuple[range, ...], first: bool, last: bool, place: Place) -> Table:
    """The parameters of one place of a stage that has these layers, and is the first or the last one or neither."""
    sections: list[tuple[int, int | None, Section]] = []
    starts: list[int] = []
    for chunk, layers in enumerate(chunks):
        if first and chunk == 0:
            sections.append((chunk, None, _section(spec, cut, place, "head")))
            starts.append(0)
        for local, layer in enumerate(layers):
            kind = "moe" if layer in spec.moe_layers else "dense"
            sections.append((chunk, local, _section(spec, cut, place, kind)))
            starts.append(int(spec.layer_starts[layer]))
        if last and chunk == len(chunks) - 1:
            sections.append((chunk, None, _section(spec, cut, place, "tail")))
            starts.append(0)
    parts = [section for _, _, section in sections]
    counts = np.array([len(part.rows) for part in parts], np.int64)
    blocks = np.array([len(part.param) for part in parts], np.int64)
    before = np.cumsum(counts) - counts

    def gathered(name: str) -> np.ndarray:
        arrays = [getattr(part, name) for part in parts]
        return np.concatenate(arrays) if arrays else getattr(Section.of((), {}), name)

    return Table(
        sections=tuple(sections),
        chunk=np.repeat(np.array([chunk for chunk, _, _ in sections], np.int64), counts),
        param=gathered("param") + np.repeat(before, blocks),
        tensor=gathered("offset") + np.repeat(np.array(starts, np.int64), blocks),
        **{name: gathered(name) for name in ("rows", "columns", "expert", "own_bucket", "buffer", "lo", "hi", "at")},
    )


@lru_cache(maxsize=1024)
def flat(table: Table, chunk: int, expert: bool, shards: int, bucket_size: int | None, busbw: bool) -> tuple:
    """(the parameters in the buffer, FlatBuffer) of the dense or the expert parameters of one chunk of a table."""
    which = np.nonzero((table.chunk == chunk) & (table.expert == expert) & ~table.buffer)[0]
    buffer: FlatBuffer = flat_buffer(table.numel[which], table.own_bucket[which], shards, bucket_size, busbw)
    return which, buffer


@lru_cache(maxsize=1024)
def _section(spec: ModelSpec, cut: Cut, place: Place, kind: str) -> Section:
    if kind in ("head", "tail"):
        templates = tuple((head_templates if kind == "head" else tail_templates)(spec, cut, place))
        last = int(spec.layer_starts[-1])
        ends = [EMBEDDING, *([POSITIONS] if spec.positions else [])]
        tail = ["model.norm.weight", *(["model.norm.bias"] if spec.norm_bias else []), OUTPUT]
        return Section.of(
            templates, {name: i for i, name in enumerate(ends)} | {name: last + i for i, name in enumerate(tail)}
        )
    moe = kind == "moe"
    return Section.of(tuple(layer_templates(spec, cut, place, moe)), spec.layer_offsets[moe])
