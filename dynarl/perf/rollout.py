"""How long a rollout engine takes: a decode step, a prefill, and what its KV memory holds.

    step(b, K)     = fixed + max(read(b), compute * b) + per_request * b + per_kv_token * K
    prefill(n, P)  = fixed + max(read(n), compute * n) + prefill_token * n + prefill_pair * P

b requests that hold K tokens together; n tokens to prefill, which attend to P tokens before them (pairs). Reading the
weights and multiplying with them overlap, the rest does not. b is rounded up to the next captured CUDA graph.

Of a model with experts, a step reads those that some token chose: of a share 1 - (1 - k/E)^b of all.

Source of the forms: roofline (Williams et al., 2009) with the alpha-beta model of collectives; the constants are the
device's and the model's. A fit to a real engine gives `fixed_s`, `per_request_s` and `per_kv_token_s` alone.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from dynarl.errors import ConfigError
from dynarl.perf.device import Device, Efficiency
from dynarl.perf.model import ModelCost

# Batch sizes that engines capture by default: every eighth from 8 on. Larger batches run as they are.
GRAPH_BUCKETS = (1, 2, 4, *range(8, 257, 8))


@dataclass(frozen=True)
class StepModel:
    """Seconds of one decode step and of a prefill; see the top of the module.

    >>> model = StepModel(fixed_s=0.010, per_request_s=0.001, per_kv_token_s=1e-6)
    >>> round(model.seconds(batch=4, kv_tokens=2000), 4)
    0.016
    """

    fixed_s: float
    per_request_s: float
    per_kv_token_s: float
    graph_buckets: tuple[int, ...] = ()
    read_s: float = 0.0  # of the weights that every step reads
    compute_s: float = 0.0  # of one token's products with the weights
    expert_read_s: float = 0.0  # of all experts
    expert_share: float = 0.0  # of the experts that one token chooses
    prefill_token_s: float = 0.0  # beyond compute_s
    prefill_pair_s: float = 0.0

    @classmethod
    def of(cls, device: Device, model: ModelCost, tp: int = 1, efficiency: Efficiency | None = None) -> StepModel:
        """From roofline and alpha-beta, on `tp` devices with a fast link between them."""
        efficiency = efficiency or device.efficiency
        model.check_tensor_parallel(tp)
        memory = efficiency.memory * device.memory_bytes_per_s
        matmul = efficiency.matmul * device.flops
        # Two all-reduces a layer, in a ring: 2 (tp - 1) hops, and each device sends 2 (tp - 1) / tp of the bytes.
        hops = 2 * model.layers * 2 * (tp - 1) * device.intra_latency_s
        reduced_bytes = 2 * model.layers * 2 * (tp - 1) / tp * model.hidden * model.dtype_bytes
        link_s = reduced_bytes / (efficiency.network * device.intra_bytes_per_s)
        return cls(
            fixed_s=device.step_overhead_s + hops,
            per_request_s=link_s,
            per_kv_token_s=model.kv_bytes_per_token_per_device(tp) / memory,
            graph_buckets=GRAPH_BUCKETS,
            read_s=model.dense_weight_bytes / tp / memory,
            compute_s=model.flops_per_token(0) / tp / matmul,
            expert_read_s=model.expert_weight_bytes / tp / memory,
            expert_share=model.expert_share,
            prefill_token_s=link_s,
            prefill_pair_s=model.flops_per_pair / tp / (efficiency.attention * device.flops),
        )

    def scaled(self, factor: float) -> StepModel:
        """The same engine, `factor` times as slow in everything."""
        return StepModel(
            self.fixed_s * factor, self.per_request_s * factor, self.per_kv_token_s * factor, self.graph_buckets,
            self.read_s * factor, self.compute_s * factor, self.expert_read_s * factor, self.expert_share,
            self.prefill_token_s * factor, self.prefill_pair_s * factor,
        )  # fmt: skip

    def bucket(self, batch: int) -> int:
        """The size that a batch is padded to."""
        index = bisect_left(self.graph_buckets, batch)
        return self.graph_buckets[index] if index < len(self.graph_buckets) else batch

    def seconds(self, batch: int, kv_tokens: float) -> float:
        """Of one token for each of `batch` requests that hold `kv_tokens` together."""
        return self.batch_seconds(batch) + self.per_kv_token_s * kv_tokens

    def batch_seconds(self, batch: int) -> float:
        """The part of a step that does not depend on how long the requests are; 0 for no request."""
        if not batch:
            return 0.0
        padded = self.bucket(batch)
        return self.fixed_s + max(self._read(batch), self.compute_s * padded) + self.per_request_s * padded

    def prefill_batch_seconds(self, tokens: int, pairs: int) -> float:
        """Of several requests at once; pairs: tokens before each of theirs, summed over all `tokens`."""
        if not tokens:
            return 0.0
        products = max(self._read(tokens), self.compute_s * tokens)
        return self.fixed_s + products + self.prefill_token_s * tokens + self.prefill_pair_s * pairs

    def _read(self, tokens: int) -> float:
        return self.read_s + self.expert_read_s * touched_share(self.expert_share, tokens)


def touched_share(chosen_share: float, tokens: int) -> float:
    """Expected share of the experts that at least one of `tokens` chooses: 1 - (1 - chosen_share) ** tokens.

    By multiplication alone, not by the C library's pow: the last bit is then the same on every machine.

    >>> round(touched_share(8 / 128, 16), 3)
    0.644
    """
    base, left, missed = 1.0 - chosen_share, tokens, 1.0
    while left:
        if left & 1:
            missed *= base
        base, left = base * base, left >> 1
    return 1.0 - missed


def kv_capacity_tokens(device: Device, model: ModelCost, tp: int, fraction: float) -> int:
    """Tokens whose keys and values fit an engine of `tp` devices that may use `fraction` of their memory, weights too.

    Raises ConfigError with the arithmetic where nothing is left.
    """
    model.check_tensor_parallel(tp)
    usable = fraction * device.memory_bytes
    weights = model.weight_bytes / tp
    if usable <= weights:
        raise ConfigError(
            f"rollout of {model.name} on {device.name} at tp={tp}: weights {model.weight_bytes / 1e9:.1f} GB / {tp} = "
            f"{weights / 1e9:.1f} GB per device > {fraction:g} x {device.memory_bytes / 1e9:.1f} GB = "
            f"{usable / 1e9:.1f} GB: use a larger tp or a larger share of the memory"
        )
    return int((usable - weights) / model.kv_bytes_per_token_per_device(tp))
