"""Ways to cut a model over the devices of a training or inference replica, with what they cost.

Forms of times and memory: dynarl/perf/training.py, dynarl/perf/memory.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from dynarl.errors import ConfigError
from dynarl.perf.device import Device
from dynarl.perf.memory import inference_memory, training_memory
from dynarl.perf.model import ModelCost
from dynarl.perf.parallel import Link, Parallel
from dynarl.perf.training import inference_seconds, iteration_seconds, microbatch_seconds
from dynarl.scheduler.placement.passes import Replica

DEGREES = (1, 2, 4, 8, 16, 32)
# Speed of products with experts against those of a dense layer: each one's share of a micro-batch is a small matrix, and
# the fullest expert sets the pace. Not measured: so chosen that a published crossover lies where it was seen
# (docs/planning.md).
EXPERT_SPEED = 0.12


def replicas(
    device: Device, model: ModelCost, context: float, tokens: int, *, training: bool, most: int
) -> Iterator[Replica]:
    """All ways of up to `most` devices, with micro-batches of `tokens`. context: tokens before a token on average."""
    for tp in DEGREES:
        for pp in DEGREES:
            for ep in DEGREES if model.experts else (1,):
                parallel = Parallel(tp, pp, ep, ep)
                if parallel.world > most:
                    continue
                try:
                    parallel.check(model, device)
                except ConfigError:
                    continue
                yield _replica(device, model, context, tokens, parallel, training)


def _replica(
    device: Device, model: ModelCost, context: float, tokens: int, parallel: Parallel, training: bool
) -> Replica:
    cost = device, model, tokens, context, parallel
    stage_s = sum(microbatch_seconds(*cost)) if training else inference_seconds(*cost)
    passes = 4 if training else 1
    experts = 2 * model.expert_params * model.expert_share / (parallel.tp * parallel.pp)  # operations of a token
    slowed_s = passes * experts * (1 / EXPERT_SPEED - 1) / (device.efficiency.training * device.flops)
    hop_s = 0.0
    if parallel.pp > 1:
        hop_bytes = tokens * model.hidden * model.dtype_bytes / parallel.tp
        hop_s = Link.among(device, 2 * parallel.tp).send_seconds(hop_bytes) * (2 if training else 1)
    # Whether it fits is judged with what else is on the device, not here.
    boundless = msgspec.structs.replace(device, memory_bytes=math.inf)

    def with_replicas(dp: int) -> Parallel:
        return Parallel(parallel.tp, parallel.pp, dp, parallel.ep)

    def update_s(dp: int) -> float:
        step = iteration_seconds(device, model, with_replicas(dp), 1, tokens, context)
        return step.total_s - step.pipeline_s

    def memory(dp: int) -> dict[str, float]:
        if training:
            return training_memory(boundless, model, with_replicas(dp), tokens, parallel.pp).parts
        return inference_memory(boundless, model, with_replicas(dp), tokens).parts

    return Replica(parallel.tp, parallel.pp, parallel.ep, stage_s / tokens + slowed_s, hop_s, update_s, memory)
