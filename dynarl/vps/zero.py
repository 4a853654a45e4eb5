"""ZeRO-1: which flat interval of each parameter a data-parallel rank owns in Megatron's distributed optimizer.

Megatron-core 0.19.2 puts the parameters of a model chunk into one flat buffer (experts into a second one where they
have their own data-parallel group), last parameter first::

    | bucket 0                                       | bucket 1 ...
    | output_layer | pad | linear_fc2 | ... | pad    | embedding | pad |
    start of a parameter: multiple of 64       end of a bucket: multiple of lcm(shards, 128)

and cuts every bucket into as many equal shards as there are ranks. A shard knows nothing of parameters, so what a rank
owns of one is an interval of its elements, in the order in which they lie in memory.

(Rules: `DistributedOptimizer._compute_per_buffer_param_layout` and `optimizer/param_layout.py` of 0.19.2.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

PARAM_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128
BUSBW_ALIGNMENT = 2**16  # with pad_buckets_for_high_nccl_busbw


@dataclass(frozen=True, eq=False)
class FlatBuffer:
    """Where P parameters, given in registration order, lie in one flat buffer: int64 [P] each."""

    start: np.ndarray  # of the parameter
    numel: np.ndarray
    bucket: np.ndarray  # number of its bucket
    bucket_start: np.ndarray
    bucket_stop: np.ndarray  # padding included
    shards: int

    def owned(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """(lo, hi) of the elements of each parameter that one shard owns; lo == hi where it owns none."""
        size = (self.bucket_stop - self.bucket_start) // self.shards
        begin = self.bucket_start + shard * size - self.start
        lo = np.minimum(np.maximum(begin, 0), self.numel)
        return lo, np.maximum(np.minimum(begin + size, self.numel), lo)


def flat_buffer(
    numel: np.ndarray, own_bucket: np.ndarray, shards: int, bucket_size: int | None = None, busbw_padding: bool = False
) -> FlatBuffer:
    """Lay out parameters of `numel` elements.

    own_bucket: the word embedding and its tied copy, where the pipeline has more than one stage: each has a bucket of
    its own. bucket_size: elements after which a bucket is closed; None: no limit.
    """
    divisor = math.lcm(shards, BUCKET_ALIGNMENT, BUSBW_ALIGNMENT if busbw_padding else 1)
    count = len(numel)
    start, bucket = np.zeros(count, np.int64), np.zeros(count, np.int64)
    bounds = [0]
    padded = -(-numel // PARAM_ALIGNMENT) * PARAM_ALIGNMENT
    position = 0  # of the next parameter in reverse order
    while position < count:
        run = _run(numel[::-1][position:], padded[::-1][position:], own_bucket[::-1][position:], bucket_size)
        which = count - 1 - np.arange(position, position + run)
        offsets = np.concatenate([[0], np.cumsum(padded[which])])
        start[which] = bounds[-1] + offsets[:-1]
        bucket[which] = len(bounds) - 1
        end = bounds[-1] + offsets[-2] + numel[which[-1]]
        bounds.append(-(-end // divisor) * divisor)
        position += run
    edges = np.array(bounds, np.int64)
    return FlatBuffer(start, numel, bucket, edges[bucket], edges[bucket + 1], shards)


def _run(numel: np.ndarray, padded: np.ndarray, own_bucket: np.ndarray, bucket_size: int | None) -> int:
    """How many of these parameters the next bucket takes."""
    if own_bucket[0]:
        return 1
    run = int(np.argmax(own_bucket)) if own_bucket.any() else len(numel)
    if bucket_size is not None:
        filled = np.concatenate([[0], np.cumsum(padded[: run - 1])]) + numel[:run]
        full = np.nonzero(filled >= bucket_size)[0]
        if len(full):
            run = int(full[0]) + 1
    return run
