"""A training worker that can be told to spoil the state that has just arrived, for tests of what would notice."""

from __future__ import annotations

import torch

from dynarl.roles.training import megatron_cpu
from dynarl.roles.training.state import Bound
from dynarl.roles.training.worker import TrainingWorker
from dynarl.roles.worker import main


class FaultyTrainingWorker(TrainingWorker):
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


if __name__ == "__main__":
    megatron_cpu.leave_out_compiler()
    main(FaultyTrainingWorker)
