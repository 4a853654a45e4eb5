"""Ways to cut a model over the devices of a training or inference replica, with what they cost."""

from __future__ import annotations

from collections.abc import Iterator

from dynarl.errors import ConfigError
from dynarl.perf.device import Device
from dynarl.perf.model import ModelCost
from dynarl.scheduler.placement.passes import Replica

DEGREES = (1, 2, 4, 8, 16, 32)
# Bytes of a parameter: bf16 weight, fp32 gradient sum; fp32 master and two moments, cut over the replicas (ZeRO-1).
WEIGHT, GRADIENT, OPTIMIZER = 2, 4, 12
# Bytes that an update reads and writes of a parameter on the device that owns it.
UPDATED = 32
# Forward passes that training costs: forward, backward (two), and once more where activations are recomputed.
TRAINING_PASSES, RECOMPUTED = 3, 1
# Activations of a token in a layer, in bytes per unit of width: kept where they are recomputed, and of the layer at work
# (Korthikanti et al., 2022, eq. 4 without the attention matrix).
KEPT, AT_WORK = 2, 34
# Speed of work with experts against that of a dense layer: each one's share of a micro-batch is a small matrix, and tokens
# travel to it and back. Not measured: so chosen that a published crossover (docs/planning.md) lies where it was seen.
EXPERT_SPEED = 0.15
# Collectives of a layer and pass: after attention and after the feed-forward part.
REDUCTIONS = 2


def replicas(
    device: Device, model: ModelCost, context: float, microbatch_tokens: int, *, training: bool, most: int
) -> Iterator[Replica]:
    """All ways of up to `most` devices: tp within a node, pp that divides the layers, ep that divides nothing but whole
    replicas. context: tokens before a token on average.
    """
    for tp in DEGREES:
        if tp > device.devices_per_node:
            continue
        try:
            model.check_tensor_parallel(tp)
        except ConfigError:
            continue
        for pp in DEGREES:
            if model.layers % pp or tp * pp > most:
                continue
            for ep in DEGREES if model.expert_params else (1,):
                if tp * pp * ep <= most:
                    yield _replica(device, model, context, microbatch_tokens, tp, pp, ep, training)


def _replica(
    device: Device, model: ModelCost, context: float, tokens: int, tp: int, pp: int, ep: int, training: bool
) -> Replica:
    share = device.efficiency
    passes = TRAINING_PASSES + RECOMPUTED if training else 1
    network = share.network * device.inter_bytes_per_s
    experts = 2 * model.expert_params * model.expert_share  # operations of a token
    operations = model.flops_per_token(context) + experts * (1 / EXPERT_SPEED - 1)
    products_s = passes * operations / (tp * pp * share.training * device.flops)
    reduced = REDUCTIONS * model.layers / pp * 2 * (tp - 1) / tp * model.hidden * model.dtype_bytes
    reduce_s = passes * reduced / (share.network * device.intra_bytes_per_s)
    here = (model.num_params - model.expert_params) / (tp * pp) + model.expert_params / (tp * pp * ep)
    hop_bytes = tokens * model.hidden * model.dtype_bytes / tp
    activations = tokens * model.hidden / tp * (KEPT * model.layers / pp * pp + AT_WORK)

    def update_s(dp: int) -> float:
        """Ring reduce-scatter of fp32 sums and all-gather of bf16 weights; then memory traffic of the shard."""
        moved = here * (GRADIENT + WEIGHT) * (dp - 1) / dp
        return moved / network + here / dp * UPDATED / (share.memory * device.memory_bytes_per_s)

    def memory(dp: int) -> dict[str, float]:
        parts = {"weights": here * WEIGHT, "activations": activations if training else activations / model.layers}
        if training:
            parts |= {"gradients": here * GRADIENT, "optimizer": here * OPTIMIZER / dp}
        return parts

    hop_s = (hop_bytes / network + device.inter_latency_s) * (2 if training else 1) if pp > 1 else 0.0
    return Replica(tp, pp, ep, products_s + reduce_s, hop_s, update_s, memory)
