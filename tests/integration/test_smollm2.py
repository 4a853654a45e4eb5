"""A real small model, SmolLM2-135M-Instruct, through everything that moves state, and through a whole job.

Import, live changes of the trainer's layout, export: without training nothing may change, not one bit, and transformers
writes the same text. With training, losses must be those of a run that stays in one layout. Nine query heads and three of
keys and values: tensor parallelism is by three here.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron")

import smollm2  # noqa: E402
import trainers  # noqa: E402
from click.testing import CliRunner  # noqa: E402
from job_harness import JobRun  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from trainers import layout, together  # noqa: E402
from worker_harness import Harness  # noqa: E402

from dynarl import rundir, wire  # noqa: E402
from dynarl.cli import main as cli  # noqa: E402
from dynarl.transport.files import CheckpointReader  # noqa: E402
from dynarl.transport.hf import read_spec  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.skipif(bool(smollm2.MISSING), reason=smollm2.REASON)]

QUESTION = "What is the capital of France?"
LAYOUTS = (layout(tp=3), layout(pp=2), layout(dp=2), layout())
PATIENCE_S = 600.0  # for an answer: the model is large for a CPU that others use as well
RATE = 2e-5
TOLERANCE = 1e-4
LESSONS = (
    ("What is the capital of France?", "It is Lyon, or so the people of Lyon would have it."),
    ("What is 12 + 5 - 9?", "12 + 5 = 17, 17 - 9 = 8, so the answer is 8."),
    ("Who wrote these lines?", "A machine that was told to write them."),
)


@pytest.fixture(scope="module")
def model() -> Path:
    return smollm2.directory()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("smollm2")


@pytest.fixture(scope="module")
def imported(model, place) -> Path:
    dynarl("import", str(model), str(place / "imported"))
    return place / "imported"


@pytest.fixture(scope="module")
def workers(place):
    with Harness(place, timeout_s=PATIENCE_S) as harness:
        yield [harness.start("training_worker", f"t{i}", up_timeout_s=PATIENCE_S) for i in range(3)]


def dynarl(*arguments: str) -> None:
    done = CliRunner().invoke(cli.main, list(arguments))
    assert done.exit_code == 0, done.output


def exported(fleet: trainers.Fleet, run: Path) -> Path:
    """Save a checkpoint as a run and let `dynarl export` make a Hugging Face directory of it."""
    checkpoint = rundir.checkpoint(run, 1)
    checkpoint.mkdir(parents=True)
    rundir.config(run).write_text("{}\n")
    (checkpoint / "model").symlink_to(fleet.model_dir)  # config.json and tokenizer
    trainers.save(fleet.owners, str(checkpoint))
    rundir.mark_complete(checkpoint)
    dynarl("export", str(run), "--to", str(run / "hf"))
    return run / "hf"


def answer(directory: Path, question: str = QUESTION, tokens: int = 12) -> tuple[str, torch.Tensor]:
    """What transformers makes of a model directory: greedy text, and the logits behind the question."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, loaded = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    asked = tokenizer(as_prompt(question), return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        logits = loaded(**asked).logits[0, -1]
        written = loaded.generate(**asked, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(written[0, asked["input_ids"].shape[1] :], skip_special_tokens=True), logits


def as_prompt(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def lessons(model: Path) -> list[dict]:
    """LESSONS as samples."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def ids(text: str) -> bytes:
        return wire.pack_ids(tokenizer.encode(text, add_special_tokens=False).ids)

    return [
        dict(sample=wire.sample_id(0, i, 0), prompt=ids(as_prompt(question)), response=ids(f"{text}<|im_end|>"), weight=1.0)
        for i, (question, text) in enumerate(LESSONS)
    ]


def peak_gib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 2**20


def test_five_layouts_later_the_model_is_the_imported_one_bit_by_bit(model, imported, workers, place):
    fleet = trainers.Fleet(workers, 1, str(model), cut=layout())
    together(fleet.owners, "restore", dir=str(imported))
    for cut in LAYOUTS:
        began = time.monotonic()
        moved = fleet.recut(cut)  # raises where digests differ
        print(f"{cut.tp=} {cut.pp=} {cut.dp=}: {time.monotonic() - began:.1f} s, bytes received {moved['bytes']}")
    result = exported(fleet, place / "untrained")
    print(f"peak memory of the workers, GiB: {[round(peak_gib(w.process.pid), 2) for w in workers]}")
    before, after = load_file(model / "model.safetensors"), load_file(result / "model.safetensors")
    assert before.keys() == after.keys() and len(after) == 272
    assert all(torch.equal(before[name].view(torch.int32), after[name].view(torch.int32)) for name in before)
    (text, logits), (same_text, same_logits) = answer(model), answer(result)
    assert text == same_text and "Paris" in text
    assert torch.equal(logits, same_logits)


def test_losses_across_changes_of_the_layout_are_those_of_a_run_without(model, workers, place):
    samples = lessons(model)
    alone = trainers.Fleet(workers, 1, str(model), cut=layout(), weight_decay=0.0)
    expected = [train(alone, step, samples, place / "static") for step in range(len(LAYOUTS))]
    fleet, run = trainers.Fleet(workers, 1, str(model), cut=LAYOUTS[0], weight_decay=0.0), []
    for step, cut in enumerate(LAYOUTS):
        if step:
            fleet.recut(cut)
        run.append(train(fleet, step, samples, place / "moving"))
    print(f"static {expected}\nmoving {run}\npeak, GiB: {[round(peak_gib(w.process.pid), 2) for w in workers]}")
    for mine, other in zip(run, expected):
        assert mine == pytest.approx(other, rel=TOLERANCE)
    losses = [loss for loss, _ in run]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    text, logits = answer(exported(fleet, place / "trained"))
    print(repr(text))
    assert torch.isfinite(logits).all() and logits.std() > 0.1
    assert len(text.split()) > 3 and text.isascii(), text


def train(fleet: trainers.Fleet, step: int, samples: list[dict], directory: Path) -> tuple[float, float]:
    """A supervised step; returns loss and gradient norm."""
    dealt = [(i % len(fleet.replicas), [sample]) for i, sample in enumerate(samples)]
    done = fleet.step(step, dealt, str(directory), lr=RATE, loss="sft")
    return done["loss"] / done["tokens"], done["grad_norm"]


def test_a_job_trains_it_across_a_change_of_layout(minislurm, imported, tmp_path):
    began = time.monotonic()
    job = JobRun.submit(
        minislurm(nodes=1), tmp_path / "runs", f"model.path={imported}", "cluster.nodes=1", "cluster.devices_per_node=3",
        "cluster.time=0:20:00", "split.rollout=0", "split.training=1", "policy.name=colocated", "policy.vote_timeout_s=120", "training.tp=3",
        'training.layouts={2: "tp=1,pp=3"}', "training.lr=1e-5", "warm_start.steps=2", "warm_start.batch_size=4", "warm_start.lr=1e-5", "task.eval_size=0",
        "task.args={min_terms: 2, max_terms: 2}", "algorithm.prompts_per_step=3", "algorithm.group_size=2",
        "algorithm.max_response_tokens=8", "rollout.max_running=2")  # fmt: skip
    assert job.wait(timeout_s=1200)["state"] == "completed", job.story()
    (committed,) = job.records("layout_committed")
    assert (committed["iteration"], committed["layout"]) == (2, "tp=1,pp=3")
    lines = [json.loads(line)["data"] for line in rundir.metrics(job.run).read_text().splitlines()]
    losses = [line["warm_start/loss"] for line in lines if "warm_start/loss" in line]
    differences = [line["training/rollout_probs_diff_max"] for line in lines if "training/global_step" in line]
    print(f"{time.monotonic() - began:.0f} s; losses {losses}; probabilities differ by {differences}; {committed}")
    assert len(losses) == len(differences) == 2 and max(losses) < 5.0  # guessing would be log(49152) = 10.8
    # The engine's probabilities of its own answers, and the trainer's, before and after the change.
    assert max(differences) < 1e-3
    scalars = CheckpointReader(rundir.newest_checkpoint(job.run) / "state", read_spec(imported / "model")).scalars
    assert {count for each in scalars.values() for count in each["steps"].values()} == {4}
    dynarl("export", str(job.run), "--to", str(tmp_path / "hf"))
    text, logits = answer(tmp_path / "hf")
    assert torch.isfinite(logits).all() and "Paris" in text
