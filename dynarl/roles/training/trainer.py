"""One model replica's shard on one device: gradients of micro-batches, and for owners the optimizer.

Owners and borrowed workers hold the same model and the same flat gradient buffers. An owner has the optimizer state as
well; a borrowed worker's sums are added into an owner's buffers before the step (see reduction.py) and it keeps
nothing.

Gradients are those of a SUM over tokens and stay so until `step` divides once by the token count of the whole batch.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, Sequence

import torch
from torch import Tensor

from dynarl.config.schema import Config
from dynarl.rl.losses import policy_loss, supervised_loss
from dynarl.roles.training import microbatch, weights
from dynarl.roles.training.groups import build_groups
from dynarl.roles.training.logprobs import entropy, token_logprobs
from dynarl.roles.training.megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    OptimizerConfig,
    clip_grad_by_total_norm_fp32,
    finalize_model_grads,
    get_megatron_optimizer,
)
from dynarl.roles.training.megatron_cpu import host_tensors
from dynarl.roles.training.model import build_model, picked_logits, vocab_of


class NotFiniteError(FloatingPointError):
    """The gradient norm is infinite or not a number; the weights have been left as they were."""


class Trainer:
    """Built inside a torch world (see torch_world.enter_world), collectively by all its ranks."""

    def __init__(self, config: Config, model_dir: str, device: torch.device, owner: bool):
        self.config, self.device, self.owner = config, device, owner
        self.arch = weights.read_arch(model_dir)
        self.files = weights.small_files(model_dir)
        self.groups = build_groups(config.training.tp)
        self.vocab = vocab_of(self.arch, self.groups)
        model = build_model(self.arch, self.groups, config.model.dtype).to(device)
        with host_tensors():
            self.ddp = DistributedDataParallel(
                model.config,
                DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
                model,
                pg_collection=self.groups,
            )
        self.model = model
        self.params = weights.parameters_by_name(model)
        self.load(model_dir)
        self.optimizer = self._build_optimizer() if owner else None
        self.layout = zlib.crc32(repr([(name, tuple(p.shape)) for name, p in self.params.items()]).encode())
        self.begin("grpo")

    def _build_optimizer(self) -> Any:
        training, bf16 = self.config.training, self.config.model.dtype == "bfloat16"
        config = OptimizerConfig(
            optimizer="adam",
            lr=training.lr,
            weight_decay=training.weight_decay,
            adam_beta1=training.adam_beta1,
            adam_beta2=training.adam_beta2,
            adam_eps=training.adam_eps,
            clip_grad=training.clip_grad,
            use_distributed_optimizer=True,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
        )
        with host_tensors():
            return get_megatron_optimizer(config, [self.ddp], pg_collection=self.groups, use_gloo_process_groups=False)

    def load(self, model_dir: str) -> None:
        """Take the weights of a Hugging Face directory."""
        weights.load_shard(self.params, self.arch, model_dir, self.groups.tp.size(), self.groups.tp.rank())
        if getattr(self, "optimizer", None):
            # With bfloat16 weights the optimizer steps on float32 copies of them.
            self.optimizer.reload_model_params()

    def export(self, model_dir: str) -> None:
        """Write the Hugging Face directory. Replica 0 does it; the other owners have nothing to do."""
        if self.groups.dp.rank() == 0:
            weights.export(self.params, self.arch, self.files, model_dir, self.groups.tp)

    def begin(self, loss: str) -> None:
        """Start a batch: forget all gradients. loss: "grpo" or "sft"."""
        if loss not in ("grpo", "sft"):
            raise ValueError(f"loss {loss!r} is neither grpo nor sft")
        self.loss = loss
        self.ddp.zero_grad_buffer()

    def gradient_buffers(self) -> list[Tensor]:
        """The flat float32 gradient sums, without the padding behind them: its size depends on the owners."""
        return [buffer.grad_data[: buffer.numel_unpadded] for buffer in self.ddp.buffers]

    def train(self, samples: Sequence[microbatch.Sample]) -> dict[str, float]:
        """Add the gradients of one micro-batch. Returns sums over its tokens (see rl.losses)."""
        batch = microbatch.collate(samples, self.device)
        logits_NV = picked_logits(self.model, batch.tokens_BS, batch.picks_N)
        if self.loss == "grpo":
            logits_NV = logits_NV / self.config.algorithm.temperature
        logprobs_N = token_logprobs(logits_NV, batch.targets_N, self.vocab, self.groups.tp)
        weight_N = microbatch.per_sample(batch, [sample.get("weight", 1.0) for sample in samples], self.device)
        if self.loss == "sft":
            loss, stats = supervised_loss(logprobs_N, weight_N)
        else:
            loss, stats = self._policy_loss(samples, batch, logprobs_N, weight_N)
            stats["entropy"] = (entropy(logits_NV, self.vocab, self.groups.tp) * weight_N).sum()
        loss.backward()
        values = torch.stack([value.float() for value in stats.values()]).tolist()
        return dict(zip(stats, values)) | {"samples": len(samples), "padded_tokens": batch.tokens_BS.numel()}

    def _policy_loss(
        self, samples: Sequence[microbatch.Sample], batch: microbatch.MicroBatch, logprobs_N: Tensor, weight_N: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        algorithm = self.config.algorithm
        old_N = microbatch.per_token(samples, "old_logprobs", self.device)
        loss, stats = policy_loss(
            logprobs_N,
            old_N,
            microbatch.per_sample(batch, [sample["advantage"] for sample in samples], self.device),
            weight_N,
            clip_low=algorithm.clip_ratio_low,
            clip_high=algorithm.clip_ratio_high,
            ref_logprobs=microbatch.per_token(samples, "ref_logprobs", self.device) if algorithm.kl_loss_coef else None,
            kl_coef=algorithm.kl_loss_coef,
        )
        difference_N = (
            old_N.exp() - microbatch.per_token(samples, "rollout_logprobs", self.device).exp()
        ).abs() * weight_N
        stats["rollout_probs_diff"] = difference_N.sum()
        stats["rollout_probs_diff_max"] = difference_N.max() if len(difference_N) else difference_N.sum()
        return loss, stats

    def step(self, global_tokens: float, lr: float) -> float:
        """Divide by the token count, reduce over the owners, clip, update. Returns the gradient norm before clipping.

        global_tokens: tokens of the whole batch over all owners and borrowed workers, masked ones left out.
        Raises NotFiniteError, on every owner, before anything was changed.
        """
        if self.optimizer is None:
            raise RuntimeError("a borrowed trainer has no optimizer")
        if global_tokens <= 0:
            raise ValueError(f"a step over {global_tokens} tokens has no gradient")
        with host_tensors():
            self.ddp.scale_gradients(1.0 / global_tokens)
            finalize_model_grads([self.ddp], None, pg_collection=self.groups)
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            if not math.isfinite(norm):
                raise NotFiniteError(f"the gradient norm is {norm}; the optimizer step was not taken")
            if self.config.training.clip_grad:
                clip_grad_by_total_norm_fp32(self.optimizer.get_parameters(), self.config.training.clip_grad, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step_with_ready_grads()
        return norm

    def sleep(self) -> None:
        """Free the GPU's memory between two batches: weights and optimizer state move to the host, gradients are lost.

        Nothing to do on the CPU. With float32 weights the optimizer steps on views of them, so only they move.
        """
        if self.device.type == "cuda":
            for buffer in self.ddp.buffers:
                buffer.offload_to_cpu()
            if self.optimizer is not None and self.config.model.dtype != "float32":
                self.optimizer.offload_to_cpu()
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Undo `sleep`."""
        if self.device.type == "cuda":
            for buffer in self.ddp.buffers:
                buffer.reload_from_cpu()
            if self.optimizer is not None and self.config.model.dtype != "float32":
                self.optimizer.restore_from_cpu()
