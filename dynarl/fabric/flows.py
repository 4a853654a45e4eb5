"""Bytes under way: transfers that start and end at their own times and share links fairly.

A transfer is one message, or many that start together (a step of a collective). The caller owns the clock:

    id = network.start(now_ns, src, dst, nbytes, tag)
    now_ns, id = network.next_completion()          asks; nothing happens yet
    network.advance(now_ns)
    done = network.finish(id)                       its messages that have ended leave; True: it has no others

Time is in whole nanoseconds, ends are rounded up, and of several at the same nanosecond the oldest transfer comes
first, so a history of calls has one outcome. The network moves bytes only: what a byte needs for its way
(`Topology.latencies_s`) is for the caller to add.

Rates are max-min fair (`maxmin`). When transfers start or end, only messages that share links with them, directly or
through others, get new rates, once for all changes of a nanosecond; the others are not touched, so their ends do not
drift. Messages between the same two devices count as one with a weight.

Cost of an event with m messages under way, r of them in the region of the change: one or a few passes over m x hops
integers to find the region, and rounds x r x hops for the rates. No work per nanosecond and none per byte.

>>> from dynarl.fabric.topology import single_switch
>>> network = FlowNetwork(single_switch(3, 1, nic_bytes_per_s=1e9, nvlink_bytes_per_s=1e9))
>>> a, b = network.start(0, 0, 2, 3000), network.start(0, 1, 2, 1000)
>>> network.next_completion()    # both at half the rate of device 2's NIC
(2000, 1)
>>> network.advance(2000)
>>> network.finish(b), network.next_completion()
(True, (4000, 0))
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dynarl.fabric.maxmin import TOLERANCE, max_min_rates
from dynarl.fabric.topology import NO_LINK, Topology

NEVER = np.iinfo(np.int64).max
# Steps in search of the region of a change, before all messages are taken for it (which is as right, and slower).
MOST_STEPS = 8
MESSAGE = np.dtype(
    [
        ("transfer", np.int64),
        ("pair", np.int64),  # equal for messages that take the same way
        ("nbytes", np.int64),
        ("left", np.float64),  # bytes, as of since_ns
        ("rate", np.float64),  # bytes/s, from since_ns on
        ("since_ns", np.int64),
        ("due_ns", np.int64),
    ]
)


@dataclass
class Transfer:
    tag: object
    messages: int


class FlowNetwork:
    """Transfers under way on a topology."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        # The route of a single message, which mostly goes where others went.
        self._way = lru_cache(2**16)(topology.routes)
        self.now_ns = 0
        self.delivered_bytes = 0
        self._transfers: dict[int, Transfer] = {}
        self._next_id = 0
        # Messages without gaps, in the first rows; those of a transfer that ends make room for the last ones.
        self._rows, self._count = np.empty(64, MESSAGE), 0
        # Links by hop and row: searched far more often than written.
        self._route = np.empty((topology.routes(0, 0).shape[1], 64), np.int64)
        # One more than links: NO_LINK's, always False.
        self._dirty = np.zeros(topology.num_links + 1, dtype=bool)

    def start(self, now_ns: int, src, dst, nbytes, tag: object = None) -> int:
        """Numbers, or arrays of them for messages that start together; bytes are whole. Returns the transfer's id."""
        self.advance(now_ns)
        src, dst, nbytes = np.broadcast_arrays(np.atleast_1d(src), np.atleast_1d(dst), np.atleast_1d(nbytes))
        if not np.issubdtype(nbytes.dtype, np.integer) or (nbytes < 0).any():
            raise ValueError(f"transfer of {nbytes} bytes: give whole numbers, 0 or more")
        if not len(nbytes):
            raise ValueError("transfer without messages: give at least one source and destination")
        route = self._way(int(src[0]), int(dst[0])) if len(src) == 1 else self.topology.routes(src, dst)
        first, self._count = self._count, self._count + len(nbytes)
        while self._count > len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
            self._route = np.concatenate([self._route, np.empty_like(self._route)], axis=1)
        n, rows = self.topology.num_devices, self._rows[first : self._count]
        self._route[:, first : self._count] = route.T
        rows["transfer"] = self._next_id
        rows["pair"] = src * n + dst
        rows["nbytes"] = rows["left"] = nbytes
        rows["rate"], rows["since_ns"] = 0.0, now_ns
        at_once = (nbytes == 0) | (route == NO_LINK).all(axis=1)
        rows["due_ns"] = np.where(at_once, now_ns, NEVER)
        self._mark(route[~at_once])
        self._transfers[self._next_id] = Transfer(tag, len(nbytes))
        self._next_id += 1
        return self._next_id - 1

    def next_completion(self) -> tuple[int, int] | None:
        """When messages of a transfer end next, and of which. None: nothing is under way, or all of it is halted."""
        due_ns = self._rows["due_ns"][: self._count]
        if not len(due_ns):
            return None
        if due_ns.min() > self.now_ns:
            self._solve()
        soonest = due_ns.min()
        if soonest == NEVER:
            return None
        return int(soonest), int(self._rows["transfer"][: self._count][due_ns == soonest].min())

    def advance(self, now_ns: int) -> None:
        """Let time pass, at most until the next completion."""
        if now_ns == self.now_ns:
            return
        if now_ns < self.now_ns:
            raise ValueError(f"time {now_ns} ns is before {self.now_ns} ns, where the network is")
        soonest = self.next_completion()
        if soonest is not None and soonest[0] < now_ns:
            raise ValueError(f"transfer {soonest[1]} has messages that end at {soonest[0]} ns: finish them, then go on")
        self.now_ns = now_ns

    def finish(self, transfer: int) -> bool:
        """The messages of a transfer that have ended by now leave. True: there are no others."""
        rows = self._rows[: self._count]
        ended = np.nonzero((rows["transfer"] == transfer) & (rows["due_ns"] <= self.now_ns))[0]
        if not len(ended):
            raise ValueError(f"transfer {transfer} has no message that has ended at {self.now_ns} ns")
        self.delivered_bytes += int(rows["nbytes"][ended].sum())
        return self._remove(transfer, ended)

    def cancel(self, transfer: int) -> int:
        """Stop a transfer now. Returns the bytes that had not been sent."""
        self._solve()
        rows = self._rows[: self._count]
        mine = np.nonzero(rows["transfer"] == transfer)[0]
        if not len(mine):
            raise ValueError(f"transfer {transfer} is not under way")
        left = round(float(self._left(rows[mine]).sum()))
        self.delivered_bytes += int(rows["nbytes"][mine].sum()) - left
        self._remove(transfer, mine)
        return left

    def tag(self, transfer: int) -> object:
        """What `start` was given for it."""
        return self._transfers[transfer].tag

    def halted(self) -> dict[int, tuple[object, str]]:
        """Transfers with messages that do not move: id to tag and the name of the link that has no capacity."""
        self._solve()
        still = {}
        for row in np.nonzero(self._rows["due_ns"][: self._count] == NEVER)[0]:
            transfer = int(self._rows["transfer"][row])
            links = [link for link in self._route[:, row] if link != NO_LINK]
            dead = min(links, key=lambda link: self.topology.capacity_bytes_per_s[link])
            still.setdefault(transfer, (self._transfers[transfer].tag, self.topology.link_name(int(dead))))
        return still

    def _mark(self, route: np.ndarray) -> None:
        self._dirty[route] = True
        self._dirty[NO_LINK] = False

    def _left(self, rows: np.ndarray) -> np.ndarray:
        """Bytes of messages that are still to be sent now."""
        return np.maximum(rows["left"] - rows["rate"] * (self.now_ns - rows["since_ns"]) * 1e-9, 0.0)

    def _solve(self) -> None:
        """New rates and ends where something has changed."""
        if not self._dirty.any():
            return
        rows = self._rows[: self._count]
        region = self._region()
        # Ended and not yet finished: it sends nothing.
        region = region[rows["due_ns"][region] > self.now_ns]
        _, first, inverse, weight = np.unique(
            rows["pair"][region], return_index=True, return_inverse=True, return_counts=True
        )
        rate = max_min_rates(self._route[:, region[first]].T, self.topology.capacity_bytes_per_s, weight)[inverse]
        other = np.abs(rate - rows["rate"][region]) > TOLERANCE * rate
        region, rate = region[other], rate[other]
        left = self._left(rows[region])
        rows["left"][region], rows["rate"][region], rows["since_ns"][region] = left, rate, self.now_ns
        moves = rate > 0
        # At most a century: what takes longer must not overflow.
        needed_ns = np.minimum(left[moves] / rate[moves] * 1e9, 2.0**61)
        rows["due_ns"][region] = NEVER
        # What rounding of floats adds must not cost a nanosecond.
        rows["due_ns"][region[moves]] = self.now_ns + np.ceil(needed_ns * (1 - TOLERANCE) - 1e-6).astype(np.int64)
        self._dirty[:] = False

    def _region(self) -> np.ndarray:
        """Rows of the messages that share links with a dirty one, directly or through others."""
        route, dirty = self._route[:, : self._count], self._dirty
        hit, before = dirty[route].any(axis=0), -1
        for _ in range(MOST_STEPS):
            found = np.count_nonzero(hit)
            if found in (before, self._count):
                return np.nonzero(hit)[0]
            before = found
            self._mark(route[:, hit])
            hit = dirty[route].any(axis=0)
        return np.arange(self._count)

    def _remove(self, transfer: int, gone: np.ndarray) -> bool:
        """Take rows of a transfer out; the last rows fill the gaps. True: the transfer has no others."""
        self._mark(self._route[:, gone])
        end = self._count - len(gone)
        gaps, moved = gone[gone < end], np.setdiff1d(np.arange(end, self._count), gone)
        self._rows[gaps], self._route[:, gaps] = self._rows[moved], self._route[:, moved]
        self._count = end
        record = self._transfers[transfer]
        record.messages -= len(gone)
        if record.messages:
            return False
        del self._transfers[transfer]
        return True
