"""The process groups of one layout, given to Megatron explicitly. Its global `parallel_state` is not touched.

Every kind of group is a way of cutting the ranks of the layout into lists. A rank is in one list of each kind, and
lists that are equal, of whatever kind or layout, are one group (see torch_world.World). All ranks go through the kinds
in the same order, which is what lets members find each other without a word before.

Beside Megatron's kinds there is `lease`: the ranks that must work off the same samples. That is one replica, tp x pp
ranks; where experts are spread over several replicas, all of these, since each token may go to any of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import product

import torch.distributed as dist

from dynarl.config.degrees import vocab_multiple
from dynarl.config.schema import Config
from dynarl.roles.training.megatron import ProcessGroupCollection
from dynarl.roles.training.torch_world import Draft, World
from dynarl.vps.train_layout import TrainLayout

# The group kinds of Megatron that hold the same ranks, as long as there is no context parallelism and no
# rematerialisation of weights across ranks.
SAME = {
    "tp": ("tp_cp",),
    "dp": ("dp_cp", "intra_dp_cp", "dp_cp_gtp_remat"),
    "tp_ep_pp": ("tp_ep_pp_with_egtp_remat",),
    "expt_dp": ("intra_expt_dp", "expt_dp_gtp_remat"),
    "all": ("intra_dist_opt",),
    "alone": ("cp",),
}


@dataclass(frozen=True)
class Groups:
    """What a rank of a layout needs to know of the others."""

    layout: TrainLayout
    megatron: ProcessGroupCollection
    for_model: ProcessGroupCollection  # without the group that ties embeddings: building a model would wait for it
    lease: dist.ProcessGroup
    all: dist.ProcessGroup

    @property
    def tp(self) -> dist.ProcessGroup:
        return self.megatron.tp

    @property
    def pp(self) -> dist.ProcessGroup:
        return self.megatron.pp

    @property
    def is_first_stage(self) -> bool:
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    @property
    def replica(self) -> tuple[int, int]:
        """(number of this replica, of how many) among those that share a lease."""
        size = self.layout.replicas_per_lease
        return self.megatron.dp.rank() % size, size


def build_groups(layout: TrainLayout, world: World | Draft) -> Groups:
    """Groups of this rank, one of `layout.ranks`. All of these must call it; it returns when their groups are up."""
    if layout.cp > 1 or layout.vpp > 1 or not layout.zero1:
        raise ValueError(
            f"cp is {layout.cp}, vpp is {layout.vpp} and zero1 is {layout.zero1}; "
            "the trainer runs layouts with cp and vpp 1, and optimizers that are sharded"
        )
    made: dict[str, dist.ProcessGroup] = {}
    for kind, lists in rank_lists(layout).items():
        mine = next((ranks for ranks in lists if world.rank in ranks), None)
        if mine is not None:
            for name in (kind, *SAME.get(kind, ())):
                made[name] = world.group(mine)
    known = {field.name for field in fields(ProcessGroupCollection)}
    # A stage in the middle has no part in the tied embeddings: its group is that of itself alone.
    empty = dict(hcp=None, inter_dist_opt=None, embd=made["alone"], pos_embd=made["alone"])
    given = {name: value for name, value in (empty | made).items() if name in known}
    return Groups(
        layout,
        ProcessGroupCollection(**given),
        ProcessGroupCollection(**(given | {"embd": None})),
        made["lease"],
        made["all"],
    )


def rank_lists(layout: TrainLayout) -> dict[str, list[tuple[int, ...]]]:
    """The lists of ranks of each kind.

    >>> lists = rank_lists(TrainLayout(tp=2, pp=2, dp=2))
    >>> lists["tp"][:2], lists["pp"][:2], lists["lease"]
    ([(0, 1), (2, 3)], [(0, 4), (1, 5)], [(0, 1, 4, 5), (2, 3, 6, 7)])
    """
    tp, pp, dp, ep, etp, edp = layout.tp, layout.pp, layout.dp, layout.ep, layout.etp, layout.expert_dp
    together = layout.replicas_per_lease

    def dense(t: int, d: int, p: int) -> int:
        return layout.ranks[t + tp * (d + dp * p)]

    def expert(t: int, e: int, d: int, p: int) -> int:
        return layout.ranks[t + etp * (e + ep * (d + edp * p))]

    ts, ds, ps, ets, es, eds = map(range, (tp, dp, pp, etp, ep, edp))
    stages = [tuple(dense(t, d, p) for p in ps) for d, t in product(ds, ts)]
    return {
        "all": [layout.ranks],
        "alone": [(rank,) for rank in layout.ranks],
        "lease": [
            tuple(dense(t, first + d, p) for p, d, t in product(ps, range(together), ts))
            for first in range(0, dp, together)
        ],
        "tp": [tuple(dense(t, d, p) for t in ts) for p, d in product(ps, ds)],
        "dp": [tuple(dense(t, d, p) for d in ds) for p, t in product(ps, ts)],
        "pp": stages,
        "mp": [tuple(dense(t, d, p) for p, t in product(ps, ts)) for d in ds],
        "tp_dp_cp": [tuple(dense(t, d, p) for d, t in product(ds, ts)) for p in ps],
        "embd": [(ranks[0], ranks[-1]) if pp > 1 else ranks for ranks in stages],
        "pos_embd": [ranks[:1] for ranks in stages],
        "ep": [tuple(expert(t, e, d, p) for e in es) for p, d, t in product(ps, eds, ets)],
        "expt_tp": [tuple(expert(t, e, d, p) for t in ets) for p, d, e in product(ps, eds, es)],
        "tp_ep": [tuple(expert(t, e, d, p) for e, t in product(es, ets)) for p, d in product(ps, eds)],
        "tp_ep_pp": [tuple(expert(t, e, d, p) for p, e, t in product(ps, es, ets)) for d in eds],
        "expt_dp": [tuple(expert(t, e, d, p) for d in eds) for p, e, t in product(ps, es, ets)],
    }


def replica_layout(config: Config, size: int) -> TrainLayout:
    """Replicas of tensor-parallel ranks, as many as ranks 0..size-1 make. Raises ValueError if they do not divide."""
    tp = config.training.tp
    if size % tp:
        raise ValueError(f"{size} ranks do not divide into replicas of tensor-parallel size {tp}")
    return TrainLayout(tp=tp, dp=size // tp, vocab_divisible_by=vocab_multiple(config))
