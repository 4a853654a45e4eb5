"""Inference worker: log-probabilities of finished answers, old and reference, under the trainer's numerics.

It runs the trainer's model and the trainer's forward pass without gradients. The ratio of the first optimizer step of a
batch is therefore 1 up to rounding, whatever the rollout engine's numerics are.
"""

from __future__ import annotations

from typing import Any, Sequence

import msgspec
import torch

from dynarl.config.schema import Config
from dynarl.roles.training import microbatch, torch_world, weights
from dynarl.roles.training.arch import read_arch
from dynarl.roles.training.groups import Groups, build_groups, replica_layout
from dynarl.roles.training.leases import Lease, LeaseQueue
from dynarl.roles.training.logprobs import token_logprobs
from dynarl.roles.training.model import build_model, hidden_states, picked_logits, vocab_of
from dynarl.roles.worker import Worker, main
from dynarl.vps.digest import digest_weights


class Scorer:
    """A frozen model of one replica's rank. Building one waits for nobody."""

    def __init__(self, config: Config, model_dir: str, groups: Groups, rank: int, device: torch.device):
        self.config, self.groups, self.rank, self.device = config, groups, rank, device
        self.arch = read_arch(model_dir)
        self.vocab = vocab_of(self.arch, groups)
        self.model = build_model(self.arch, groups, config.model.dtype).to(device).requires_grad_(False)
        self.load(model_dir)

    def load(self, model_dir: str) -> None:
        params = weights.parameters_by_name(self.model)
        weights.load_shard(params, self.arch.spec, self.groups.layout, self.rank, model_dir)

    def collate(self, samples: Sequence[microbatch.Sample]) -> microbatch.MicroBatch:
        parts = self.groups.tp.size() if self.model.config.sequence_parallel else 1
        return microbatch.collate(samples, self.device, multiple_of=parts)

    @torch.no_grad()
    def logprobs(self, batch: microbatch.MicroBatch) -> torch.Tensor:
        """Of each response token at the sampling temperature, [N] float32."""
        hidden_SBH = hidden_states(self.model, batch.tokens_BS)
        logits_NV = picked_logits(self.model, hidden_SBH, batch.picks_N) / self.config.algorithm.temperature
        return token_logprobs(logits_NV, batch.targets_N, self.vocab, self.groups.tp)


class InferenceWorker(Worker):
    role = "inference"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._policy: Scorer | None = None
        self._reference: Scorer | None = None
        self._store: Any = None
        self._queue = LeaseQueue(self._score, self._scored)

    @property
    def policy(self) -> Scorer:
        if self._policy is None:
            raise RuntimeError("build has not been called")
        return self._policy

    def do_serve_store(self, host: str | None = None) -> str:
        """Open the key-value store through which workers find each other; it lives as long as this process."""
        if self._store is None:
            # Torch worlds live on it, so a second call must not replace it.
            self._store, self._address = torch_world.serve_store(host)
        return self._address

    def do_build(
        self, config: dict[str, Any], store: str, world: str, rank: int, size: int, model_dir: str, version: int
    ) -> dict[str, str]:
        """Join torch world `world` and build the shard of this rank. All ranks of the world must be called together."""
        settings = msgspec.convert(config, Config)
        torch_world.use_interface(settings.cluster.interface)
        device = torch_world.compute_device(settings.cluster.device)
        self._policy = self._reference = None
        entered = torch_world.World(
            torch_world.connect(store), world, rank, device, settings.failure.collective_s
        )
        # The scorer's own cut, whatever the trainer's is: tensor-parallel replicas, which need nothing of each other.
        groups = build_groups(replica_layout(settings, size), entered)
        self._policy = Scorer(settings, model_dir, groups, rank, device)
        return {"digest": digest_weights(model_dir)}

    def do_load(self, model_dir: str, version: int) -> dict[str, str]:
        self.policy.load(model_dir)
        return {"digest": digest_weights(model_dir)}

    def do_ref_load(self, model_dir: str) -> None:
        """Keep the weights of `model_dir` as the reference; from now on its log-probabilities are reported too."""
        policy = self.policy
        self._reference = Scorer(policy.config, model_dir, policy.groups, policy.rank, policy.device)

    def do_logprobs(self, lease: Lease, samples: list[dict[str, Any]]) -> None:
        self._queue.add(lease, samples)

    def do_cancel(self, leases: list[Lease]) -> list[Lease]:
        """Give back leases not yet started; ask all workers of a replica and go by the answer of its first."""
        return self._queue.cancel(leases)

    def do_drain(self) -> list[Lease]:
        return self._queue.drain(self.policy.config.inference.max_tokens_per_micro_batch, self.policy.groups.tp)

    def work(self) -> bool:
        if self._policy is None:
            return False
        return self._queue.work(self.policy.config.inference.max_tokens_per_micro_batch, self.policy.groups.tp)

    def do_sleep(self) -> None:
        """Release the device's memory while another role uses it; nothing to release on the CPU."""
        self._move(torch.device("cpu"))

    def do_wake(self) -> None:
        if self._policy is not None:
            self._move(self._policy.device)

    def _move(self, device: torch.device) -> None:
        for scorer in (self._policy, self._reference):
            if scorer is not None and scorer.device.type == "cuda":
                scorer.model.to(device)

    def _score(self, batches: list[list[dict[str, Any]]]) -> list[tuple[dict[str, bytes], dict[str, bytes] | None]]:
        return [self._score_one(samples) for samples in batches]

    def _score_one(self, samples: list[dict[str, Any]]) -> tuple[dict[str, bytes], dict[str, bytes] | None]:
        batch = self.policy.collate(samples)
        policy = microbatch.split(self.policy.logprobs(batch), batch, samples)
        if self._reference is None:
            return policy, None
        return policy, microbatch.split(self._reference.logprobs(batch), batch, samples)

    def _scored(self, lease: Lease, results: list[tuple[dict[str, bytes], dict[str, bytes] | None]]) -> None:
        policy: dict[str, bytes] = {}
        reference: dict[str, bytes] = {}
        for one, other in results:
            policy.update(one)
            reference.update(other or {})
        self.emit("scored", lease=lease, logprobs=policy, ref_logprobs=reference or None)


if __name__ == "__main__":
    main(InferenceWorker)
