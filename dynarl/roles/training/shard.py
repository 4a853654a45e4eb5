"""One rank's share of a model under one layout: its stage and shard of the weights, flat buffers, and the optimizer.

A trainer has one that trains and, while it moves to another layout, the next one, which has memory only from the time
on when state is to come in. That memory is touched for the first time by the state itself: a page costs as much when it
is touched as when it is filled.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

from dynarl.config.schema import Config
from dynarl.roles.training import weights
from dynarl.roles.training.arch import Arch
from dynarl.roles.training.groups import Groups
from dynarl.roles.training.megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    OptimizerConfig,
    get_megatron_optimizer,
)
from dynarl.roles.training.megatron_cpu import host_tensors
from dynarl.roles.training.model import build_model, vocab_of
from dynarl.vps.train_layout import TrainLayout

Intervals = dict[tuple[int, str], tuple[int, int]]
MOMENTS = ("exp_avg", "exp_avg_sq")
# Smaller tensors may be numbers that count.
BLANK_ELEMENTS = 1 << 16
# Tensors that lie side by side begin on a cache line.
ALIGN_ELEMENTS = 16


class Shard:
    """Building one waits for nobody. owner: it has an optimizer; a shard without one only lends its gradients.

    blank: without memory until `allocate`.
    """

    def __init__(
        self, config: Config, arch: Arch, groups: Groups, device: torch.device, owner: bool, blank: bool = False
    ):
        self.config, self.arch, self.groups, self.device, self.owner = config, arch, groups, device, owner
        self.rank = groups.layout.ranks[groups.all.rank()]
        self.vocab = vocab_of(arch, groups)
        self.model = build_model(arch, groups, config.model.dtype).to(device)
        self._values = _NoValues() if blank else contextlib.nullcontext()
        with host_tensors(), self._values:
            self.ddp = DistributedDataParallel(
                self.model.config,
                DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
                self.model,
                pg_collection=groups.megatron,
            )
        self.params = weights.parameters_by_name(self.model)
        self.optimizer = self._build_optimizer() if owner else None
        self.fingerprint = zlib.crc32(repr([(name, tuple(p.shape)) for name, p in self.params.items()]).encode())
        if owner:
            self._check_shards()
        if blank:
            self.num_bytes = self._release()

    @property
    def layout(self) -> TrainLayout:
        return self.groups.layout

    @property
    def buffers(self) -> list[Any]:
        """Megatron's flat buffers: dense parameters, then experts where those have their own."""
        return [*self.ddp.buffers, *self.ddp.expert_parallel_buffers]

    @property
    def optimizers(self) -> list[Any]:
        """Megatron's optimizers, one for each kind of buffers."""
        if self.optimizer is None:
            raise RuntimeError("a borrowed trainer has no optimizer state")
        return [each for each in self.optimizer.chained_optimizers if not each.is_stub_optimizer]

    def load(self, model_dir: str) -> None:
        """Take the weights of a Hugging Face directory."""
        weights.load_shard(self.params, self.arch.spec, self.layout, self.rank, model_dir)
        if self.optimizer is not None:
            # With bfloat16 weights the optimizer steps on float32 copies of them.
            self.optimizer.reload_model_params()

    def intervals(self) -> Intervals:
        """{(chunk, parameter): (lo, hi)}: the flat elements that this rank's optimizer owns, from the live buffers."""
        names = {id(param): name for name, param in self.params.items()}
        found: Intervals = {}
        for optimizer in self.optimizers:
            for param in optimizer.model_param_gbuf_map:
                span = optimizer._get_model_param_range_map(param)["param"]
                if span.end > span.start:
                    found[0, names[id(param)]] = (span.start, span.end)
        return found

    def allocate(self) -> None:
        """Give a blank shard memory. Nothing is written to it: state is to come in, and gradients are zeroed by whoever
        begins a batch."""
        for storage, num_bytes in self._released:
            storage.resize_(num_bytes)
        self._released = []
        for optimizer in self.optimizers if self.owner else ():
            copies = [main for group in optimizer.shard_fp32_from_float16_groups for main in group]
            for main, place in zip(copies, _side_by_side(copies)):
                main.data = place
            mains = copies + [main for group in optimizer.shard_fp32_groups for main in group]
            for kind in MOMENTS:
                for main, place in zip(mains, _side_by_side(mains)):
                    optimizer.optimizer.state[main][kind] = place

    def _release(self) -> int:
        """Give the memory of weights, gradients and masters back; the tensors stay what they are. Returns the bytes
        that `allocate` will take."""
        self._released = _storages([t for buffer in self.buffers for t in (buffer.param_data, buffer.grad_data)])
        masters = _storages(self._masters())
        for storage, _ in self._released + masters:
            storage.resize_(0)
        moments = 2 * 4 * sum(stop - start for start, stop in self.intervals().values()) if self.owner else 0
        return sum(num_bytes for _, num_bytes in self._released + masters) + moments

    def free(self) -> None:
        """Give all memory back for good. Megatron's objects refer to each other in circles: what nobody names any more
        would stay until Python happens to look for those."""
        self._release()
        if self.optimizer is not None:
            for optimizer in self.optimizers:
                optimizer.optimizer.state.clear()

    def _large(self) -> Iterator[Tensor]:
        for buffer in self.buffers:
            yield from (tensor for tensor in (buffer.param_data, buffer.grad_data) if tensor is not None)
        yield from self._masters()

    def _masters(self) -> Iterator[Tensor]:
        """Those that are copies of parameters, not parts of them."""
        for optimizer in self.optimizers if self.owner else ():
            for group in optimizer.shard_fp32_from_float16_groups:
                yield from group

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
        # Megatron asks all ranks of the default group which kinds of parameters they have. Every stage has all of them.
        with host_tensors(), self._values, _default_group(self.groups.megatron.cp):
            return get_megatron_optimizer(
                config, [self.ddp], pg_collection=self.groups.megatron, use_gloo_process_groups=False
            )

    def _check_shards(self) -> None:
        live, formula = self.intervals(), self.layout.shard_intervals(self.arch.spec, self.rank)
        if live != formula:
            name = next(n for n in sorted(live.keys() | formula.keys()) if live.get(n) != formula.get(n))
            raise RuntimeError(
                f"the optimizer owns {live.get(name)} of {name[1]}, its layout says {formula.get(name)}; "
                "Megatron's buffers are not those that this version of dynarl knows"
            )


