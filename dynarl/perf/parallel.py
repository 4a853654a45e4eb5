"""How a model is cut over devices, as far as costs depend on it, and what its collectives take."""

from __future__ import annotations

from dataclasses import dataclass

from dynarl.errors import ConfigError
from dynarl.perf.device import Device
from dynarl.perf.model import ModelCost


@dataclass(frozen=True)
class Parallel:
    """Degrees of tensor, pipeline, data and expert parallelism, and virtual stages per device; world = tp x pp x dp.

    Experts are cut over ep x tp of the ranks of a stage, and copied over the rest. Ranks are numbered with tp fastest,
    then dp, then pp, node by node.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    vpp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        more = [f"{name}={getattr(self, name)}" for name in ("ep", "vpp") if getattr(self, name) > 1]
        return " ".join([f"tp={self.tp} pp={self.pp} dp={self.dp}", *more])

    def check(self, model: ModelCost, device: Device) -> None:
        """Raises ConfigError where the degrees do not divide the model, or a tensor-parallel group leaves its node."""
        model.check_tensor_parallel(self.tp)
        stages, node = self.pp * self.vpp, device.devices_per_node
        faults = [
            (self.tp > node, f"tp={self.tp} is more than the {node} devices of a node"),
            (model.layers % stages, f"pp x vpp = {stages} does not divide {model.layers} layers"),
            (self.ep > 1 and not model.experts, f"ep={self.ep}, but the model has no experts"),
            (self.ep > 1 and model.experts % self.ep, f"ep={self.ep} does not divide {model.experts} experts"),
            (self.dp % self.ep, f"ep={self.ep} does not divide dp={self.dp}"),
        ]
        for found, text in faults:
            if found:
                raise ConfigError(f"{model.name} at {self}: {text}")

    def dense_params(self, model: ModelCost) -> float:
        """Of one device, experts not counted; the mean over the stages."""
        return (model.num_params - model.expert_params) / (self.tp * self.pp)

    def expert_params(self, model: ModelCost) -> float:
        """Of one device."""
        return model.expert_params / (self.tp * self.pp * self.ep)


@dataclass(frozen=True)
class Link:
    """One GPU's way to the next: seconds per message, and bytes/s that it really carries."""

    latency_s: float
    bytes_per_s: float

    @classmethod
    def among(cls, device: Device, span: int) -> Link:
        """Of ranks that lie within `span` neighbouring devices: the slowest link on their way counts."""
        share = device.efficiency.network
        if span <= device.devices_per_node:
            return cls(device.intra_latency_s, share * device.intra_bytes_per_s)
        return cls(device.inter_latency_s, share * device.inter_bytes_per_s)

    def send_seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.bytes_per_s

    def scatter_seconds(self, nbytes: float, ranks: int) -> float:
        """Reduce-scatter or all-gather of `nbytes` over a ring, or an all-to-all in which each rank has `nbytes`."""
        return (ranks - 1) * self.latency_s + (ranks - 1) / ranks * nbytes / self.bytes_per_s
