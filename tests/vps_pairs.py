"""Models with awkward sizes, pairs of layouts, and arrays whose every value names its address."""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np
from hypothesis import strategies as st

from dynarl.vps.layout import CheckpointLayout, EngineLayout, Layout
from dynarl.vps.spec import ModelSpec
from dynarl.vps.train_layout import TrainLayout

OPTIMIZER = ("master", "exp_avg", "exp_avg_sq")
KINDS = (OPTIMIZER, ("param", *OPTIMIZER), ("param",), ("exp_avg",))


@st.composite
def specs(draw) -> ModelSpec:
    groups = draw(st.sampled_from([1, 2, 3, 4, 6]))
    layers = draw(st.sampled_from([1, 2, 3, 4, 6]))
    experts = draw(st.sampled_from([0, 0, 4, 6]))
    return ModelSpec(
        name="awkward",
        layers=layers,
        hidden=draw(st.sampled_from([6, 8, 12])),
        heads=groups * draw(st.sampled_from([1, 2, 3])),
        groups=groups,
        head_dim=draw(st.sampled_from([2, 3])),
        ffn=draw(st.sampled_from([12, 24, 30])),
        vocab=draw(st.sampled_from([17, 32, 50])),
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        experts=experts,
        expert_ffn=draw(st.sampled_from([4, 12])) if experts else 0,
        moe_layers=frozenset(range(draw(st.integers(0, layers)), layers)) if experts else frozenset(),
    )


def legal(spec: ModelSpec, ranks: tuple[int, ...]) -> list[Layout]:
    """Layouts of every degree that fit the model and the number of ranks, and a checkpoint, which always fits."""
    return [layout.relabelled(ranks) for layout in _legal(spec, len(ranks))]


@lru_cache(maxsize=256)
def _legal(spec: ModelSpec, world: int) -> list[Layout]:
    found: list[Layout] = [CheckpointLayout(writers=world)]
    expert_degrees = tuple(itertools.product((1, 2, 3), (None, 1, 2))) if spec.experts else ((1, None),)
    for tp, pp in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4)):
        if world % (tp * pp) or spec.heads % tp:
            continue
        per_stage, more = divmod(spec.layers, pp)
        degrees = {
            "tp": tp,
            "pp": pp,
            "dp": world // (tp * pp),
            "pp_layers": tuple(per_stage + (stage < more) for stage in range(pp)),
            "vocab_divisible_by": 2,
        }
        for ep, etp in expert_degrees:
            try:
                found.append(TrainLayout(**degrees, ep=ep, etp=etp).checked(spec))
            except ValueError:
                continue
    return found


@st.composite
def layouts(draw, spec: ModelSpec, ranks: tuple[int, ...]) -> Layout:
    return draw(st.sampled_from(legal(spec, ranks)))


WORLDS = [1, 2, 3, 4, 6, 8, 12]


@st.composite
def pairs(draw, worlds=WORLDS) -> tuple[ModelSpec, Layout, Layout]:
    """A model and two layouts of it, on overlapping, nested, disjoint or shuffled ranks."""
    spec = draw(specs())
    before, after = draw(st.sampled_from(worlds)), draw(st.sampled_from(worlds))
    shift = draw(st.sampled_from([0, 0, before // 2, before]))
    ranks = tuple(range(shift, shift + after))
    if draw(st.booleans()):
        ranks = tuple(draw(st.permutations(ranks)))
    return spec, draw(layouts(spec, tuple(range(before)))), draw(layouts(spec, ranks))


def engines(spec: ModelSpec, ranks: tuple[int, ...], tp: int = 1) -> EngineLayout:
    return EngineLayout(tp=tp, dp=len(ranks) // tp, ranks=ranks).checked(spec)


def addresses(spec: ModelSpec, layout: Layout, kinds=OPTIMIZER, ranks=None) -> dict:
    """Buffers of a layout, every value of which is its own address; a parameter is equal to its master."""
    return {rank: _of_rank(spec, layout, rank, kinds) for rank in (layout.ranks if ranks is None else ranks)}


def _of_rank(spec: ModelSpec, layout: Layout, rank: int, kinds) -> dict:
    buffers: dict = {}
    for piece in layout.owned(spec, rank):
        if piece.kind in kinds:
            value = address(spec, piece.tensor, piece.kind, piece.box)
            buffers.setdefault((piece.tensor, piece.kind), []).append((piece.box, value))
    return buffers


def address(spec: ModelSpec, tensor, kind: str, box) -> np.ndarray:
    axes = [np.arange(lo, hi) for lo, hi in box]
    place = axes[0][:, None] * tensor.shape[1] + axes[1] if len(axes) == 2 else axes[0]
    number = {"param": 0, "master": 0, "exp_avg": 1, "exp_avg_sq": 2}[kind]
    return (spec.index[tensor.name] * 1_000_000 + place) * 4 + number


def assert_same(got: dict, wanted: dict) -> None:
    """Same ranks, tensors and boxes, and every cell has the same value."""
    got, wanted = ({rank: held for rank, held in side.items() if held} for side in (got, wanted))
    assert got.keys() == wanted.keys()
    for rank, held in wanted.items():
        assert got[rank].keys() == held.keys()
        for key, pieces in held.items():
            mine = sorted(got[rank][key], key=lambda item: item[0])
            assert [box for box, _ in mine] == sorted(box for box, _ in pieces)
            for (box, array), (_, value) in zip(mine, sorted(pieces, key=lambda item: item[0])):
                assert array is not None and (array == value).all(), (rank, key, box)
