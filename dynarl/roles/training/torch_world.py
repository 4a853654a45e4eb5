"""Joining and leaving torch worlds through a key-value store, and the device that a worker computes on."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

# Longer than any wait between two ranks of a healthy step, short enough that a lost peer is noticed.
TIMEOUT = timedelta(minutes=10)


def compute_device(kind: str) -> torch.device:
    """`kind`: "cpu" or "cuda". The agent shows each worker one GPU only. Raises RuntimeError if there is none."""
    if kind == "cpu":
        if torch.cuda.is_available():
            raise RuntimeError(
                "cluster.device is cpu but this worker sees a GPU, and Megatron would use it; "
                "start the worker with an empty CUDA_VISIBLE_DEVICES"
            )
        # Several workers share a node: a thread pool in each would only add switches.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("cluster.device is cuda but this worker sees no GPU; check CUDA_VISIBLE_DEVICES in its log")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def serve_store(host: str | None = None) -> tuple[dist.TCPStore, str]:
    """Open a key-value store on a free port. Returns it, which keeps it open, and its address, "host:port"."""
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    return store, f"{host or os.environ.get('DYNARL_HOST') or socket.gethostname()}:{store.port}"


def connect(address: str) -> dist.TCPStore:
    """A client of the store at "host:port"."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"store address {address!r} is not HOST:PORT")
    return dist.TCPStore(host, int(port), is_master=False, timeout=TIMEOUT)


def enter_world(store: dist.Store, name: str, rank: int, size: int, device: torch.device) -> None:
    """Make `name` the torch world of this process. A world joined earlier is left first."""
    leave_world()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore(name, store), rank=rank, world_size=size, timeout=TIMEOUT)


def leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def standalone_group(store: dist.Store, name: str, rank: int, size: int, device: torch.device) -> dist.ProcessGroup:
    """A process group outside the torch world: its members may belong to different worlds, or change theirs."""
    prefixed = dist.PrefixStore(name, store)
    if device.type == "cuda":
        return dist.ProcessGroupNCCL(prefixed, rank, size, TIMEOUT)
    return dist.ProcessGroupGloo(prefixed, rank, size, TIMEOUT)


def use_interface(name: str | None) -> None:
    """Make collectives use network interface `name`; None leaves the choice to how the host's name resolves."""
    if name:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
