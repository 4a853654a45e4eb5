"""Where state lies in a process's memory, and reading it out of that of another process of the same node.

Linux copies from one process to another in one go (process_vm_readv), and the other one need not do anything. The
kernel allows it between processes of one user, where no container or security module forbids it; where
kernel.yama.ptrace_scope is 1 the process that is read has to agree first (`let_read`). Nobody relies on it: who may
not read says so, and gets the bytes packed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dynarl.vps.box import Box

# Pieces of memory that one call may name on each side (IOV_MAX).
MOST_PIECES = 1024
PR_SET_PTRACER = 0x59616D61

_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = [ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong]


_memmove = _libc.memmove
_memmove.restype = ctypes.c_void_p
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Span(NamedTuple):
    """`rows` times `row_bytes` bytes, every `stride_bytes`."""

    address: int
    rows: int
    row_bytes: int
    stride_bytes: int


class View(NamedTuple):
    """A box of a tensor in memory; strides in bytes."""

    box: Box
    address: int
    strides: tuple[int, ...]
    item_bytes: int


def spans_of(box: Box, views: Sequence[View]) -> list[Span] | None:
    """The bytes of a box, row-major, from the views that tile it. None: they do not lie row by row.

    >>> spans_of(((0, 4), (2, 4)), [View(((0, 4), (2, 4)), 1000, (40, 4), 4)])
    [Span(address=1000, rows=4, row_bytes=8, stride_bytes=40)]
    """
    spans = []
    for inner, address, strides, item in sorted(views) if len(views) > 1 else views:
        (lo, hi), *more = inner
        rows = hi - lo
        if rows > 1 and tuple(more) != box[1:]:
            return None
        columns = more[0][1] - more[0][0] if more else 1
        if columns > 1 and strides[1] != item:
            return None
        row_bytes = columns * item
        if rows > 1 and strides[0] == row_bytes:
            rows, row_bytes = 1, rows * row_bytes
        spans.append(Span(address, rows, row_bytes, strides[0]))
    return spans


def pieces(spans: Iterable[Sequence[int]]) -> np.ndarray:
    """The contiguous pieces of spans, in order: int64 [N, 2], address and bytes (struct iovec)."""
    parts: list[list[tuple[int, int]] | np.ndarray] = [[]]
    for address, rows, row_bytes, stride in spans:
        if rows == 1:
            if isinstance(parts[-1], np.ndarray):
                parts.append([])
            parts[-1].append((address, row_bytes))
        else:
            part = np.empty((rows, 2), np.int64)
            part[:, 0] = np.arange(address, address + rows * stride, stride)
            part[:, 1] = row_bytes
            parts.append(part)
    arrays = [np.asarray(part, np.int64).reshape(-1, 2) for part in parts if len(part)]
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty((0, 2), np.int64), *arrays])


def read(pid: int, theirs: np.ndarray, mine: np.ndarray) -> None:
    """Copy pieces of the memory of process `pid` into pieces of ours, as one row of bytes into another.

    Raises OSError: ESRCH (the process is gone), EPERM, EFAULT (it has no such memory, any more); ValueError where the
    sizes differ.
    """
    left = int(mine[:, 1].sum())
    if left != int(theirs[:, 1].sum()):
        raise ValueError(f"{int(theirs[:, 1].sum())} bytes of process {pid} do not fit a place of {left} bytes")
    while left:
        got = _readv(pid, *_vector(mine), *_vector(theirs), 0)
        if got <= 0:
            error = ctypes.get_errno()
            raise OSError(error, f"cannot read the memory of process {pid}: {os.strerror(error)}")
        left -= got
        if left:
            mine, theirs = _after(mine, got), _after(theirs, got)


def copy(to: int, address: int, num_bytes: int) -> None:
    """Copy within this process. Large pieces are written around the cache (see slurm.environ.identity)."""
    _memmove(to, address, num_bytes)


def let_read(pid: int) -> None:
    """Processes that `pid` has started, and itself, may read this one's memory. Needed under yama alone: elsewhere the
    kernel does not know the call."""
    _libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def _vector(listed: np.ndarray) -> tuple[int, int]:
    return listed.ctypes.data, min(len(listed), MOST_PIECES)


def _after(listed: np.ndarray, done: int) -> np.ndarray:
    """The pieces without their first `done` bytes."""
    ends = np.cumsum(listed[:, 1])
    first = int(np.searchsorted(ends, done, side="right"))
    rest = listed[first:].copy()
    begun = done - (int(ends[first - 1]) if first else 0)
    rest[0] += begun, -begun
    return rest
