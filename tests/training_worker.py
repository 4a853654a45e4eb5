"""A training worker that tests can look into: it writes its weights, and can be told to spoil state that has just arrived."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from dynarl.roles.training import megatron_cpu
from dynarl.roles.training.state import Bound
from dynarl.roles.training.trainer import Trainer
from dynarl.roles.training.weights import local, write_weights
from dynarl.roles.training.worker import TrainingWorker
from dynarl.roles.worker import main
from dynarl.vps.digest import WEIGHTS_FILE, digest_weights
from dynarl.vps.train_layout import Part


class TestedTrainingWorker(TrainingWorker):
    def do_export(self, model_dir: str, version: int) -> dict[str, Any]:
        """Write the weights; all owners must be asked. Only the first one has a digest to report."""
        export(self.trainer, model_dir)
        if self.trainer.groups.all.rank() != 0:
            return {"bytes": 0, "digest": None}
        return {"bytes": os.path.getsize(os.path.join(model_dir, WEIGHTS_FILE)), "digest": digest_weights(model_dir)}

    @torch.no_grad()
    def do_spoil(self, fault: str) -> None:
        """permuted: two rows of a moment change places. halves: gate and up of a SwiGLU. step: a counter starts again.
        replica: one element of a norm, which other ranks have too, is another one."""
        shard = self.trainer.next
        bound = Bound(shard)
        if fault == "permuted":
            tensor = bound.spec.index["model.layers.0.mlp.down_proj.weight"]
            view = max((view for t, _, view, _ in bound.pieces("exp_avg") if t == tensor), key=len)
            view[[0, 1]] = view[[1, 0]]
        elif fault == "halves":
            weight = shard.params["decoder.layers.0.mlp.linear_fc1.weight"]
            weight.copy_(torch.cat(weight.chunk(2)[::-1]))
        elif fault == "replica":
            shard.params["decoder.layers.3.input_layernorm.weight"][3] += 1.0
        elif fault == "step":
            optimizer = shard.optimizers[0].optimizer
            optimizer.state[next(iter(optimizer.state))]["step"].zero_()
        else:
            raise ValueError(fault)


@torch.no_grad()
def export(trainer: Trainer, model_dir: str) -> None:
    """Gather the parameters of a layout at its first rank, piece by piece, and write them."""
    params, spec, group = trainer.params, trainer.arch.spec, trainer.groups.all
    mine, dtype = group.rank(), next(iter(params.values())).dtype
    tensors = {tensor.name: torch.empty(tensor.shape, dtype=dtype) for tensor in spec.tensors}
    for position, parameter, part in _once_each(trainer):
        cells = tensors[spec.tensors[part.tensor].name][tuple(slice(lo, hi) for lo, hi in part.box)]
        if position == mine:
            data = local(params[parameter].detach(), part).contiguous()
            if mine == 0:
                cells.copy_(data)
            else:
                group.send([data], 0, 0).wait()
        elif mine == 0:
            data = torch.empty(cells.shape, dtype=dtype)
            group.recv([data], position, 0).wait()
            cells.copy_(data)
    if mine == 0:
        write_weights(tensors, model_dir)


def _once_each(trainer: Trainer) -> Iterator[tuple[int, str, Part]]:
    """(position of a rank, its parameter, part) such that each box of the model is there once, rank by rank."""
    seen, layout = set(), trainer.shard.layout
    for position, rank in enumerate(layout.ranks):
        for placement in layout.placements(trainer.arch.spec, rank):
            for part in placement.parts:
                if (part.tensor, part.box) not in seen:
                    seen.add((part.tensor, part.box))
                    yield position, placement.parameter, part


if __name__ == "__main__":
    megatron_cpu.leave_out_compiler()
    main(TestedTrainingWorker)
