"""What a role takes of a device's memory, part by part; who does not fit is told so with the arithmetic.

    training    bf16 weights + fp32 gradient sums + fp32 master and moments, cut over the replicas (ZeRO-1) +
                activations + logits and their gradient
    inference   bf16 weights + activations of the layer at work + logits
    rollout     bf16 weights + what is left of its share, for keys and values

Activations of a token: `ModelCost.activation_numbers` per layer where they are kept; where they are computed again only
the layer's input, and one layer in full. The first of p stages keeps them for min(p, m) micro-batches, with v virtual
stages for 1 + (p - 1) / (p v) times as many (Korthikanti et al., 2022, sections 4 and 5; with sequence parallelism
everything is cut by tp).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from dynarl.errors import ConfigError
from dynarl.perf.device import Device
from dynarl.perf.model import ModelCost
from dynarl.perf.parallel import Parallel
from dynarl.perf.rollout import kv_capacity_tokens
from dynarl.perf.training import GRADIENT_BYTES

# fp32 master weight and Adam's two moments.
OPTIMIZER_BYTES = 12
# Logits in fp32, and their gradient.
LOGIT_BYTES, LOGIT_GRADIENT_BYTES = 4, 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one device; of the stage that needs most."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    kv: float = 0.0
    reserved: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Those that are there, by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name)}

    def check(self, device: Device, what: str) -> None:
        """Raises ConfigError with all parts if it is more than the device has. what: "training of X at tp=2 ..."."""
        if self.total > device.memory_bytes:
            parts = " + ".join(f"{name} {size / 1e9:.1f}" for name, size in self.parts.items())
            raise ConfigError(
                f"{what} on {device.name}: {parts} = {self.total / 1e9:.1f} GB per device > "
                f"{device.memory_bytes / 1e9:.1f} GB: use a larger tp, pp or dp, or fewer tokens in a micro-batch"
            )


def training_memory(
    device: Device, model: ModelCost, parallel: Parallel, microbatch_tokens: int, microbatches: int = 1,
    recompute: bool = True,
) -> Memory:  # fmt: skip
    """Of training with micro-batches of `microbatch_tokens`. Raises ConfigError where it does not fit, or the degrees
    do not divide the model."""
    parallel.check(model, device)
    dense, expert = parallel.dense_params(model), parallel.expert_params(model)
    layers, tp = model.layers / parallel.pp, parallel.tp
    in_flight = min(parallel.pp, microbatches) * (
        1 + (parallel.pp - 1) / (parallel.pp * parallel.vpp) if parallel.vpp > 1 else 1
    )
    per_token = model.dtype_bytes / tp
    if recompute:
        activations = in_flight * layers * model.hidden + model.activation_numbers
    else:
        activations = in_flight * layers * model.activation_numbers
    memory = Memory(
        weights=(dense + expert) * model.dtype_bytes,
        gradients=(dense + expert) * GRADIENT_BYTES,
        optimizer=OPTIMIZER_BYTES * (dense / parallel.dp + expert / (parallel.dp // parallel.ep)),
        activations=microbatch_tokens * activations * per_token,
        logits=microbatch_tokens * model.vocab / tp * (LOGIT_BYTES + LOGIT_GRADIENT_BYTES),
        reserved=device.reserved_bytes,
    )
    memory.check(device, f"training of {model.name} at {parallel}")
    return memory


def inference_memory(device: Device, model: ModelCost, parallel: Parallel, microbatch_tokens: int) -> Memory:
    """Of log-probabilities. Raises ConfigError as `training_memory`."""
    parallel.check(model, device)
    params = parallel.dense_params(model) + parallel.expert_params(model)
    memory = Memory(
        weights=params * model.dtype_bytes,
        activations=microbatch_tokens * model.activation_numbers * model.dtype_bytes / parallel.tp,
        logits=microbatch_tokens * model.vocab / parallel.tp * LOGIT_BYTES,
        reserved=device.reserved_bytes,
    )
    memory.check(device, f"inference of {model.name} at {parallel}")
    return memory


def rollout_memory(device: Device, model: ModelCost, tp: int, fraction: float) -> Memory:
    """Of an engine that may use `fraction` of the memory for weights and KV. Raises ConfigError if it cannot."""
    tokens = kv_capacity_tokens(device, model, tp, fraction)
    memory = Memory(
        weights=model.weight_bytes / tp,
        kv=tokens * model.kv_bytes_per_token_per_device(tp),
        reserved=device.reserved_bytes,
    )
    memory.check(device, f"rollout of {model.name} at tp={tp} with {fraction:g} of the memory")
    return memory
