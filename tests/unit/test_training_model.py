"""The Megatron model against transformers, and weights on their way between the two."""

import json
import subprocess
import sys
import zlib

import pytest

torch = pytest.importorskip("torch")
# Not importorskip("megatron.core"): that fails, and would skip, before megatron_cpu.install() has been called.
pytest.importorskip("megatron")

import torch.distributed as dist  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_model import write_model  # noqa: E402

from dynarl.roles.training import weights  # noqa: E402
from dynarl.roles.training.arch import read_arch  # noqa: E402
from dynarl.roles.training.create import create_model  # noqa: E402
from dynarl.roles.training.groups import build_groups  # noqa: E402
from dynarl.roles.training.logprobs import entropy, token_logprobs  # noqa: E402
from dynarl.roles.training.model import build_model, hidden_states, picked_logits  # noqa: E402
from dynarl.roles.training.torch_world import World, leave_world  # noqa: E402
from dynarl.vps.train_layout import TrainLayout  # noqa: E402

FAMILIES = ["Qwen2ForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"]
ALONE = TrainLayout(vocab_divisible_by=1)


@pytest.fixture(scope="module")
def groups():
    yield build_groups(ALONE, World(dist.HashStore(), "w", 0, torch.device("cpu"), 60.0))
    leave_world()


def load(directory, groups):
    arch = read_arch(directory)
    model = build_model(arch, groups, "float32")
    params = weights.parameters_by_name(model)
    weights.load_shard(params, arch.spec, ALONE, 0, directory)
    return arch, model, params


def empty_params(spec, layout, rank):
    return {p.parameter: torch.full(p.shape, float("nan")) for p in layout.placements(spec, rank)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_transformers(groups, tmp_path, family, tied):
    transformers = pytest.importorskip("transformers")
    directory = write_model(str(tmp_path), family=family, tied=tied)
    arch, model, _ = load(directory, groups)
    tokens = torch.randint(0, arch.spec.vocab, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        mine = picked_logits(model, hidden_states(model, tokens), torch.arange(tokens.numel()))
        mine = mine.view(40, 3, -1).transpose(0, 1)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(tokens).logits
    assert theirs.std() > 0.1
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("degrees", [dict(), dict(tp=2), dict(tp=2, pp=2), dict(pp=2, dp=2)])
def test_cutting_and_joining_weights_is_bitwise(tmp_path, family, degrees):
    directory = write_model(str(tmp_path), family=family, tied=False, vocab_size=49)
    spec, layout = read_arch(directory).spec, TrainLayout(vocab_divisible_by=1, **degrees)
    joined = {tensor.name: torch.full(tensor.shape, float("nan")) for tensor in spec.tensors}
    for rank in layout.ranks:
        params = empty_params(spec, layout, rank)
        weights.load_shard(params, spec, layout, rank, directory)
        assert not any(value.isnan().any() for value in params.values())
        for placement in layout.placements(spec, rank):
            for part in placement.parts:
                box = tuple(slice(lo, hi) for lo, hi in part.box)
                joined[spec.tensors[part.tensor].name][box] = weights.local(params[placement.parameter], part)
    original = load_file(f"{directory}/model.safetensors")
    assert set(original) == set(joined) and all(torch.equal(original[name], joined[name]) for name in original)


def test_a_checkpoint_split_over_files_is_read_through_its_index(tmp_path):
    from safetensors.torch import save_file

    directory = write_model(str(tmp_path))
    whole = load_file(tmp_path / "model.safetensors")
    names = sorted(whole)
    files = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, part in files.items():
        save_file({name: whole[name] for name in part}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    spec = read_arch(directory).spec
    params = empty_params(spec, ALONE, 0)
    weights.load_shard(params, spec, ALONE, 0, directory)
    assert torch.equal(params["embedding.word_embeddings.weight"], whole["model.embed_tokens.weight"])


def test_a_tensor_of_another_shape_or_none_is_named(tmp_path):
    from safetensors.torch import save_file

    directory = write_model(str(tmp_path))
    spec = read_arch(directory).spec
    params = empty_params(spec, ALONE, 0)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(3,\), config.json says \(64,\)"):
        weights.load_shard(params, spec, ALONE, 0, directory)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no tensor model.norm.weight"):
        weights.load_shard(params, spec, ALONE, 0, directory)


def test_logprobs_and_entropy_leave_padding_columns_out(groups):
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 5, 2, 3, 1])
    real = torch.log_softmax(logits[:, :6], -1)
    logprobs = token_logprobs(logits, targets, (0, 6), groups.tp)
    torch.testing.assert_close(logprobs, real.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy(logits, (0, 6), groups.tp), -(real.exp() * real).sum(-1))


def tokenizer_files(directory):
    directory.mkdir()
    vocab = {"[pad]": 0, "[eos]": 1, "a": 2, "b": 3}
    added = [{"id": 0, "content": "[pad]"}, {"id": 1, "content": "[eos]"}, {"id": 4, "content": "[extra]"}]
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "[eos]", "pad_token": {"content": "[pad]"}})
    )
    return directory


MODEL = {
    "hidden_size": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn_size": 96,
    "max_position": 128,
    "tied": True,
    "dtype": "float32",
    "experts": 0,
    "experts_per_token": 2,
}


@pytest.mark.parametrize("experts", [0, 4])
def test_a_created_model_is_loaded_by_transformers_and_depends_on_the_seed_alone(experts, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = str(tokenizer_files(tmp_path / "tokenizer"))
    digests = [
        create_model(str(tmp_path / name), MODEL | {"experts": experts}, tokenizer, seed)["digest"]
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert digests[0] == digests[1] != digests[2]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert getattr(model.config, "num_experts", 0) == experts == read_arch(tmp_path / "a").spec.experts
    assert model.config.vocab_size == 5 and model.config.eos_token_id == 1 and model.config.pad_token_id == 0
    assert (tmp_path / "a" / "tokenizer.json").exists()
    assert model(torch.tensor([[2, 3]])).logits.shape == (1, 2, 5)


def test_a_model_is_never_overwritten_and_bad_sizes_show_the_arithmetic(tmp_path):
    tokenizer = str(tokenizer_files(tmp_path / "tokenizer"))
    create_model(str(tmp_path / "a"), MODEL, tokenizer, 1)
    with pytest.raises(ValueError, match="not overwritten"):
        create_model(str(tmp_path / "a"), MODEL, tokenizer, 1)
    with pytest.raises(ValueError, match="4 heads must divide hidden_size 66"):
        create_model(str(tmp_path / "b"), MODEL | {"hidden_size": 66}, tokenizer, 1)


def test_the_worker_imports_neither_transformers_nor_the_compiler():
    unwanted = ("transformers", "torch._dynamo", "triton", "torch.distributed.tensor", "sympy")
    code = f"import sys, dynarl.roles.training.worker; print([m for m in {unwanted} if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_half_written_weights_are_never_at_the_final_name(tmp_path, monkeypatch):
    directory = write_model(str(tmp_path / "a"))
    tensors = load_file(f"{directory}/model.safetensors")
    old = zlib.crc32((tmp_path / "a" / "model.safetensors").read_bytes())

    def interrupted(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(weights, "save_file", interrupted)
    with pytest.raises(OSError, match="disk full"):
        weights.write_weights(tensors, tmp_path / "a")
    assert zlib.crc32((tmp_path / "a" / "model.safetensors").read_bytes()) == old
