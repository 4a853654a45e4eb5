"""Training worker: one process per device of a training node, or of any node that lends itself to the trainer.

Life of a batch, the same for owners and borrowed workers up to the last line::

    begin -> train, train, ... (queued; one micro-batch between calls) -> drain -> reduce -> [owners] step, export

Only owners hold optimizer state. Sums are reported per lease in the event "trained"; see rl.losses for their names.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import torch

from dynarl.config.schema import Config
from dynarl.roles.training import checkpoint, megatron_cpu, torch_world
from dynarl.roles.training.create import create_model
from dynarl.roles.training.leases import Lease, LeaseQueue
from dynarl.roles.training.reduction import tree_sum
from dynarl.roles.training.trainer import Trainer
from dynarl.roles.worker import Worker, main
from dynarl.vps.digest import WEIGHTS_FILE, digest_weights


class TrainingWorker(Worker):
    role = "training"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._trainer: Trainer | None = None
        self._store: Any = None
        self._reduction: Any = None
        self._queue = LeaseQueue(self._train, self._trained)

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("build has not been called")
        return self._trainer

    def do_create_model(self, model_dir: str, model: dict[str, Any], tokenizer_dir: str, seed: int) -> dict[str, Any]:
        """Write a model with random weights; needs no `build`."""
        return create_model(model_dir, model, tokenizer_dir, seed)

    def do_serve_store(self, host: str | None = None) -> str:
        """Open the key-value store through which workers find each other; it lives as long as this process."""
        if self._store is None:
            # Torch worlds live on it, so a second call must not replace it.
            self._store, self._address = torch_world.serve_store(host)
        return self._address

    def do_build(
        self,
        config: dict[str, Any],
        store: str,
        world: str,
        rank: int,
        size: int,
        owner: bool,
        model_dir: str,
        version: int,
    ) -> dict[str, Any]:
        """Join torch world `world` and build the shard of this rank. All ranks of the world must be called together."""
        settings = msgspec.convert(config, Config)
        torch_world.use_interface(settings.cluster.interface)
        device = torch_world.compute_device(settings.cluster.device)
        self._trainer = None
        torch_world.enter_world(torch_world.connect(store), world, rank, size, device)
        self._trainer = Trainer(settings, model_dir, device, owner)
        return {"digest": digest_weights(model_dir), "parameters": sum(p.numel() for p in self.trainer.params.values())}

    def do_join_reduction(self, store: str, name: str, rank: int, size: int) -> None:
        """Join the group over which gradients of borrowed workers travel. A former one is left."""
        self._reduction = None
        self._reduction = torch_world.standalone_group(
            torch_world.connect(store), name, rank, size, self.trainer.device
        )

    def do_load(self, model_dir: str, version: int) -> dict[str, str]:
        self.trainer.load(model_dir)
        self.trainer.begin(self.trainer.loss)
        return {"digest": digest_weights(model_dir)}

    def do_begin(self, step: int, loss: str) -> None:
        self.trainer.begin(loss)

    def do_train(self, lease: Lease, samples: list[dict[str, Any]]) -> None:
        self._queue.add(lease, samples)

    def do_cancel(self, leases: list[Lease]) -> list[Lease]:
        """Give back leases not yet started; ask all workers of a replica and go by the answer of its first."""
        return self._queue.cancel(leases)

    def do_drain(self) -> list[Lease]:
        return self._queue.drain(self.trainer.config.training.max_tokens_per_micro_batch, self.trainer.groups.tp)

    def work(self) -> bool:
        if self._trainer is None:
            return False
        return self._queue.work(self.trainer.config.training.max_tokens_per_micro_batch, self.trainer.groups.tp)

    def do_reduce(self, members: list[list[int]]) -> None:
        """Sum the gradients of the list that holds this worker's reduction rank into the first of that list."""
        if self._reduction is None:
            raise RuntimeError("join_reduction has not been called")
        mine = [ranks for ranks in members if self._reduction.rank() in ranks]
        if len(mine) != 1:
            raise ValueError(f"reduction rank {self._reduction.rank()} is in {len(mine)} of the member lists {members}")
        tree_sum(self.trainer.gradient_buffers(), mine[0], self._reduction, self.trainer.layout)

    def do_step(self, global_tokens: float, lr: float) -> dict[str, float]:
        return {"grad_norm": self.trainer.step(global_tokens, lr), "lr": lr}

    def do_export(self, model_dir: str, version: int) -> dict[str, Any]:
        """Write the weights. Only the first owner has a digest to report."""
        self.trainer.export(model_dir)
        if torch.distributed.get_rank() != 0:
            return {"bytes": 0, "digest": None}
        return {"bytes": os.path.getsize(os.path.join(model_dir, WEIGHTS_FILE)), "digest": digest_weights(model_dir)}

    def do_save(self, dir: str) -> None:
        checkpoint.save(self.trainer, dir)

    def do_restore(self, dir: str) -> None:
        checkpoint.restore(self.trainer, dir)

    def do_sleep(self) -> None:
        """Release the device's memory while another role uses it; nothing to release on the CPU."""
        if self._trainer is not None:
            self.trainer.sleep()

    def do_wake(self) -> None:
        if self._trainer is not None:
            self.trainer.wake()

    def _train(self, samples: list[dict[str, Any]]) -> dict[str, float]:
        return self.trainer.train(samples)

    def _trained(self, lease: Lease, results: list[dict[str, float]]) -> None:
        self.emit("trained", lease=lease, stats=add_stats(results))


def add_stats(parts: list[dict[str, float]]) -> dict[str, float]:
    """Sum of statistics; names in _max take the maximum.

    >>> add_stats([{"tokens": 2.0, "x_max": 1.0}, {"tokens": 3.0, "x_max": 0.5}])
    {'tokens': 5.0, 'x_max': 1.0}
    """
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value
            else:
                total[name] = max(total[name], value) if name.endswith("_max") else total[name] + value
    return total


if __name__ == "__main__":
    megatron_cpu.leave_out_compiler()
    main(TrainingWorker)
