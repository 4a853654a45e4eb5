"""Layouts: their boxes tile the logical space, each cell as often as it should; illegal ones are refused by a rule."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine import slowness

from dynarl.vps.layout import CheckpointLayout, EngineLayout, HFLayout, LayoutError
from dynarl.vps.layout_text import parse
from dynarl.vps.presets import preset
from dynarl.vps.spec import Latent, ModelSpec
from dynarl.vps.train_layout import TrainLayout

RELAXED = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
KINDS = ("param", "master", "exp_avg", "exp_avg_sq")
REPLICATED = ("norm.weight", "norm.bias", "layernorm.weight", "layernorm.bias", "o_proj.bias", "down_proj.bias")
REPLICATED += ("fc2.bias", "mlp.gate.weight", "e_score_correction_bias", "embed_positions.weight")


@st.composite
def specs(draw) -> ModelSpec:
    """Small models with awkward numbers."""
    groups, per_group, layers = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    experts = draw(st.sampled_from([0, 2, 3, 6]))
    flags = {name: draw(st.booleans()) for name in ("tied", "qkv_bias", "qk_norm")}
    biased = draw(st.booleans()) and not experts
    latent = (
        Latent(draw(st.sampled_from([0, 6])), 4, 2, draw(st.sampled_from([2, 8])), 3) if draw(st.booleans()) else None
    )
    latent = latent if experts else None
    return ModelSpec(
        "awkward",
        layers=layers,
        hidden=draw(st.integers(1, 5)),
        heads=groups * per_group,
        groups=groups * (per_group if latent else 1),
        head_dim=draw(st.integers(1, 3)),
        ffn=draw(st.sampled_from([6, 10, 12, 24])),
        vocab=draw(st.integers(1, 40)),
        **flags | (dict(qkv_bias=True) if biased else {}),
        out_bias=biased,
        mlp_bias=biased,
        norm_bias=biased,
        gated=not biased,
        positions=3 if biased else 0,
        experts=experts,
        expert_ffn=12,
        shared_ffn=draw(st.sampled_from([0, 12])) if experts else 0,
        router_bias=bool(experts) and draw(st.booleans()),
        moe_layers=frozenset(draw(st.sets(st.integers(0, layers - 1), min_size=1))) if experts else frozenset(),
        latent=latent,
    )


@st.composite
def train_layouts(draw, spec: ModelSpec) -> TrainLayout:
    """Legal layouts of a model, most of them."""
    one_stage = dict(pp_layers=(spec.layers,), dp=12)
    tp = draw(st.sampled_from([tp for tp in range(1, 13) if fits(TrainLayout, spec, tp=tp, **one_stage)]))
    pp, dp, cp = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    vpp = draw(st.integers(1, 2)) if pp > 1 else 1
    stages = pp * vpp
    pp_layers = None
    if spec.layers % stages or draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, spec.layers), min_size=stages - 1, max_size=stages - 1)))
        pp_layers = tuple(np.diff([0, *cuts, spec.layers]).tolist())
    ep, etp = 1, None
    if spec.experts:
        pairs = [
            (ep, etp)
            for ep in range(1, 7)
            for etp in range(1, 13)
            if spec.experts % ep == 0 and spec.expert_ffn % etp == 0 and (tp * dp * cp) % (ep * etp) == 0
        ]
        ep, etp = draw(st.sampled_from(pairs))
    world = tp * pp * dp * cp
    ranks = tuple(draw(st.permutations(range(5, 5 + world))))
    layout = TrainLayout(
        tp,
        pp,
        dp,
        ep,
        etp,
        cp,
        vpp,
        pp_layers,
        zero1=draw(st.booleans()),
        ranks=ranks,
        vocab_divisible_by=draw(st.sampled_from([1, 4, 128])),
        bucket_size=draw(st.sampled_from([None, None, 50])),
        busbw_padding=draw(st.booleans()),
    )
    return layout.checked(spec)


def fits(kind: type, spec: ModelSpec, **degrees) -> bool:
    """Whether a layout is legal."""
    try:
        return bool(kind(**degrees).checked(spec))
    except LayoutError:
        return False


def counts(layout, spec: ModelSpec, kind: str) -> list[np.ndarray]:
    """How often each cell of each tensor is held."""
    held = [np.zeros(shape, int) for shape in map(tuple, spec.shapes)]
    pieces = layout.pieces(spec, kind)
    for tensor, lo, hi in zip(pieces.tensor.tolist(), pieces.lo.tolist(), pieces.hi.tolist()):
        held[tensor][lo[0] : hi[0], lo[1] : hi[1]] += 1
    return held


def tiles(layout, spec: ModelSpec, kind: str, times) -> None:
    """Assert that every cell of each tensor is held `times(name)` times, and by no rank twice."""
    held = counts(layout, spec, kind)
    for tensor, cells in zip(spec.tensors, held, strict=True):
        assert np.all(cells == times(tensor.name)), (kind, tensor, times(tensor.name), cells)
    pieces = layout.pieces(spec, kind)
    assert np.all(pieces.volume > 0)
    key = list(zip(pieces.tensor.tolist(), pieces.rank.tolist()))
    assert key == sorted(key)
    for rank in layout.ranks:
        mine = pieces.of_rank(rank)
        alone = layout.pieces(spec, kind, [rank])
        for a, b in zip(dataclasses.astuple(mine), dataclasses.astuple(alone), strict=True):
            assert np.array_equal(a, b)
        cells = Counter()
        for tensor, lo, hi in zip(mine.tensor.tolist(), mine.lo.tolist(), mine.hi.tolist()):
            cells.update((tensor, r, c) for r in range(lo[0], hi[0]) for c in range(lo[1], hi[1]))
        assert not cells or max(cells.values()) == 1


@RELAXED
@given(st.data())
def test_trainers_hold_every_cell_as_often_as_they_have_replicas(data):
    spec = data.draw(specs())
    layout = data.draw(train_layouts(spec))
    world, dense = len(layout.ranks) // layout.pp, layout.dp * layout.cp

    def times(name: str) -> int:
        """Copies of a parameter."""
        if name == "model.embed_tokens.weight" and spec.tied and layout.pp > 1:
            return 2 * dense  # on the first and the last stage
        if ".experts." in name:
            return layout.expert_dp
        return world if name.endswith(REPLICATED) else dense

    def shards(name: str) -> int:
        """Copies of its master."""
        if not layout.zero1 or name.endswith("correction_bias"):
            return times(name)
        return times(name) // (layout.expert_dp if ".experts." in name else dense)

    tiles(layout, spec, "param", times)
    for kind in ("master", "exp_avg_sq"):
        tiles(layout, spec, kind, shards)


@RELAXED
@given(st.data())
def test_placements_and_intervals_say_the_same_as_pieces(data):
    spec = data.draw(specs())
    layout = data.draw(train_layouts(spec))
    rank = data.draw(st.sampled_from(layout.ranks))
    whole, owned = set(), set()
    intervals = layout.shard_intervals(spec, rank)
    for placement in layout.placements(spec, rank):
        local = np.full(placement.shape, -1, dtype=object)
        for part in placement.parts:
            extent = tuple(hi - lo for lo, hi in part.box)
            cells = [(part.tensor, *(lo + i for (lo, _), i in zip(part.box, at))) for at in np.ndindex(*extent)]
            where = tuple(slice(start, start + size) for start, size in zip(part.at, extent))
            assert local[where].shape == extent and np.all(local[where] == -1)
            values = np.empty(len(cells), dtype=object)
            values[:] = cells
            local[where] = values.reshape(extent)
            whole.update(cells)
        lo, hi = intervals.get((placement.chunk, placement.parameter), (0, 0))
        if placement.buffer:
            lo, hi = 0, local.size
        owned.update(cell for cell in local.ravel()[lo:hi] if cell != -1)
        if "word_embeddings" not in placement.parameter and "output_layer" not in placement.parameter:
            assert not np.any(local == -1)  # only the vocabulary is padded

    for kind, expected in (("param", whole), ("master", owned if layout.zero1 else whole)):
        cells = set()
        for piece in layout.owned(spec, rank):
            if piece.kind == kind:
                tensor = spec.index[piece.tensor.name]
                start = [lo for lo, _ in piece.box]
                cells.update(
                    (tensor, *(s + i for s, i in zip(start, at)))
                    for at in np.ndindex(*(hi - lo for lo, hi in piece.box))
                )
        assert cells == expected


@RELAXED
@given(st.data())
def test_engines_hold_every_cell_once_in_each_instance_but_for_copied_heads(data):
    spec = data.draw(specs())
    dp, multiple = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 8, 64]))
    degrees = [(tp, ep) for tp in range(1, 13) for ep in range(1, 13) if fits(EngineLayout, spec, tp=tp, dp=dp, ep=ep)]
    tp, ep = data.draw(st.sampled_from(degrees))
    layout = EngineLayout(tp, dp, ep, vocab_divisible_by=multiple).checked(spec)

    def times(name: str) -> int:
        if name.endswith(REPLICATED) or "_a_" in name:
            return tp * dp
        if ("k_proj" in name or "v_proj" in name) and "experts" not in name:
            return dp * max(1, tp // spec.groups)
        return tp * dp // max(tp, ep) if ".experts." in name else dp

    tiles(layout, spec, "param", times)
    assert not len(layout.pieces(spec, "master"))


@RELAXED
@given(specs(), st.integers(1, 9))
def test_files_and_checkpoints_hold_every_tensor_once_and_whole(spec, size):
    names = [tensor.name for tensor in spec.tensors]
    size = min(size, len(names))
    for layout in (
        HFLayout({f"{i}.safetensors": names[i::size] for i in range(size)}),
        HFLayout([f"{i}.safetensors" for i in range(size)], ranks=range(3, 3 + (size + 1) // 2)),
        HFLayout(),
        CheckpointLayout(size),
    ):
        for kind in layout.kinds:
            tiles(layout, spec, kind, lambda name: 1)
            assert len(layout.pieces(spec, kind)) == len(names)


def test_an_engine_has_the_key_heads_of_its_query_heads_and_runs_of_experts():
    spec = dataclasses.replace(preset("qwen3-30b-a3b"), layers=1, moe_layers=frozenset([0]))

    def rows(layout: EngineLayout, rank: int) -> dict[str, tuple[int, int]]:
        return {piece.tensor.name.removeprefix("model.layers.0."): piece.box[0] for piece in layout.owned(spec, rank)}

    wide = rows(EngineLayout(tp=8).checked(spec), 3)  # 4 key heads, each on 2 ranks; 8 query heads to each of them
    assert wide["self_attn.q_proj.weight"] == (12 * 128, 16 * 128)
    assert wide["self_attn.k_proj.weight"] == wide["self_attn.v_proj.weight"] == (128, 256)
    assert wide["mlp.experts.127.gate_proj.weight"] == (288, 384)
    halves = rows(EngineLayout(tp=4, dp=2, ep=2).checked(spec), 6)  # of instance 1: block 1, first half of each expert
    assert halves["mlp.experts.64.up_proj.weight"] == (0, 384) and "mlp.experts.63.up_proj.weight" not in halves
    over = rows(EngineLayout(tp=2, dp=4, ep=8).checked(spec), 5)
    assert sorted({int(name.split(".")[2]) for name in over if "experts" in name}) == list(range(80, 96))


def test_a_fused_projection_is_group_major_and_cut_evenly_even_inside_a_group():
    spec = dataclasses.replace(preset("smollm2-135m"), layers=1, heads=8, groups=2, head_dim=3, hidden=5)

    def rows(tp: int, t: int) -> list[tuple[str, int]]:
        layout = TrainLayout(tp=tp).checked(spec)
        [qkv] = [p for p in layout.placements(spec, t) if p.parameter.endswith("linear_qkv.weight")]
        return [
            (spec.tensors[part.tensor].name.split(".")[4], row)
            for part in qkv.parts
            for row in range(*part.box[0])
        ]  # fmt: skip

    order = [("q", 0), ("q", 1), ("q", 2), ("q", 3), ("k", 0), ("v", 0)]
    order += [("q", 4), ("q", 5), ("q", 6), ("q", 7), ("k", 1), ("v", 1)]
    fused = [(f"{name}_proj", head * 3 + i) for name, head in order for i in range(3)]
    for tp in (1, 2, 4):
        cut = [rows(tp, t) for t in range(tp)]
        assert sum(cut, []) == fused
        assert len({len(part) for part in cut}) == 1


def test_gate_and_up_are_cut_each_and_lie_one_below_the_other():
    spec = preset("smollm2-135m")
    layout = TrainLayout(tp=3).checked(spec)
    [fc1] = [p for p in layout.placements(spec, 1) if p.parameter == "decoder.layers.7.mlp.linear_fc1.weight"]
    assert fc1.shape == (1024, 576)
    assert [(spec.tensors[p.tensor].name, p.box[0], p.at) for p in fc1.parts] == [
        ("model.layers.7.mlp.gate_proj.weight", (512, 1024), (0, 0)),
        ("model.layers.7.mlp.up_proj.weight", (512, 1024), (512, 0)),
    ]


def test_experts_have_local_numbers_in_parameters_and_global_ones_in_tensors():
    spec = dataclasses.replace(preset("qwen3-30b-a3b"), layers=2, moe_layers=frozenset([1]))
    layout = TrainLayout(tp=2, dp=4, ep=4).checked(spec)
    assert (layout.coordinates(5).etp, layout.coordinates(5).ep) == (1, 2)
    placements = {placement.parameter: placement for placement in layout.placements(spec, 5)}
    fc1 = placements["decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"]
    assert fc1.expert and not placements["decoder.layers.1.mlp.router.weight"].expert
    assert [(spec.tensors[p.tensor].name, p.box[0], p.at) for p in fc1.parts] == [
        ("model.layers.1.mlp.experts.67.gate_proj.weight", (384, 768), (0, 0)),
        ("model.layers.1.mlp.experts.67.up_proj.weight", (384, 768), (384, 0)),
    ]
    assert "decoder.layers.1.mlp.experts.local_experts.32.linear_fc1.weight" not in placements


def test_vocabulary_padding_depends_on_tp_and_belongs_to_no_part():
    spec = dataclasses.replace(preset("smollm2-135m"), vocab=300, groups=9, ffn=900)

    def embedding(layout: TrainLayout, rank: int):
        placement = layout.checked(spec).placements(spec, rank)[0]
        return placement.shape, [part.box[0] for part in placement.parts]

    assert embedding(TrainLayout(), 0) == ((384, 576), [(0, 300)])
    assert [TrainLayout(tp=tp).padded_vocab(spec) for tp in (1, 3, 9)] == [384, 384, 1152]
    assert embedding(TrainLayout(tp=3), 2) == ((128, 576), [(256, 300)])
    assert embedding(TrainLayout(tp=9), 3) == ((128, 576), [])
    assert embedding(TrainLayout(tp=9, vocab_divisible_by=1), 3) == ((34, 576), [(102, 136)])


def test_interleaved_and_uneven_stages_hold_the_layers_that_follow_each_other():
    spec = dataclasses.replace(preset("smollm2-135m"), layers=8)
    interleaved = TrainLayout(pp=2, vpp=2).checked(spec)
    assert [list(layers) for layers in interleaved.stage_layers(spec, 1)] == [[2, 3], [6, 7]]
    uneven = TrainLayout(pp=2, vpp=2, pp_layers=(2, 6)).checked(spec)
    assert [list(layers) for layers in uneven.stage_layers(spec, 0)] == [[0], [4]]
    assert [list(layers) for layers in uneven.stage_layers(spec, 1)] == [[1, 2, 3], [5, 6, 7]]
    names = {(p.chunk, p.parameter.split(".")[2]) for p in uneven.placements(spec, 1) if "layers" in p.parameter}
    assert names == {(chunk, local) for chunk in (0, 1) for local in "012"}


def test_live_intervals_override_the_formula_for_the_ranks_they_are_given_for():
    spec = dataclasses.replace(preset("smollm2-135m"), layers=1)
    layout = TrainLayout(dp=2, ranks=(7, 3)).checked(spec)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    live = layout.with_shards({3: {(0, name): (5, 12)}})
    assert live.shard_intervals(spec, 3) == {(0, name): (5, 12)}
    assert live.shard_intervals(spec, 7) == layout.shard_intervals(spec, 7)
    [piece] = [piece for piece in live.owned(spec, 3) if piece.kind == "master"]
    assert piece.box == ((0, 1), (5, 12))
    assert live == layout.with_shards({3: {(0, name): (5, 12)}}) and hash(live) != hash(layout)
    # The intervals belong to the coordinate: under other rank numbers they go with it.
    assert live.relabelled((1, 2)).shard_intervals(spec, 2) == {(0, name): (5, 12)}
    for wrong, message in (
        ({3: {(0, name): (0, 10**9)}}, r"interval must lie in its parameter, but decoder.*1000000000\) is given"),
        ({3: {(0, "no.such"): (0, 1)}}, r"the rank, but it has no \(0, 'no.such'\)"),
    ):
        with pytest.raises(LayoutError, match=message):
            layout.with_shards(wrong).pieces(spec, "master")
    with pytest.raises(LayoutError, match="rank 4 is not among the 2 ranks"):
        layout.with_shards({4: {}})


def test_registered_kinds_follow_the_cuts_of_another_kind():
    spec = dataclasses.replace(preset("smollm2-135m"), layers=2).with_kind("ema", "float32")
    layout = TrainLayout(dp=3, kinds=("param", "master", "ema")).checked(spec)
    assert np.array_equal(layout.pieces(spec, "ema").lo, layout.pieces(spec, "master").lo)
    assert not len(layout.pieces(spec, "exp_avg"))
    with pytest.raises(ValueError, match="kind 'swa' is not one of"):
        TrainLayout(kinds=("swa",)).pieces(spec, "swa")


def test_relabelled_layouts_differ_in_the_ranks_only():
    spec = preset("smollm2-135m")
    layout = TrainLayout(tp=3, dp=2)
    other = layout.relabelled([9, 8, 7, 6, 5, 4])
    a, b = layout.pieces(spec, "master", [1]), other.pieces(spec, "master", [8])
    assert np.array_equal(a.lo, b.lo) and np.array_equal(a.tensor, b.tensor)
    assert other.relabelled(range(6)) == layout


SMOL, MOE = preset("smollm2-135m"), preset("qwen3-30b-a3b")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: TrainLayout(tp=0), "tp must be a positive integer, not 0"),
        (lambda: TrainLayout(pp=2.0), "pp must be a positive integer, not 2.0"),
        (
            lambda: TrainLayout(tp=2, ranks=(0,)),
            "tp x cp x dp x pp must be the number of ranks, but that is 2 and there are 1",
        ),
        (lambda: TrainLayout(tp=3, ranks=(0, 1, 1)), "ranks must differ, but 1 is there 2 times"),
        (lambda: TrainLayout(tp=2, ranks=(0, -1)), "ranks must not be negative, but -1"),
        (
            lambda: TrainLayout(tp=2, dp=3, ep=4),
            "etp x ep x pp must divide the ranks, but etp is 2, ep is 4, pp is 1, .* 6 ranks",
        ),
        (lambda: TrainLayout(vpp=2), "vpp needs pp of 2 or more, but vpp is 2 and pp is 1"),
        (
            lambda: TrainLayout(pp=2, pp_layers=(1, 2, 3)),
            "pp_layers must have an entry for each of 2 stages or of 2 .* has 3",
        ),
        (
            lambda: TrainLayout(pp=2, vpp=2, pp_layers=(4, 3)),
            "vpp must divide the layers of a stage, but one has 3 and vpp is 2",
        ),
        (lambda: TrainLayout(pp=2, pp_layers=(4, -3)), r"pp_layers must be counts of layers, not \(4, -3\)"),
        (
            lambda: EngineLayout(tp=4, ep=3),
            "ep must divide tp in an engine, or be .* tp x dp, but tp is 4, dp is 1 and ep is 3",
        ),
        (
            lambda: EngineLayout(tp=2, dp=2, ranks=(1, 2)),
            "tp x dp must be the number of ranks, but that is 4 and there are 2",
        ),
        (lambda: CheckpointLayout(0), "writers must be a positive integer, not 0"),
        (lambda: HFLayout({"a": ["x"], "b": ["x"]}), "a tensor must be in one file, but x is in a and in b"),
        (lambda: HFLayout({}), "files must name one file at least"),
        (lambda: HFLayout(["a"], ranks=(1, 2)), "there must be 1 to 1 ranks for 1 files, not 2"),
        (lambda: TrainLayout(tp=2).relabelled((1, 2, 3)), "number of ranks, but that is 2 and there are 3"),
    ],
)
def test_layouts_that_no_model_could_have_are_refused_at_construction(make, message):
    with pytest.raises(LayoutError, match=message):
        make()


@pytest.mark.parametrize(
    "layout, spec, message",
    [
        (TrainLayout(tp=2), SMOL, "tp must divide the attention heads, but smollm2-135m has 9 and tp is 2"),
        (
            TrainLayout(tp=4),
            dataclasses.replace(SMOL, heads=12, groups=6),
            r"the key/value heads \(query groups\) or be a multiple of them, but smollm2-135m has 6 and tp is 4",
        ),
        (
            TrainLayout(tp=14),
            dataclasses.replace(SMOL, heads=28, groups=7, ffn=14, head_dim=1),
            None,
        ),
        (
            TrainLayout(tp=16),
            dataclasses.replace(SMOL, heads=16, groups=4, head_dim=1, ffn=16),
            "the rows of the fused query, key and value projection, but smollm2-135m has 24 and tp is 16",
        ),
        (
            TrainLayout(tp=9),
            dataclasses.replace(SMOL, groups=9, ffn=1600),
            "tp must divide the feed-forward width, but smollm2-135m has 1600 and tp is 9",
        ),
        (
            TrainLayout(pp=4),
            SMOL,
            "pp x vpp must divide the layers unless pp_layers is given, .* 30 layers, pp is 4 and vpp is 1",
        ),
        (TrainLayout(pp=3, vpp=4), SMOL, "has 30 layers, pp is 3 and vpp is 4"),
        (
            TrainLayout(pp=2, pp_layers=(10, 21)),
            SMOL,
            r"must sum up to the layers, .* 30 layers and \(10, 21\) sum up to 31",
        ),
        (TrainLayout(dp=2, ep=2), SMOL, "ep must be 1 for a model without experts, but ep is 2"),
        (TrainLayout(tp=3, etp=1), SMOL, "etp must be tp for a model without experts, but etp is 1 and tp is 3"),
        (TrainLayout(dp=3, ep=3), MOE, "ep must divide the experts, but qwen3-30b-a3b has 128 and ep is 3"),
        (
            TrainLayout(dp=5, etp=5),
            MOE,
            "etp must divide the width of an expert, but qwen3-30b-a3b has 768 and etp is 5",
        ),
        (
            TrainLayout(tp=2),
            dataclasses.replace(MOE, shared_ffn=3),
            "tp must divide the width of the shared experts, but qwen3-30b-a3b has 3 and tp is 2",
        ),
        (
            TrainLayout(),
            dataclasses.replace(SMOL, out_bias=True),
            "biases must be in all linear layers, in the query, key and value projection only, or in none",
        ),
        (EngineLayout(tp=2), SMOL, "tp must divide the attention heads, but smollm2-135m has 9 and tp is 2"),
        (
            EngineLayout(tp=4),
            dataclasses.replace(SMOL, heads=12, groups=6),
            r"the key/value heads \(query groups\) or be a multiple of them, but smollm2-135m has 6 and tp is 4",
        ),
        (
            EngineLayout(tp=16, ep=16),
            dataclasses.replace(MOE, experts=24),
            "ep must divide the experts, .* 24 and ep is 16",
        ),
        (HFLayout({"a": ["model.norm.weight"]}), SMOL, "every tensor, but 271 of 272 are in none, such as .*embed"),
        (
            HFLayout({"a": ["lm_head.weight"]}),
            SMOL,
            "tensors of the model only, but smollm2-135m has no lm_head.weight",
        ),
    ],
)
def test_layouts_that_do_not_fit_a_model_are_refused_with_rule_and_numbers(layout, spec, message):
    if message is None:
        assert layout.checked(spec) is layout
        return
    with pytest.raises(LayoutError, match=message):
        layout.checked(spec)
    with pytest.raises(LayoutError, match=message):
        list(layout.owned(spec, layout.ranks[0]))


def test_writers_of_a_checkpoint_have_about_as_many_bytes():
    spec = preset("llama2-7b")
    pieces = CheckpointLayout(8).pieces(spec, "master")
    load = np.bincount(pieces.rank, weights=pieces.volume)
    assert load.max() / load.mean() < 1.02


def test_names_of_files_alone_get_runs_of_tensors_of_about_as_many_bytes():
    spec = preset("llama2-7b")
    layout = HFLayout([f"model-{i}.safetensors" for i in range(4)])
    names = layout.file_tensors(spec)
    assert sum(map(list, names.values()), []) == [tensor.name for tensor in spec.tensors]
    load = [sum(int(spec.sizes[spec.index[name]]) for name in part) for part in names.values()]
    assert max(load) / min(load) < 1.1


@pytest.mark.parametrize(
    "text, layout",
    [
        ("tp=4,pp=2,dp=8", TrainLayout(4, 2, 8)),
        ("train:tp=2,zero1=false,etp=1,ep=2", TrainLayout(2, zero1=False, etp=1, ep=2)),
        ("pp=3,pp_layers=4*2:3,ranks=0-1:7", TrainLayout(pp=3, pp_layers=(4, 4, 3), ranks=(0, 1, 7))),
        ("engine:tp=2,dp=2", EngineLayout(2, 2)),
        ("engine", EngineLayout()),
        ("hf", HFLayout()),
        ("hf:files=a:b,ranks=5", HFLayout(["a", "b"], ranks=[5])),
        ("checkpoint:writers=3", CheckpointLayout(3)),
    ],
)
def test_layouts_are_read_from_text(text, layout):
    assert parse(text) == layout


@pytest.mark.parametrize(
    "text, message",
    [
        ("trainer:tp=1", "'trainer' in 'trainer:tp=1' is not one of train, engine, hf, checkpoint"),
        ("tp=x", "'x' in 'tp=x' cannot be read as tp"),
        ("tp=1,tp=2", "'tp' is there twice"),
        ("tpp=2", "'tpp' in 'tpp=2' is not one of tp, pp, dp"),
        ("ranks=3-", "'3-' in 'ranks=3-' cannot be read as ranks"),
        ("zero1=maybe", "'maybe' in 'zero1=maybe' cannot be read as zero1"),
    ],
)
def test_text_that_is_no_layout_is_refused_with_the_piece_that_is_wrong(text, message):
    with pytest.raises(LayoutError, match=message):
        parse(text)


def test_no_layout_needs_torch():
    script = "import sys, dynarl.vps.train_layout, dynarl.vps.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2]).returncode == 0


def test_a_large_model_on_256_ranks_takes_well_under_a_second_and_one_rank_a_moment():
    spec = dataclasses.replace(preset("qwen3-235b-a22b"), name="fresh")  # nothing of it is cached yet
    layout = TrainLayout(tp=4, pp=2, dp=32, ep=8)
    start = time.process_time()
    layout.pieces(spec, "master", [200])
    one = time.process_time() - start
    start = time.process_time()
    for kind in KINDS:
        layout.pieces(spec, kind)
    everything = time.process_time() - start
    assert one < 0.2 * slowness() and everything < 4 * slowness(), (one, everything)
