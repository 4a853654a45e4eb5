"""Training worker: one process per device of a training node, or of any node that lends itself to the trainer.

Life of a batch, the same for owners and borrowed workers up to the last line::

    begin -> train, train, ... (queued; one micro-batch between calls) -> drain -> reduce -> [owners] step

To another layout, between two batches. The old one is not touched until `adopt`, and `discard` leads back to it::

    prepare_layout    on all ranks of both layouts, at any time: groups are built while training goes on
    prepared          once all have answered that: waits for the groups, builds the model without memory      (vote)
    scalars           of any owner, after the step
    reserve           takes the memory, and those scalars                                                       (vote)
    transfer          moves the state over torch's groups; or the agents move it (transport/)
    digests           of both sides, to be compared as sums over all ranks                                      (vote)
    adopt | discard

Only owners hold optimizer state. Sums are reported per lease in the event "trained"; see rl.losses for their names.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from dynarl.config.schema import Config
from dynarl.roles.training import checkpoint, megatron_cpu, torch_world
from dynarl.roles.training.create import create_model
from dynarl.roles.training.groups import replica_layout
from dynarl.roles.training.leases import Lease, LeaseQueue
from dynarl.roles.training.reduction import tree_sum
from dynarl.roles.training.state import State
from dynarl.roles.training.stats import add_stats
from dynarl.roles.training.trainer import Trainer
from dynarl.roles.worker import Worker, main
from dynarl.transport.planning import RankPlan, Request, layout_of
from dynarl.transport.torch_p2p import LIMIT_S
from dynarl.transport.worker_side import TransitionSide
from dynarl.vps.digest import digest_weights
from dynarl.vps.layout import ALL_KINDS
from dynarl.vps.train_layout import TrainLayout


class TrainingWorker(TransitionSide, Worker):
    role = "training"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._trainer: Trainer | None = None
        self._store: Any = None
        self._reduction: Any = None
        self._queue = LeaseQueue(self._train, self._trained)
        self._saver: checkpoint.Saver | None = None

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
        layout: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Enter torch world `world` as `rank` and build the shard of this rank. All ranks of the layout must be called.

        layout: fields of a TrainLayout; without one, ranks 0..size-1 with the tensor-parallel size of the config.
        """
        settings, entered = self._enter(config, store, world, rank)
        cut = train_layout(layout) if layout else replica_layout(settings, size)
        self._trainer = Trainer(settings, model_dir, entered, cut, owner)
        return {"digest": digest_weights(model_dir), "parameters": sum(p.numel() for p in self.trainer.params.values())}

    def do_enter(self, config: dict[str, Any], store: str, world: str, rank: int, model_dir: str) -> None:
        """As `build`, without a shard: this worker will join a layout later. model_dir: any version of the model."""
        settings, entered = self._enter(config, store, world, rank)
        self._trainer = Trainer(settings, model_dir, entered, None, owner=True)

    def _enter(self, config: dict[str, Any], store: str, world: str, rank: int) -> tuple[Config, torch_world.World]:
        settings = msgspec.convert(config, Config)
        torch_world.use_interface(settings.cluster.interface)
        device = torch_world.compute_device(settings.cluster.device)
        self._close_saver()
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = None
        return settings, torch_world.World(
            torch_world.connect(store), world, rank, device, settings.failure.collective_s
        )

    # ---- to another layout

    def do_prepare_layout(self, name: str, source: dict[str, Any], layout: dict[str, Any]) -> None:
        """Begin to build the groups of `layout`. name: of this attempt, never used before."""
        self.trainer.connect(name, train_layout(source), train_layout(layout))

    def do_prepared(self, limit_s: float) -> dict[str, int]:
        """Bytes that `reserve` will take, and how many groups are kept."""
        return {"bytes": self.trainer.prepare(limit_s), "groups": self.trainer.world.num_groups}

    def do_scalars(self) -> dict[str, Any]:
        """Step counters and learning rate of an owner, for `reserve`."""
        return self.trainer.scalars()

    def do_reserve(self, scalars: dict[str, Any]) -> None:
        self.trainer.allocate(scalars)

    def do_transfer(self, limit_s: float = LIMIT_S) -> dict[str, int]:
        return {"bytes_received": self.trainer.transfer(ALL_KINDS, limit_s)}

    def do_digests(self) -> dict[str, dict[str, int]]:
        """{"source": ..., "target": ...}; see state.Bound.digests. A side that this rank has no part in is {}."""
        return self.trainer.digests()

    def do_adopt(self) -> None:
        """Train in the next layout. A worker that is not in it keeps its world, and no shard."""
        self._close_saver()
        self.trainer.adopt()

    def do_discard(self) -> None:
        self.trainer.discard()

    # ---- transitions that the agents carry out (transport.worker_side)

    def open_endpoint(self, request: Request, rank: int, plan: RankPlan) -> State:
        """Of this rank's shards, by the layouts. To another layout: between `reserve` and `adopt` or `discard`."""
        return self.trainer.endpoint(*request.layouts())

    def endpoint_done(self, request: Request, endpoint: State, committed: bool) -> None:
        """Parameters that came into the shard that trains count from here on; they are not undone."""
        if committed and endpoint.target is not None and endpoint.target.shard is not self.trainer.next:
            self.trainer.parameters_arrived(request.kinds)

    def do_verify_transition(self, key: str) -> dict[str, Any]:
        """As `digests`, where the trainer changes its layout; else {}: what is staged has a digest of its own."""
        recut = self._transition(key).request.destination["layout"] == "TrainLayout"
        return self.trainer.digests() if recut else {}

    # ---- gradients

    def do_join_reduction(self, store: str, name: str, rank: int, size: int) -> None:
        """Join the group over which gradients of borrowed workers travel. A former one is left."""
        self._reduction = None
        self._reduction = torch_world.standalone_group(
            self.trainer.world, torch_world.connect(store), name, rank, size
        )

    def do_load(self, model_dir: str, version: int) -> dict[str, str]:
        if self.trainer.has_shard:
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
        if not self.trainer.has_shard:
            return []
        return self._queue.drain(*self._how)

    def work(self) -> bool:
        if self._trainer is None or not self._trainer.has_shard:
            return False
        return self._queue.work(*self._how)

    @property
    def _how(self) -> tuple[int, torch.distributed.ProcessGroup, bool]:
        trainer = self.trainer
        return trainer.config.training.max_tokens_per_micro_batch, trainer.groups.lease, trainer.works_on_leases

    def do_reduce(self, members: list[list[int]]) -> None:
        """Sum the gradients of the list that holds this worker's reduction rank into the first of that list."""
        if self._reduction is None:
            raise RuntimeError("join_reduction has not been called")
        mine = [ranks for ranks in members if self._reduction.rank() in ranks]
        if len(mine) != 1:
            raise ValueError(f"reduction rank {self._reduction.rank()} is in {len(mine)} of the member lists {members}")
        tree_sum(self.trainer.gradient_buffers(), mine[0], self._reduction, self.trainer.shard.fingerprint)

    def do_step(self, global_tokens: float, lr: float) -> dict[str, float]:
        return {"grad_norm": self.trainer.step(global_tokens, lr), "lr": lr}

    def do_save(self, dir: str) -> None:
        """Copy the state of this owner and begin to write it; ask `saved` whether it is on disk."""
        if self._saver is None:
            self._saver = checkpoint.Saver(self.trainer.awake)
        self._saver.save(dir)

    def do_saved(self) -> bool:
        if self._saver is None:
            raise RuntimeError("nothing is being saved here")
        return self._saver.saved()

    def _close_saver(self) -> None:
        if self._saver is not None:
            self._saver.close()
        self._saver = None

    def do_restore(self, dir: str) -> None:
        checkpoint.restore(self.trainer.awake, dir)

    def do_sleep(self) -> None:
        """Release the device's memory while another role uses it. Gradient sums are kept."""
        if self._trainer is not None and self._trainer.has_shard:
            self.trainer.sleep()

    def do_wake(self) -> None:
        if self._trainer is not None and self._trainer.has_shard:
            self.trainer.wake()

    def _train(self, batches: list[list[dict[str, Any]]]) -> list[dict[str, float]]:
        return self.trainer.train(batches)

    def _trained(self, lease: Lease, results: list[dict[str, float]]) -> None:
        self.emit("trained", lease=lease, stats=add_stats(results))


def train_layout(fields: dict[str, Any]) -> TrainLayout:
    """A layout from a message: what transport.planning.describe makes of it, or some of its fields."""
    return layout_of({"layout": "TrainLayout"} | fields)


if __name__ == "__main__":
    megatron_cpu.leave_out_compiler()
    main(TrainingWorker)
