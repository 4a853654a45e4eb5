"""The torch processes of a job: who is who, the process groups among them, and the device that a worker computes on.

A worker has a fixed rank among all workers that may ever train. Process groups are made of any of these ranks, by their
members alone, and kept: a later layout that wants the same ranks together gets the group that is there. So layouts come
and go, on more ranks or fewer, and no process leaves its world for that.

torch needs a default group, to name ranks by. Here it has a rank and no connections: a collective that was given no
group fails at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# Of whoever looks for a rank that is still starting.
STORE_TIMEOUT = timedelta(minutes=10)

GroupKey = tuple[tuple[int, ...], str]  # ranks in order, backend

# Size of the default group: more than there will be ranks, since nobody knows how many will come.
NUM_NAMES = 1 << 20


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
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
    return store, f"{host or os.environ.get('DYNARL_HOST') or socket.gethostname()}:{store.port}"


def connect(address: str) -> dist.TCPStore:
    """A client of the store at "host:port"."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"store address {address!r} is not HOST:PORT")
    return dist.TCPStore(host, int(port), is_master=False, timeout=STORE_TIMEOUT)


class World:
    """This process as rank `rank`, and its groups. One per process: making another one ends the former.

    timeout_s: longer than any wait between two ranks of a healthy step, short enough that a lost peer is noticed.

    `name` is that of a generation: a process that took the place of a dead one can only be found under a new name, so
    all members of its groups enter a world of another name. Members of a group must ask for it in the same order as for
    the other groups that they share.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, device: torch.device, timeout_s: float):
        self.timeout = timedelta(seconds=timeout_s)
        self.store, self.name, self.rank, self.device = store, name, rank, device
        self._kept: dict[GroupKey, dist.ProcessGroup] = {}
        leave_world()
        _name_ranks(rank)

    @property
    def num_groups(self) -> int:
        """Groups that are kept, for whoever counts their memory."""
        return len(self._kept)

    def group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The group of `ranks`, this one among them, numbered in that order. Made at the first call, by all members."""
        key = self.key(ranks)
        if key not in self._kept:
            self._kept[key] = self.new_group(key, self.store, self.name)
        return self._kept[key]

    def draft(self, name: str) -> Draft:
        """Groups of a layout that may never come to be. All its ranks must give the same name, a new one each time."""
        # A client of the store serves one call at a time, and here one may wait long for a rank that never comes.
        return Draft(self, name, self.store.clone())

    def keep_among(self, ranks: Sequence[int]) -> None:
        """End every group in which there are other ranks than these: they may have entered another world since."""
        for key in [key for key in self._kept if not set(key[0]) <= set(ranks)]:
            dist.destroy_process_group(self._kept.pop(key))

    def key(self, ranks: Sequence[int]) -> GroupKey:
        return tuple(ranks), "nccl" if self.device.type == "cuda" else "gloo"

    def new_group(self, key: GroupKey, store: dist.Store, name: str) -> dist.ProcessGroup:
        """torch.distributed.new_group, for members alone and whatever world they entered when."""
        ranks, backend = key
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(self.rank),
            list(ranks),
            backend,
            dist.PrefixStore(name, store),
            c10d.GroupName(f"{name}/{','.join(map(str, ranks))}"),
            timeout=self.timeout,
        )
        c10d._world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(ranks)}
        if backend == "nccl" and len(ranks) > 1:
            # NCCL connects at the first collective, which is dear; let it be this one.
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        return group


class Draft:
    """Groups that a world has, and new ones that it will have once they are kept. May be filled by a thread."""

    def __init__(self, world: World, name: str, store: dist.Store):
        self.rank, self._world, self._name, self._store = world.rank, world, name, store
        self._new: dict[GroupKey, dist.ProcessGroup] = {}
        self._dropped = False

    def group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """As World.group."""
        key = self._world.key(ranks)
        kept = self._world._kept.get(key) or self._new.get(key)
        if kept is None:
            if not self._new and self._store.add(f"{self._name}/rank {self.rank}", 1) > 1:
                # Members would find what others left in the store the last time, and wait for them.
                raise ValueError(f"{self._name} has been used before; every attempt needs a name of its own")
            kept = self._world.new_group(key, self._store, self._name)
            if self._dropped:
                dist.destroy_process_group(kept)
                raise RuntimeError(f"the groups of {self._name} are not wanted any more")
            self._new[key] = kept
        return kept

    def keep(self) -> None:
        """The world has these groups from now on."""
        self._world._kept.update(self._new)
        self._new = {}

    def drop(self) -> None:
        """End the new ones. Others may have got further or less far: nobody looks for them under this name again."""
        self._dropped = True
        for group in self._new.values():
            dist.destroy_process_group(group)
        self._new = {}


def leave_world() -> None:
    """End all groups of this process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _name_ranks(rank: int) -> None:
    store = dist.HashStore()
    names = dist.ProcessGroup(store, rank, NUM_NAMES)
    names._set_default_backend(dist.ProcessGroup.BackendType.UNDEFINED)
    names._set_group_name("names")
    names._set_group_desc("names")
    c10d._register_pg_in_world(names, "undefined", store, c10d.GroupName("names"), "undefined", rank_mapping={})
    c10d._update_default_pg(names)


def standalone_group(world: World, store: dist.Store, name: str, rank: int, size: int) -> dist.ProcessGroup:
    """A process group beside the torch world, with its device and patience: its members may belong to different worlds,
    or change theirs."""
    kind = dist.ProcessGroupNCCL if world.device.type == "cuda" else dist.ProcessGroupGloo
    return kind(dist.PrefixStore(name, store), rank, size, world.timeout)


def use_interface(name: str | None) -> None:
    """Make collectives use network interface `name`; None leaves the choice to how the host's name resolves."""
    if name:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
