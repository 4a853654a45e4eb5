"""How long training and inference take: a micro-batch in a stage, a pipeline of them, an optimizer step.

A stage's forward pass is the roofline of its products and its attention, plus what tensor and expert parallelism send.
Backward multiplies twice as much and sends as much; where activations are computed again, it is a forward pass longer.
Pipelines are not put into a formula: every pass of every micro-batch on every stage is given its time, in the order in
which Megatron-LM runs them, so bubbles come out of it, for even stages

    1F1B           (m + p - 1) (f + b)
    interleaved    (m + (p - 1) / v) (f + b)                 Narayanan et al., 2021, section 2.2

with m micro-batches, p stages, v virtual ones on each device. Gradients of a layer are reduced while those below are
computed; only what is left then is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from dynarl.errors import ConfigError
from dynarl.perf.device import Device
from dynarl.perf.model import ModelCost
from dynarl.perf.parallel import Link, Parallel

Schedule = Literal["1f1b", "interleaved"]

# Bytes of a parameter's gradient (summed in fp32), and those that ZeRO-1's Adam reads and writes for one: gradient,
# master and both moments in, master, both moments and the bf16 weight out.
GRADIENT_BYTES = 4
UPDATE_BYTES = 4 + 12 + 12 + 2
# Reductions of a layer and pass under tensor parallelism: after attention, after the feed-forward part. Each is a
# reduce-scatter and an all-gather.
REDUCTIONS = 2


class Passes(NamedTuple):
    """Seconds of one micro-batch in one stage."""

    forward_s: float
    backward_s: float


class StepSeconds(NamedTuple):
    """An optimizer step: the pipeline, the tail of the reduction of gradients, the update, the gathering of weights."""

    pipeline_s: float
    reduce_s: float
    update_s: float
    gather_s: float

    @property
    def total_s(self) -> float:
        return sum(self)


def _forward(
    device: Device, model: ModelCost, tokens: float, mean_context: float, parallel: Parallel
) -> tuple[float, float]:
    """(seconds of arithmetic, seconds of sending) of `tokens` through one stage, forward."""
    efficiency = device.efficiency
    products = 2 * model.active_params / (efficiency.training * device.flops)
    attention = model.flops_per_pair * mean_context / (efficiency.attention * device.flops)
    compute_s = tokens * (products + attention) / (parallel.tp * parallel.pp)
    layers, nbytes = model.layers / parallel.pp, tokens * model.hidden * model.dtype_bytes
    reduce_s = layers * REDUCTIONS * 2 * Link.among(device, parallel.tp).scatter_seconds(nbytes, parallel.tp)
    # There and back; each of the tensor-parallel ranks has its share of the tokens.
    routed = nbytes * model.experts_per_token / parallel.tp
    exchange_s = Link.among(device, parallel.tp * parallel.ep).scatter_seconds(routed, parallel.ep)
    return compute_s, reduce_s + 2 * model.moe_layers / parallel.pp * exchange_s


def microbatch_seconds(
    device: Device, model: ModelCost, tokens: float, mean_context: float, parallel: Parallel = Parallel(),
    recompute: bool = True,
) -> Passes:  # fmt: skip
    """Of `tokens` through one stage, each behind `mean_context` others of its sequence: (n - 1) / 2 for one of n.

    Stages are taken as even; the output layer counts as spread over them. recompute: activations are computed again on
    the way back.
    """
    compute_s, send_s = _forward(device, model, tokens, mean_context, parallel)
    again_s = compute_s + send_s if recompute else 0.0
    return Passes(compute_s + send_s, 2 * compute_s + send_s + again_s)


def inference_seconds(
    device: Device, model: ModelCost, tokens: float, mean_context: float, parallel: Parallel = Parallel()
) -> float:
    """Log-probabilities of `tokens` by one replica whose pipeline is full: one forward pass."""
    return sum(_forward(device, model, tokens, mean_context, parallel))


def iteration_seconds(
    device: Device, model: ModelCost, parallel: Parallel, microbatches: int, tokens: float, mean_context: float,
    recompute: bool = True,
) -> StepSeconds:  # fmt: skip
    """One optimizer step over `microbatches` of `tokens` on the busiest data-parallel rank. Raises ConfigError."""
    parallel.check(model, device)
    forward, backward = microbatch_seconds(device, model, tokens, mean_context, parallel, recompute)
    hop = Link.among(device, parallel.world).send_seconds(tokens * model.hidden * model.dtype_bytes / parallel.tp)
    schedule: Schedule = "interleaved" if parallel.vpp > 1 else "1f1b"
    pipeline = pipeline_makespan(
        schedule, parallel.pp, microbatches, forward, backward, hop if parallel.pp > 1 else 0.0, parallel.vpp
    )
    dense, expert = parallel.dense_params(model), parallel.expert_params(model)
    link, copies = Link.among(device, parallel.tp * parallel.dp), parallel.dp // parallel.ep

    def over_ranks(nbytes: float) -> float:
        """Reduce-scatter or all-gather of so many bytes per parameter."""
        return link.scatter_seconds(nbytes * dense, parallel.dp) + (
            link.scatter_seconds(nbytes * expert, copies) if expert else 0.0
        )

    owned = dense / parallel.dp + expert / copies
    return StepSeconds(
        pipeline,
        reduction_tail(backward, over_ranks(GRADIENT_BYTES), model.layers // parallel.pp),
        owned * UPDATE_BYTES / (device.efficiency.memory * device.memory_bytes_per_s),
        over_ranks(model.dtype_bytes),
    )


def reduction_tail(backward_s: float, reduce_s: float, buckets: int) -> float:
    """Seconds that gradients are still reduced for once the last backward pass is over.

    The pass yields `buckets` of equal size at equal distances; they are reduced one after the other. If one takes less
    than the next needs to be there, the tail is one bucket.

    >>> reduction_tail(1.0, 0.5, buckets=4), reduction_tail(1.0, 4.0, buckets=4)
    (0.125, 3.25)
    """
    done = 0.0
    for bucket in range(1, buckets + 1):
        done = max(done, backward_s * bucket / buckets) + reduce_s / buckets
    return max(0.0, done - backward_s)


def pipeline_makespan(
    schedule: Schedule,
    stages: int,
    microbatches: int,
    forward_s: float | Sequence[float],
    backward_s: float | Sequence[float],
    p2p_s: float = 0.0,
    vpp: int = 1,
) -> float:
    """Seconds from the first forward pass to the last backward pass, op by op.

    forward_s, backward_s: of one micro-batch in one stage (all of its virtual ones together); a sequence has one number
    for each micro-batch. p2p_s: from a stage to the next. Raises ConfigError where the schedule does not exist.
    """
    if schedule == "1f1b" and vpp != 1:
        raise ConfigError(f"1f1b has one virtual stage per device, not vpp={vpp}: use interleaved")
    if vpp > 1 and microbatches % stages:
        raise ConfigError(f"interleaved: {microbatches} micro-batches are no multiple of {stages} stages; take vpp=1")
    forward = _per_microbatch(forward_s, microbatches, vpp)
    backward = _per_microbatch(backward_s, microbatches, vpp)
    orders = [_order(stages, stage, microbatches, vpp) for stage in range(stages)]
    last = stages * vpp - 1
    # When the passes of (virtual stage, micro-batch) are over; forward, backward.
    over: tuple[dict[tuple[int, int], float], ...] = ({}, {})
    position, free = [0] * stages, [0.0] * stages
    waiting = list(range(stages))
    while waiting:
        stage = waiting.pop()
        while position[stage] < len(orders[stage]):
            back, chunk, microbatch = orders[stage][position[stage]]
            place = chunk * stages + stage
            if back:
                source = (0, place) if place == last else (1, place + 1)
            else:
                source = (0, place - 1)
            ready = 0.0 if source == (0, -1) else over[source[0]].get((source[1], microbatch))
            if ready is None:
                break
            if source[1] not in (-1, place):
                ready += p2p_s
            free[stage] = max(free[stage], ready) + (backward if back else forward)[microbatch]
            over[back][place, microbatch] = free[stage]
            position[stage] += 1
            neighbour = (stage + (-1 if back else 1)) % stages
            if neighbour != stage and neighbour not in waiting:
                waiting.append(neighbour)
    left = [stage for stage in range(stages) if position[stage] < len(orders[stage])]
    if left:
        raise AssertionError(f"{microbatches} micro-batches in {stages} stages are stuck at the stages {left}")
    return max(free)


def _per_microbatch(seconds: float | Sequence[float], microbatches: int, vpp: int) -> list[float]:
    each = [seconds] * microbatches if isinstance(seconds, (int, float)) else list(seconds)
    if len(each) != microbatches:
        raise ConfigError(f"{len(each)} times are given for {microbatches} micro-batches")
    if min(each, default=0.0) < 0 or not math.isfinite(sum(each)):
        raise ConfigError(f"times of micro-batches must be finite and not negative: {each[:4]}")
    return [one / vpp for one in each]


def _order(stages: int, stage: int, microbatches: int, vpp: int) -> list[tuple[bool, int, int]]:
    """(backward?, virtual stage of this device, micro-batch) in the order in which a device runs them.

    First as many forward passes as it takes until the first one comes back, then one of each in turn, then the rest.
    Interleaved, micro-batches go through a device in lots of `stages`, each lot through all of its virtual stages.
    """
    total = microbatches * vpp
    if vpp == 1:
        ahead = min(stages - stage - 1, total)
    else:
        ahead = min(2 * (stages - stage - 1) + (vpp - 1) * stages, total)

    def pass_of(index: int, back: bool) -> tuple[bool, int, int]:
        if vpp == 1:
            return back, 0, index
        lot, rest = divmod(index, stages * vpp)
        chunk, offset = divmod(rest, stages)
        return back, vpp - 1 - chunk if back else chunk, lot * stages + offset

    order = [pass_of(index, False) for index in range(ahead)]
    for index in range(total - ahead):
        order += [pass_of(ahead + index, False), pass_of(index, True)]
    return order + [pass_of(index, True) for index in range(total - ahead, total)]
