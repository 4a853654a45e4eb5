"""What a GPU and its links can do, by name: `configs/devices/<name>.yaml`, every constant with its source.

Peaks are what the vendor names; `efficiency` says what share of each real kernels reach.
"""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path

import msgspec

from dynarl.config import structs, text
from dynarl.errors import ConfigError


class Efficiency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of the peaks: products with weights, attention, training as a whole, reads of memory, links."""

    matmul: float = 0.6
    attention: float = 0.4
    training: float = 0.4
    memory: float = 0.8
    network: float = 0.8

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name):g} is a share of the peak, above 0 and at most 1")


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU of a node. intra: between GPUs of a node, inter: of other nodes; bytes/s per GPU and direction."""

    name: str
    flops: float  # dense bf16, per second
    memory_bytes: float
    memory_bytes_per_s: float
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    intra_latency_s: float
    inter_latency_s: float
    host_bytes_per_s: float  # between the GPU's memory and the host's: offload and onload
    devices_per_node: int = 8
    step_overhead_s: float = 1.5e-3  # of a decode step, neither arithmetic nor traffic: launches, sampling, scheduling
    reserved_bytes: float = 2.5e9  # of a process, but of no tensor: CUDA's context, NCCL's buffers, workspaces
    efficiency: Efficiency = Efficiency()

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, (int, float)) and value <= 0:
                raise ValueError(f"{name} = {value:g} must be above 0")


@functools.cache
def device_names() -> tuple[str, ...]:
    """Devices that come with dynarl."""
    return tuple(sorted(f.name.removesuffix(".yaml") for f in _folder().iterdir() if f.name.endswith(".yaml")))


@functools.cache
def load_device(name: str) -> Device:
    """A device by its name, or by the path of a file like those in configs/devices. Raises ConfigError."""
    if "/" in name or name.endswith(".yaml"):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"no device file {name}")
    elif name in device_names():
        path = _folder() / f"{name}.yaml"
    else:
        known = ", ".join(device_names())
        raise ConfigError(f"device {name!r}: there are {known}; or give the path of a file like theirs")
    return structs.convert(text.parse(path.read_text(encoding="utf-8"), str(path)), Device)


def _folder() -> resources.abc.Traversable:
    return resources.files("dynarl") / "share" / "configs" / "devices"