class _NoValues(TorchFunctionMode):
    """While entered, large tensors are made as memory that nobody touches, and what is copied to them is not."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros:
            tensor = torch.empty(*args, **kwargs)
            return tensor if tensor.numel() >= BLANK_ELEMENTS else tensor.zero_()
        if func in (Tensor.copy_, Tensor.clone, Tensor.float) and args[0].numel() >= BLANK_ELEMENTS:
            if func is Tensor.copy_:
                return args[0]
            return torch.empty_like(args[0], dtype=torch.float32 if func is Tensor.float else None)
        return func(*args, **kwargs)


def _side_by_side(like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors like these, without values, in one block: the system gives large blocks large pages."""
    sizes = [-(-tensor.numel() // ALIGN_ELEMENTS) * ALIGN_ELEMENTS for tensor in like]
    if not like:
        return []
    block = like[0].new_empty(sum(sizes))
    return [part[: tensor.numel()].view_as(tensor) for part, tensor in zip(block.split(sizes), like)]


def _storages(tensors: Iterable[Tensor | None]) -> list[tuple[torch.UntypedStorage, int]]:
    """Each storage of the tensors once, with its size in bytes."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor is not None and tensor.untyped_storage().nbytes():
            found.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
    return [(storage, storage.nbytes()) for storage in found.values()]


@contextlib.contextmanager
def _default_group(group: dist.ProcessGroup) -> Iterator[None]:
    before = c10d._get_default_group()
    c10d._update_default_pg(group)
    try:
        yield
    finally:
        c10d._update_default_pg(before)
