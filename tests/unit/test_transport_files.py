"""Staged models and checkpoints: what is written comes back, at any layout, and what is wrong is said."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy_ends import DTYPES, Arrays, coded

from dynarl.transport.files import CheckpointReader, CheckpointWriter, FileError, fill, owned_once
from dynarl.transport.messages import Fragment, num_bytes
from dynarl.transport.staged import StagedModel
from dynarl.vps.box import volume, whole
from dynarl.vps.digest import digest_box, digest_weights
from dynarl.vps.layout import ALL_KINDS, EngineLayout
from dynarl.vps.spec import ModelSpec
from dynarl.vps.train_layout import TrainLayout

SPEC = ModelSpec(
    name="small", layers=2, hidden=16, heads=4, groups=2, head_dim=4, ffn=24, vocab=53, tied=True, qkv_bias=True
)
LAYOUTS = [
    TrainLayout(),
    TrainLayout(tp=2, dp=2),
    TrainLayout(tp=1, pp=2, dp=3),
    TrainLayout(tp=4, pp=2),
    TrainLayout(tp=2, dp=3, zero1=False),
    TrainLayout(tp=2, dp=2, ranks=(7, 3, 5, 1)),
]
box_of = st.builds(
    lambda tensor, cuts: Fragment(
        "param",
        tensor,
        tuple(
            (a * n // 100, max(a * n // 100 + 1, b * n // 100)) for (a, b), n in zip(cuts, SPEC.tensors[tensor].shape)
        ),
    ),
    st.integers(0, len(SPEC.tensors) - 1),
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 100)).map(lambda t: (t[0], max(t))), min_size=2, max_size=2),
)


def everything(kind: str):
    return [Fragment(kind, t, whole(tensor.shape)) for t, tensor in enumerate(SPEC.tensors)]


def packed(fragments) -> bytes:
    return b"".join(coded(SPEC, *f).tobytes() for f in fragments)


def staged(path: Path) -> StagedModel:
    model = StagedModel.create(path, SPEC)
    model.unpack(everything("param"), memoryview(packed(everything("param"))))
    return model


def test_a_staged_model_appears_complete_or_not_at_all(tmp_path):
    path = tmp_path / "model.safetensors"
    model = staged(path)
    assert not path.exists() and len(list(tmp_path.iterdir())) == 1
    digest = model.digest()
    assert (
        model.digests()["param"]
        == sum(
            digest_box(SPEC.tensors[t].name, "param", box, coded(SPEC, kind, t, box))
            for kind, t, box in everything("param")
        )
        % 2**64
    )
    model.complete()
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert digest == digest_weights(tmp_path)
    StagedModel.create(tmp_path / "other", SPEC).discard()
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(box_of, max_size=6))
def test_any_boxes_of_a_staged_model_can_be_read(tmp_path_factory, boxes):
    directory = tmp_path_factory.mktemp("staged")
    staged(directory / "model.safetensors").complete()
    out = bytearray(num_bytes(boxes, {"param": 2}))
    StagedModel.open(directory, SPEC).pack(boxes, memoryview(out))
    assert bytes(out) == packed(boxes)


def test_safetensors_reads_a_staged_model(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    staged(tmp_path / "model.safetensors").complete()
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    assert list(tensors) == sorted(tensors) or set(tensors) == {t.name for t in SPEC.tensors}
    for number, tensor in enumerate(SPEC.tensors):
        value = tensors[tensor.name]
        assert value.dtype == torch.bfloat16 and tuple(value.shape) == tensor.shape
        assert np.array_equal(value.view(torch.uint16).numpy(), coded(SPEC, "param", number, whole(tensor.shape)))


def test_a_model_in_several_files_is_read(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    names = [t.name for t in SPEC.tensors]
    weight_map = {}
    for part in range(2):
        tensors = {
            name: coded(SPEC, "param", i, whole(SPEC.tensors[i].shape)).view(np.float16)
            for i, name in enumerate(names)
            if i % 2 == part
        }
        safetensors.save_file(tensors, tmp_path / f"model-{part}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{part}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    spec = ModelSpec(**{**vars_of(SPEC), "dtype": "float16"})
    out = bytearray(2 * spec.parameters)
    StagedModel.open(tmp_path, spec).pack(everything("param"), memoryview(out))
    assert bytes(out) == packed(everything("param"))


def test_every_rank_loads_its_part_of_a_model_file(tmp_path):
    staged(tmp_path / "model.safetensors").complete()
    layout = TrainLayout(tp=2, pp=2)
    for rank in layout.ranks:
        arrays = Arrays.of_layouts(SPEC, rank, layout, layout, ["param"])
        arrays.source = {}
        wanted = [
            Fragment(p.kind, SPEC.index[p.tensor.name], p.box) for p in layout.owned(SPEC, rank) if p.kind == "param"
        ]
        fill(StagedModel.open(tmp_path, SPEC), arrays, wanted, {"param": 2}, 1 << 12)
        assert arrays.wrong() == []


def vars_of(spec):
    import dataclasses

    return {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}


def test_what_is_wrong_with_a_model_file_is_said(tmp_path):
    staged(tmp_path / "model.safetensors").complete()
    wider = ModelSpec(**{**vars_of(SPEC), "ffn": 32})
    with pytest.raises(FileError, match=r"mlp.(gate|up|down)_proj.weight has shape \(.*\), the model's is"):
        StagedModel.open(tmp_path, wider)
    with pytest.raises(FileError, match="is BF16, the model's dtype is float32"):
        StagedModel.open(tmp_path, ModelSpec(**{**vars_of(SPEC), "dtype": "float32"}))
    with pytest.raises(FileError, match="has no tensor model.layers.2.input_layernorm.weight"):
        StagedModel.open(tmp_path, ModelSpec(**{**vars_of(SPEC), "layers": 3}))
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(FileError, match="is cut short: model.norm.weight ends at byte"):
        StagedModel.open(tmp_path, SPEC)
    with pytest.raises(FileError, match="holds parameters only, not master"):
        staged(tmp_path / "x").pack([Fragment("master", 0, ((0, 1), (0, 1)))], memoryview(bytearray(4)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_is_owned_once(layout):
    for kind in ALL_KINDS:
        count = [np.zeros(t.shape, int) for t in SPEC.tensors]
        for rank in layout.ranks:
            for _, tensor, box in owned_once(SPEC, layout, rank, [kind]):
                count[tensor][tuple(slice(*side) for side in box)] += 1
        assert all((c == 1).all() for c in count)


def save(directory: Path, layout, kinds=ALL_KINDS) -> int:
    total = 0
    for rank in layout.ranks:
        source = Arrays.of_layouts(SPEC, rank, layout, layout, kinds)
        writer = CheckpointWriter(SPEC, rank, owned_once(SPEC, layout, rank, kinds))
        writer.snapshot(source, {"step": 12, "rng": "00ff", "rank": rank}, limit=1000)
        total += writer.write(directory, layout.ranks).result()
        writer.close()
    return total


@pytest.mark.parametrize("source", LAYOUTS[1:])
@pytest.mark.parametrize("destination", LAYOUTS[:4])
def test_a_checkpoint_is_read_at_any_other_layout(source, destination, tmp_path):
    kinds = ["master", "exp_avg", "exp_avg_sq"]
    assert save(tmp_path, source, kinds) == 12 * SPEC.parameters
    reader = CheckpointReader(tmp_path, SPEC)
    assert reader.kinds == tuple(sorted(kinds)) and reader.scalars[source.ranks[0]]["step"] == 12
    for rank in destination.ranks:
        arrays = Arrays.of_layouts(SPEC, rank, destination, destination, kinds)
        arrays.source = {}
        wanted = [
            Fragment(p.kind, SPEC.index[p.tensor.name], p.box) for p in destination.owned(SPEC, rank) if p.kind in kinds
        ]
        assert fill(reader, arrays, wanted, dict.fromkeys(kinds, 4), 500) == sum(4 * volume(f.box) for f in wanted)
        assert arrays.wrong() == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    save(directory, LAYOUTS[2])
    return directory


@settings(max_examples=40, deadline=None)
@given(boxes=st.lists(box_of, max_size=6), kind=st.sampled_from(ALL_KINDS))
def test_any_boxes_of_a_checkpoint_can_be_read(saved, boxes, kind):
    boxes = [f._replace(kind=kind) for f in boxes]
    out = bytearray(num_bytes(boxes, {kind: DTYPES[kind]().itemsize}))
    CheckpointReader(saved, SPEC).pack(boxes, memoryview(out))
    assert bytes(out) == packed(boxes)


def copy(saved: Path, directory: Path) -> Path:
    for path in saved.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    return directory


def test_what_is_wrong_with_a_checkpoint_is_said(saved, tmp_path):
    with pytest.raises(FileError, match="holds no checkpoint"):
        CheckpointReader(tmp_path, SPEC)
    copy(saved, tmp_path)
    data = tmp_path / "rank-00001.data"
    data.write_bytes(data.read_bytes()[:-3])
    with pytest.raises(
        FileError, match=r"rank-00001.data has \d+ bytes, its manifest says \d+: .* of model\..* \[.*\] is lost"
    ):
        CheckpointReader(tmp_path, SPEC)
    data.unlink()
    with pytest.raises(FileError, match="rank-00001.data is not there"):
        CheckpointReader(tmp_path, SPEC)
    (tmp_path / "rank-00001.json").unlink()
    with pytest.raises(FileError, match="lacks the part of rank 1: rank-00001.json"):
        CheckpointReader(tmp_path, SPEC)
    copy(saved, tmp_path)
    with pytest.raises(FileError, match=r"has box \[.*\], the model's shape is|is no tensor of this model"):
        CheckpointReader(tmp_path, ModelSpec(**{**vars_of(SPEC), "hidden": 8, "heads": 2, "groups": 1}))
    with pytest.raises(FileError, match="is bfloat16, the model's is float32"):
        CheckpointReader(tmp_path, ModelSpec(**{**vars_of(SPEC), "dtype": "float32"}))


def test_a_piece_that_nobody_wrote_is_named(saved, tmp_path):
    copy(saved, tmp_path)
    manifest = tmp_path / "rank-00000.json"
    about = json.loads(manifest.read_text())
    lost = next(p for p in about["pieces"] if p[0] == "master" and len(p[2]) == 2)
    about["pieces"].remove(lost)
    manifest.write_text(json.dumps(about))
    tensor = SPEC.index[lost[1]]
    box = tuple(map(tuple, lost[2]))
    with pytest.raises(FileError) as error:
        CheckpointReader(tmp_path, SPEC).pack(
            [Fragment("master", tensor, whole(SPEC.tensors[tensor].shape))],
            memoryview(bytearray(4 * volume(whole(SPEC.tensors[tensor].shape)))),
        )
    said = ", ".join(f"{lo}:{hi}" for lo, hi in box)
    assert f"lacks [{said}] of master of {lost[1]}" in str(error.value) and str(tmp_path) in str(error.value)


def test_training_may_go_on_once_the_snapshot_is_taken(tmp_path):
    layout = TrainLayout()
    source = Arrays.of_layouts(SPEC, 0, layout, layout, ["master"])
    writer = CheckpointWriter(SPEC, 0, owned_once(SPEC, layout, 0, ["master"]))
    gate = threading.Event()
    writer._thread.submit(gate.wait)  # the disk is slow
    writer.snapshot(source, {})
    future = writer.write(tmp_path, [0])
    for held in source.source.values():
        for _, array in held:
            array[...] = 0  # the next optimizer step
    assert not future.done() and not list(tmp_path.iterdir())
    gate.set()
    future.result()
    out = bytearray(4 * SPEC.parameters)
    CheckpointReader(tmp_path, SPEC).pack(everything("master"), memoryview(out))
    assert bytes(out) == packed(everything("master"))


def test_a_write_that_fails_is_an_error_and_leaves_nothing(tmp_path):
    layout = TrainLayout()
    writer = CheckpointWriter(SPEC, 0, owned_once(SPEC, layout, 0, ["master"]))
    writer.snapshot(Arrays.of_layouts(SPEC, 0, layout, layout, ["master"]), {})
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        writer.write(tmp_path / "file" / "checkpoint", [0]).result()
    with pytest.raises(OSError):
        writer.snapshot(None, {})


def test_engines_hold_replicas_that_are_written_once():
    layout = EngineLayout(tp=2, dp=3)
    sizes = [sum(volume(f.box) for f in owned_once(SPEC, layout, r, ["param"])) for r in layout.ranks]
    assert sum(sizes) == SPEC.parameters and sizes[2:] == [0, 0, 0, 0]
