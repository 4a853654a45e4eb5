"""Training on one device: gradients of micro-batches, for owners the optimizer step; and from one layout to the next.

Owners and borrowed workers hold the same model and the same flat gradient buffers. An owner has the optimizer state as
well; a borrowed worker's sums are added into an owner's buffers before the step (see reduction.py) and it keeps
nothing.

Gradients are those of a SUM over tokens and stay so until `step` divides once by the token count of the whole batch. No
result depends on the layout, other than by the order of additions.

To another layout, while the old one stays whole until the end::

    connect(layout)    groups, in the background, while training goes on; also ranks that will leave
    prepare()          model and optimizer without memory; False: this rank is not in the layout
    allocate(scalars)  memory; step counters and learning rate
                       ... tensors move (state.py, transport/) ...
    adopt()            the next shard trains from now on, the old one is freed
    discard()          or: the next one is forgotten
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dynarl.config.schema import Config
from dynarl.rl.losses import policy_loss, supervised_loss
from dynarl.roles.training import microbatch
from dynarl.roles.training.arch import Arch, read_arch
from dynarl.roles.training.connecting import Connecting
from dynarl.roles.training.groups import Groups, build_groups
from dynarl.roles.training.logprobs import entropy, token_logprobs
from dynarl.roles.training.megatron import clip_grad_by_total_norm_fp32, finalize_model_grads
from dynarl.roles.training.megatron_cpu import host_tensors
from dynarl.roles.training.model import DTYPES, hidden_states, picked_logits
from dynarl.roles.training.pipeline import gather_bytes, run_forward_backward
from dynarl.roles.training.shard import Shard
from dynarl.roles.training.state import Bound, State
from dynarl.roles.training.stats import STATS_BYTES, Stats, add_stats
from dynarl.roles.training.torch_world import World
from dynarl.transport.torch_p2p import execute
from dynarl.vps.layout import Layout
from dynarl.vps.plan import plan_for_rank
from dynarl.vps.train_layout import TrainLayout

# What a replica runs while another one of its lease has a micro-batch and it has none: one token, nothing to learn.
NOTHING = [{"sample": "", "prompt": bytes(4), "response": b"", "advantage": 0.0, "weight": 0.0}]


class NotFiniteError(FloatingPointError):
    """The gradient norm is infinite or not a number; the weights have been left as they were."""


class Trainer:
    """What a training worker has: a shard that trains, if any, and the next one. layout None: no shard yet."""

    def __init__(self, config: Config, model_dir: str, world: World, layout: TrainLayout | None, owner: bool):
        self.config, self.world, self.device = config, world, world.device
        arch = read_arch(model_dir)
        # State is kept in the type that is trained in, whatever the files have.
        self.arch: Arch = dataclasses.replace(arch, spec=dataclasses.replace(arch.spec, dtype=config.model.dtype))
        self._shard: Shard | None = None
        self.next: Shard | None = None
        self._connecting: Connecting | None = None
        self._asleep = self._has_sums = False
        self._kept_sums: list[Tensor] = []  # gradients, while asleep
        self.loss = "grpo"
        if layout is not None:
            self._shard = Shard(config, self.arch, build_groups(layout, world), self.device, owner)
            self.load(model_dir)
            self.begin("grpo")

    @property
    def shard(self) -> Shard:
        """The shard that trains. Raises RuntimeError where this worker has none."""
        if self._shard is None:
            raise RuntimeError(f"rank {self.world.rank} is in no layout yet")
        return self._shard

    @property
    def has_shard(self) -> bool:
        return self._shard is not None

    @property
    def awake(self) -> Shard:
        """The shard that trains, in memory. Raises RuntimeError while it sleeps: its memory belongs to another role."""
        self._check_awake()
        return self.shard

    def _check_awake(self) -> None:
        if self._asleep:
            raise RuntimeError(f"training rank {self.world.rank} sleeps; its node has to enter the training role first")

    @property
    def groups(self) -> Groups:
        return self.shard.groups

    @property
    def params(self) -> dict[str, Tensor]:
        return self.shard.params

    @property
    def optimizer(self) -> Any:
        return self.shard.optimizer

    @property
    def works_on_leases(self) -> bool:
        """Whether micro-batches are run lease by lease, with other ranks; else each is run for itself."""
        return self.groups.pp.size() > 1 or self.groups.replica[1] > 1

    # ---- to another layout

    def connect(self, name: str, source: TrainLayout, layout: TrainLayout) -> None:
        """Begin to build the groups of `layout`, and one over all ranks of both layouts, in the background.

        All ranks of both must be told. name: of this attempt, the same on all ranks and never used before.
        """
        self.discard()
        if self.world.rank in source.ranks:
            self.world.keep_among(source.ranks)  # whoever has left the trainer began anew
        draft = self.world.draft(name)
        self._connecting = Connecting(draft, source, layout.checked(self.arch.spec))

    def prepare(self, limit_s: float | None = None) -> int:
        """Once the groups are there, build the next shard. Returns the bytes that `allocate` will take.

        Raises RuntimeError for what went wrong in the background, TimeoutError if it still goes on.
        """
        if self._connecting is None:
            raise RuntimeError("connect has not been called")
        groups = self._connecting.wait(limit_s)
        if groups is None:
            return 0
        if self.next is None:
            self.next = Shard(self.config, self.arch, groups, self.device, owner=True, blank=True)
            self._allocated = False
        return self.next.num_bytes

    def transfer(self, kinds: Sequence[str], limit_s: float) -> int:
        """Move the state over torch's process groups, from the source to the next layout. Returns bytes received."""
        if self._connecting is None or self._connecting.both is None:
            raise RuntimeError("prepare has not been called, or this rank is in neither layout")
        source, layout = self._connecting.source, self._connecting.layout
        plan = plan_for_rank(self.arch.spec, source, layout, self.world.rank, kinds=kinds)
        positions = {rank: i for i, rank in enumerate(plan.ranks)}
        group, state = self._connecting.both, self.state()
        return execute(plan, state, self.world.rank, group, positions, self.device, limit_s=limit_s)

    def allocate(self, scalars: dict[str, Any]) -> None:
        """Give the next shard memory, and what moves beside the tensors: a source rank's `scalars()`.

        Raises RuntimeError where there is not enough memory.
        """
        if self.next is not None:
            self.next.allocate()
            bound = Bound(self.next)
            bound.clear_padding()
            bound.set_scalars(scalars)
            self._allocated = True

    def state(self) -> State:
        """The state of this rank, of the shard that trains as the source and the next one as the destination."""
        return State(self._source, self.next)

    @property
    def _source(self) -> Shard | None:
        """What this rank has of the layout that trains: nothing where it only lends gradients."""
        return self.awake if self._shard is not None and self._shard.owner else None

    def endpoint(self, source: Layout, destination: Layout) -> State:
        """The state of this rank for a plan from one layout to another. Either may be that of the shard that trains,
        that of the next one, or one in which this rank holds nothing."""

        def shard_of(layout: Layout) -> Shard | None:
            for shard in (self._source, self.next):
                if shard is not None and isinstance(layout, TrainLayout):
                    mine = shard.layout
                    if dataclasses.replace(layout, kinds=mine.kinds, shards=mine.shards) == mine:
                        return shard
            return None

        return State(shard_of(source), shard_of(destination))

    def parameters_arrived(self, kinds: Sequence[str] = ("param",)) -> None:
        """To be called once state has come into the shard that trains: masters that did not come follow parameters."""
        if self.optimizer is not None and "master" not in kinds:
            # With bfloat16 weights the optimizer steps on float32 copies of them.
            self.optimizer.reload_model_params()

    def scalars(self) -> dict[str, Any]:
        """What moves beside the tensors (see state.Bound.scalars)."""
        return Bound(self.awake).scalars()

    def digests(self) -> dict[str, dict[str, int]]:
        """Of the shard that trains ("source") and of the next one ("target"); see state.Bound.digests."""
        state = self.state()
        sides = {"source": state.source, "target": state.target}
        return {name: {} if side is None else side.digests() for name, side in sides.items()}

    def adopt(self) -> None:
        """Train with the next shard from now on (a rank without one has left) and free the old one."""
        if self._connecting is None or (self.next is not None and not self._allocated):
            raise RuntimeError("there is nothing to adopt: prepare and allocate have not both been called")
        self._connecting.draft.keep()
        old, self._shard, self.next, self._connecting = self._shard, self.next, None, None
        self._asleep = False
        if old is not None:
            old.free()
        if self._shard is not None:
            self.begin(self.loss)

    def discard(self) -> None:
        """Forget the next layout and its groups, except those that there were before."""
        if self._connecting is not None:
            self._connecting.draft.drop()
        if self.next is not None:
            self.next.free()
        self.next = self._connecting = None

    def close(self) -> None:
        """Give all memory back; nothing can be done with this trainer afterwards."""
        self.discard()
        if self._shard is not None:
            self._shard.free()
        self._shard = None

    # ---- weights

    def load(self, model_dir: str) -> None:
        """Take the weights of a Hugging Face directory."""
        self.awake.load(model_dir)

    # ---- training

    def begin(self, loss: str) -> None:
        """Start a batch: forget all gradients. loss: "grpo" or "sft"."""
        if loss not in ("grpo", "sft"):
            raise ValueError(f"loss {loss!r} is neither grpo nor sft")
        self.loss = loss
        self._has_sums, self._kept_sums = False, []
        if self._shard is not None and not self._asleep:
            self._shard.ddp.zero_grad_buffer()

    def gradient_buffers(self) -> list[Tensor]:
        """The flat float32 gradient sums, without the padding behind them: its size depends on the owners."""
        return [buffer.grad_data[: buffer.numel_unpadded] for buffer in self.awake.buffers]

    def train(self, batches: Sequence[Sequence[microbatch.Sample]]) -> list[Stats]:
        """Add the gradients of micro-batches. Returns sums over the tokens (see rl.losses), of each or of all together.

        Where this rank works on leases, all ranks of `groups.lease` must call with the same micro-batches.
        """
        self._check_awake()
        self._has_sums = True
        if not self.works_on_leases:
            return [self._train_alone(samples) for samples in batches]
        return [self._train_together(batches)]

    def _train_alone(self, samples: Sequence[microbatch.Sample]) -> Stats:
        batch = self._collate(samples)
        loss, stats = self._loss(samples, batch, hidden_states(self.shard.model, batch.tokens_BS))
        loss.backward()
        return stats

    def _train_together(self, batches: Sequence[Sequence[microbatch.Sample]]) -> Stats:
        mine, share = self.groups.replica
        # All replicas of a lease run as many micro-batches, for their tokens meet at the experts.
        dealt = [batches[at + mine] if at + mine < len(batches) else NOTHING for at in range(0, len(batches), share)]
        collated = [self._collate(samples) for samples in dealt]
        model, done = self.shard.model, []
        parts = self.groups.tp.size() if model.config.sequence_parallel else 1

        def forward(i: int, received: Tensor | None) -> Tensor:
            hidden = hidden_states(model, collated[i].tokens_BS, received)
            if not self.groups.is_last_stage:
                return hidden
            loss, stats = self._loss(dealt[i], collated[i], hidden)
            if dealt[i] is not NOTHING:
                done.append(stats)
            return loss

        shapes = [
            (batch.tokens_BS.shape[1] // parts, batch.tokens_BS.shape[0], model.config.hidden_size)
            for batch in collated
        ]
        like = torch.empty(0, dtype=DTYPES[self.config.model.dtype], device=self.device)
        run_forward_backward(self.groups.pp, shapes, forward, like)
        # The tensor-parallel ranks of a last stage have the same sums: one of them tells.
        told = done if self.groups.tp.rank() == 0 else []
        everyone = gather_bytes(self.groups.lease, json.dumps(add_stats(told)).encode(), STATS_BYTES, self.device)
        return add_stats([json.loads(data) for data in everyone])

    def _collate(self, samples: Sequence[microbatch.Sample]) -> microbatch.MicroBatch:
        parts = self.groups.tp.size() if self.shard.model.config.sequence_parallel else 1
        return microbatch.collate(samples, self.device, multiple_of=parts)

    def _loss(
        self, samples: Sequence[microbatch.Sample], batch: microbatch.MicroBatch, hidden_SBH: Tensor
    ) -> tuple[Tensor, Stats]:
        vocab, tp = self.shard.vocab, self.groups.tp
        logits_NV = picked_logits(self.shard.model, hidden_SBH, batch.picks_N)
        if self.loss == "grpo":
            logits_NV = logits_NV / self.config.algorithm.temperature
        logprobs_N = token_logprobs(logits_NV, batch.targets_N, vocab, tp)
        weight_N = microbatch.token_weights(batch, samples, self.device)
        if samples is NOTHING:
            return logprobs_N.sum(), {}
        if self.loss == "sft":
            loss, stats = supervised_loss(logprobs_N, weight_N)
        else:
            loss, stats = self._policy_loss(samples, batch, logprobs_N, weight_N)
            stats["entropy"] = (entropy(logits_NV, vocab, tp) * weight_N).sum()
        values = torch.stack([value.float() for value in stats.values()]).tolist()
        return loss, dict(zip(stats, values)) | {"samples": len(samples), "padded_tokens": batch.tokens_BS.numel()}

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
        ddp = self.awake.ddp
        with host_tensors():
            ddp.scale_gradients(1.0 / global_tokens)
            finalize_model_grads([ddp], None, pg_collection=self.groups.megatron)
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
        """Give the GPU's memory to another role: weights, optimizer state and gradient sums, where there are any, move
        to the host. On the CPU they stay where they are, out of reach all the same.

        With float32 weights the optimizer steps on views of them, so only they move.
        """
        if self._asleep:
            return
        if self.device.type == "cuda":
            self._kept_sums = [sums.cpu() for sums in self.gradient_buffers()] if self._has_sums else []
            for buffer in self.shard.buffers:
                buffer.offload_to_cpu()
            if self.optimizer is not None and self.config.model.dtype != "float32":
                self.optimizer.offload_to_cpu()
            torch.cuda.empty_cache()
        self._asleep = True

    def wake(self) -> None:
        """Undo `sleep`."""
        if not self._asleep:
            return
        self._asleep = False
        if self.device.type == "cuda":
            for buffer in self.shard.buffers:
                buffer.reload_from_cpu()  # gradients are zeros now
            if self.optimizer is not None and self.config.model.dtype != "float32":
                self.optimizer.restore_from_cpu()
            for sums, kept in zip(self.gradient_buffers(), self._kept_sums):
                sums.copy_(kept)
            self._kept_sums = []
        if not self._has_sums:  # `begin` may have come meanwhile
            self.shard.ddp.zero_grad_buffer()
