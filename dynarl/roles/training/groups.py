"""The process groups of one model, given to Megatron explicitly.

Ranks of a world are laid out tensor-parallel first: rank = tp_rank + tp * dp_rank. Pipeline, context and expert
parallelism are of size 1, so their groups hold one rank. Nothing here touches Megatron's global `parallel_state`.
"""

from __future__ import annotations

from dataclasses import fields

import torch.distributed as dist

from dynarl.roles.training.megatron import ProcessGroupCollection


def build_groups(tp: int) -> ProcessGroupCollection:
    """Groups of this rank in the current torch world. Every rank of the world must call it, with the same `tp`.

    Raises ValueError if the world does not divide into replicas of `tp` ranks.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % tp:
        raise ValueError(f"{world} training ranks do not divide into replicas of tensor-parallel size {tp}")
    replica = rank // tp
    made: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(world)): dist.group.WORLD}

    def group(ranks: list[int]) -> dist.ProcessGroup:
        key = tuple(ranks)
        if key not in made:
            made[key] = dist.new_group(ranks, use_local_synchronization=True)
        return made[key]

    everyone = dist.group.WORLD
    tensor = group(list(range(replica * tp, (replica + 1) * tp)))
    data = group(list(range(rank % tp, world, tp)))
    alone = group([rank])
    kinds = {
        "tp": tensor,
        "mp": tensor,
        "tp_cp": tensor,
        "tp_ep": tensor,
        "tp_ep_pp": tensor,
        "tp_ep_pp_with_egtp_remat": tensor,
        "expt_tp": tensor,
        "dp": data,
        "dp_cp": data,
        "intra_dp_cp": data,
        "dp_cp_gtp_remat": data,
        "expt_dp": data,
        "intra_expt_dp": data,
        "expt_dp_gtp_remat": data,
        "pp": alone,
        "cp": alone,
        "ep": alone,
        "embd": alone,
        "pos_embd": alone,
        "tp_dp_cp": everyone,
        "intra_dist_opt": everyone,
        "hcp": None,
        "inter_dist_opt": None,
    }
    known = {field.name for field in fields(ProcessGroupCollection)}
    return ProcessGroupCollection(**{name: value for name, value in kinds.items() if name in known})
