"""From a Hugging Face directory to a checkpoint of ours and back."""

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from safetensors.numpy import load_file, save_file  # noqa: E402

from dynarl import rundir  # noqa: E402
from dynarl.cli import export, import_cmd  # noqa: E402
from dynarl.transport.files import CheckpointReader, FileError  # noqa: E402
from dynarl.transport.hf import HFError, export_model, from_float32, import_model, read_spec, to_float32  # noqa: E402

CONFIG = dict(
    model_type="qwen2", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=24, vocab_size=33, tie_word_embeddings=True, torch_dtype="float32",
)  # fmt: skip


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text("{}")
    rng = np.random.default_rng(0)
    save_file(
        {t.name: rng.standard_normal(t.shape).astype("f4") for t in read_spec(directory).tensors}, directory / "model.safetensors"
    )
    return directory


def test_what_is_imported_and_exported_again_is_the_same_bit_by_bit(model, tmp_path):
    import_model(model, tmp_path / "checkpoint")
    export_model(tmp_path / "checkpoint", tmp_path / "again")
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)
    assert (tmp_path / "again" / "tokenizer.json").read_text() == "{}"


def test_an_imported_checkpoint_has_masters_and_moments_of_zero(model, tmp_path):
    import_model(model, tmp_path / "checkpoint")
    reader = CheckpointReader(tmp_path / "checkpoint" / "state", read_spec(model))
    assert reader.kinds == ("exp_avg", "exp_avg_sq", "master")
    assert reader.scalars[0]["steps"] == {"dense": 0, "expert": 0}


def test_nothing_is_overwritten(model, tmp_path):
    import_model(model, tmp_path / "checkpoint")
    with pytest.raises(HFError, match="is not empty"):
        import_model(model, tmp_path / "checkpoint")
    export_model(tmp_path / "checkpoint", tmp_path / "again")
    with pytest.raises(HFError, match="holds a model already"):
        export_model(tmp_path / "checkpoint", tmp_path / "again")


def test_an_export_that_fails_leaves_no_weights(model, tmp_path):
    import_model(model, tmp_path / "checkpoint")
    data = tmp_path / "checkpoint" / "state" / "rank-00000.json"
    about = json.loads(data.read_text())
    about["pieces"] = [piece for piece in about["pieces"] if piece[1] != "model.norm.weight"]
    data.write_text(json.dumps(about))
    with pytest.raises(FileError, match="model.norm.weight"):
        export_model(tmp_path / "checkpoint", tmp_path / "again")
    assert not list((tmp_path / "again").glob("*model.safetensors*")) and not list((tmp_path / "again").glob(".*"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_number_that_a_type_can_hold_comes_back(dtype):
    raw = np.arange(0, 1 << 16, 7, dtype="<u2") if dtype != "float32" else np.arange(0, 1 << 31, 1 << 18, dtype="<u4")
    values = to_float32(raw, dtype)
    finite = np.isfinite(values)
    assert np.array_equal(from_float32(values, dtype)[finite], raw[finite])
    assert np.isnan(to_float32(from_float32(values, dtype), dtype)[np.isnan(values)]).all()


def test_casting_is_that_of_torch():
    import torch

    values = np.random.default_rng(1).standard_normal(10_000).astype("<f4")
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view("<u2")
    assert np.array_equal(from_float32(values, "bfloat16"), expected)


def test_the_commands_say_what_they_made(model, tmp_path, monkeypatch):
    monkeypatch.setenv("DYNARL_RUNS", str(tmp_path / "runs"))
    run = rundir.create(tmp_path / "runs", "x")
    rundir.set_latest(run)
    target = rundir.checkpoint(run, 3)
    target.parent.mkdir(parents=True, exist_ok=True)
    made = CliRunner().invoke(import_cmd.command, [str(model), str(target), "-o", "json"])
    assert made.exit_code == 0 and json.loads(made.stdout)["tensors"] == len(read_spec(model).tensors)
    shown = CliRunner().invoke(export.command, ["last", "-o", "json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["path"] == str(run / "export" / "step-000003")
    absent = CliRunner().invoke(export.command, ["last", "--iteration", "4"])
    assert absent.exit_code == 5 and "there are: step-000003" in absent.stderr
    shutil.rmtree(run / "export")
    (target / "model" / "config.json").write_text(json.dumps(CONFIG | {"model_type": "unheard-of"}))
    refused = CliRunner().invoke(export.command, ["last"])
    assert refused.exit_code == 3 and "unheard-of" in refused.stderr
