"""Drives training and inference worker processes through a recorded batch the way the controller does, for tests."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from pathlib import Path

import msgspec
from worker_harness import Handle, Harness

from dynarl import wire
from dynarl.config.schema import Algorithm, Config, Model, Training
from dynarl.vps.spec import ModelSpec
from dynarl.vps.train_layout import TrainLayout

NUM_STEPS = 10
SAMPLES_PER_STEP = 12
VOCAB = 48


def config(**training) -> Config:
    # adam_eps: the first steps of Adam are lr * sign(gradient) wherever |gradient| > eps. With the default 1e-8, which
    # is the size of the rounding errors of a mean gradient here, an element whose gradient happens to be near 0 takes a
    # step of random sign; one such element made tensors differ by up to 8e-6 of their norm. Typical elements are 1e-4
    # to 1e-2, far above 1e-6.
    return Config(
        model=Model(dtype="float32"),
        algorithm=Algorithm(kl_loss_coef=0.05),
        training=Training(**({"adam_eps": 1e-6, "weight_decay": 0.01, "max_tokens_per_micro_batch": 400} | training)),
    )


def recorded(seed: int = 7) -> list[list[dict]]:
    """NUM_STEPS batches of trajectories of very different lengths, without old log-probabilities."""
    draw = random.Random(seed)

    def ids(n: int) -> bytes:
        return wire.pack_ids([draw.randrange(VOCAB) for _ in range(n)])

    def sample(step: int, index: int) -> dict:
        length = draw.randint(1, 90)
        return dict(
            sample=wire.sample_id(step, index // 4, index % 4),
            prompt=ids(draw.randint(2, 12)),
            response=ids(length),
            rollout_logprobs=wire.pack_floats([-3.9] * length),
            advantage=draw.uniform(-1, 3),
            weight=float(index != 5),
        )

    return [[sample(step, index) for index in range(SAMPLES_PER_STEP)] for step in range(NUM_STEPS)]


def add_digests(parts) -> dict[str, int]:
    """The sums over ranks that are to be equal on both sides of a transition."""
    total: dict[str, int] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = (total.get(key, 0) + value) % 2**64
    return total


class Differs(AssertionError):
    """What has arrived is not what was sent, by kind."""

    def __init__(self, kinds: set[str]):
        super().__init__(f"digests differ: {', '.join(sorted(kinds))}")
        self.kinds = kinds


def score(harness: Harness, model_dir: str, batches: list[list[dict]]) -> None:
    """Fill in old and reference log-probabilities with an inference worker at tensor-parallel size 1."""
    worker = harness.start("dynarl.roles.inference.worker", "scorer")
    store = worker.call("serve_store", host="127.0.0.1")
    worker.call(
        "build",
        config=msgspec.to_builtins(config()),
        store=store,
        world="scorer",
        rank=0,
        size=1,
        model_dir=model_dir,
        version=0,
    )
    worker.call("ref_load", model_dir=model_dir)
    for lease, batch in enumerate(batches):
        worker.call("logprobs", lease=lease, samples=batch)
        scored = worker.wait_event("scored")
        for sample in batch:
            sample["old_logprobs"] = scored["logprobs"][sample["sample"]]
            sample["ref_logprobs"] = scored["ref_logprobs"][sample["sample"]]
    worker.call("stop")


def together(workers: list[Handle], method: str, each: list[dict] | None = None, **args) -> list:
    """Call all workers at the same time; `each` has arguments of their own."""
    posted = [(w, w.post(method, **args, **(each[i] if each else {}))) for i, w in enumerate(workers)]
    return [worker.reply(call, timeout_s=240.0) for worker, call in posted]


def layout(**degrees) -> TrainLayout:
    """A layout of the trainer with as little padding as there may be."""
    return TrainLayout(vocab_divisible_by=1, **degrees)


def fields(cut: TrainLayout) -> dict:
    """A layout as a worker is told."""
    return {field.name: getattr(cut, field.name) for field in dataclasses.fields(cut) if field.name != "shards"}


def lease_ranks(cut: TrainLayout) -> list[tuple[int, ...]]:
    """Ranks that do a lease together, first the one whose word counts."""
    from dynarl.roles.training.groups import rank_lists

    return rank_lists(cut)["lease"]


def save(workers: list[Handle], directory: str) -> None:
    """A checkpoint of the owners, on disk when this returns."""
    together(workers, "save", dir=directory)
    while not all(together(workers, "saved")):
        time.sleep(0.01)


class Fleet:
    """Owners in one layout; the other workers are borrowed replicas of the same tensor-parallel size, or spare ones.

    Worker i has rank i. cut: the owners' layout, and those that are not in it are spare; by default the first `owners`
    workers are owners in replicas of `tp`, and the others are borrowed. dtype: of the model.
    """

    generation = 0

    def __init__(
        self,
        workers: list[Handle],
        owners: int,
        model_dir: str,
        tp: int = 1,
        cut: TrainLayout | None = None,
        dtype: str = "float32",
        collective_s: float = 60.0,
        **training,
    ):
        Fleet.generation += 1
        self.everyone, self.borrowed = workers, [] if cut else workers[owners:]
        self.name, self.model_dir, self.tp, self.attempts = f"g{Fleet.generation}", model_dir, tp, 0
        self.config = config(tp=tp, **training)
        self.config.model.dtype, self.config.failure.collective_s = dtype, collective_s
        store = workers[0].call("serve_store", host="127.0.0.1")
        self._set_layout(cut or layout(tp=tp, dp=owners // tp))
        self.common = common = dict(config=msgspec.to_builtins(self.config), store=store, model_dir=model_dir)
        common["world"] = self.name
        each = [dict(rank=rank, layout=fields(self.cut)) for rank in self.cut.ranks]
        together(self.owners, "build", each, size=owners, owner=True, version=0, **common)
        firsts = [owners + i - i % tp for i in range(len(self.borrowed))]
        each = [
            dict(rank=owners + i, layout=fields(layout(tp=tp, ranks=tuple(range(first, first + tp)))))
            for i, first in enumerate(firsts)
        ]
        together(self.borrowed, "build", each, size=tp, owner=False, version=0, **common)
        spare = [rank for rank, worker in enumerate(workers) if worker not in self.active]
        self.enter(spare, self.name)
        if self.borrowed:
            each = [dict(rank=r) for r in range(len(workers))]
            together(workers, "join_reduction", each, store=store, name=f"{self.name}-r", size=len(workers))

    def enter(self, ranks: list[int], world: str) -> None:
        """These begin anew, without a shard."""
        workers = [self.everyone[rank] for rank in ranks]
        together(workers, "enter", [dict(rank=rank) for rank in ranks], **(self.common | {"world": world}))

    def _set_layout(self, cut: TrainLayout) -> None:
        self.cut = cut
        self.owners = [self.everyone[rank] for rank in cut.ranks]
        borrowed = [self.borrowed[i : i + self.tp] for i in range(0, len(self.borrowed), self.tp)]
        self.replicas = [[self.everyone[rank] for rank in ranks] for ranks in lease_ranks(cut)] + borrowed
        self.active = [worker for replica in self.replicas for worker in replica]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the model's tensors."""
        settings = json.loads((Path(self.model_dir) / "config.json").read_text())
        return {tensor.name: tensor.shape for tensor in ModelSpec.from_hf(settings).tensors}

    def recut(self, cut: TrainLayout, before_transfer=lambda: None, before_digests=lambda: None) -> dict:
        """Move to another layout, as the controller does, or raise Differs and stay in the old one.

        Returns digests of both sides and bytes received by rank.
        """
        ranks = sorted({*self.cut.ranks, *cut.ranks})
        workers = [self.everyone[rank] for rank in ranks]
        self.attempts += 1
        source, target = fields(self.cut), fields(cut)
        together(workers, "prepare_layout", name=f"{self.name}-try{self.attempts}", source=source, layout=target)
        together(workers, "prepared", limit_s=30.0)
        together(workers, "reserve", scalars=self.owners[0].call("scalars"))
        before_transfer()
        moved = together(workers, "transfer", limit_s=20.0)
        before_digests()
        digests = together(workers, "digests")
        source, target = (add_digests(each[side] for each in digests) for side in ("source", "target"))
        kinds = {key for key in source | target if source.get(key, 0) != target.get(key, 0)}
        if kinds:
            together(workers, "discard")
            raise Differs(kinds)
        together(workers, "adopt")
        self._set_layout(cut)
        received = {rank: each["bytes_received"] for rank, each in zip(ranks, moved)}
        return {"source": source, "target": target, "bytes": received}

    def step(
        self, index: int, leases: list[tuple[int, list[dict]]], model_dir: str, lr: float = 1e-3, loss: str = "grpo"
    ) -> dict[str, float]:
        """leases: (replica, samples). Returns summed statistics and gradient norm; new weights go to `model_dir`."""
        together(self.active, "begin", step=index, loss=loss)
        for lease, (replica, samples) in enumerate(leases):
            together(self.replicas[replica], "train", lease=lease, samples=samples)
        together(self.active, "drain")
        total: dict[str, float] = {}
        for replica in self.replicas:
            for event in replica[0].events("trained"):
                for key, value in event["stats"].items():
                    total[key] = total.get(key, 0.0) + value
        for worker in self.active:
            worker.events("trained")
        if self.borrowed:
            # One tree per tensor rank, all of them into the first replica.
            together(
                self.everyone, "reduce", members=[list(range(t, len(self.everyone), self.tp)) for t in range(self.tp)]
            )
        answers = together(self.owners, "step", global_tokens=total["tokens"], lr=lr)
        assert len({answer["grad_norm"] for answer in answers}) == 1
        digest = together(self.owners, "export", model_dir=model_dir, version=index + 1)[0]["digest"]
        loaded = together(self.borrowed, "load", model_dir=model_dir, version=index + 1)
        assert all(answer["digest"] == digest for answer in loaded)
        return total | {"grad_norm": answers[0]["grad_norm"]}

    def run(self, batches: list[list[dict]], deal, directory: Path) -> list[dict[str, float]]:
        """One optimizer step per batch; `deal(step, batch)` gives its leases."""
        return [self.step(i, deal(i, batch), str(directory / f"v{i + 1}")) for i, batch in enumerate(batches)]
