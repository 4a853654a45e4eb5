"""System calls that the standard library of Python 3.11 lacks."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWNET = 0x40000000
NODE_NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET

MS_NOSUID = 2
MS_BIND = 4096
MS_REC = 16384
MS_SLAVE = 1 << 19

PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Move this process into new namespaces. OSError (EPERM without the right to)."""
    _call(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, fstype: str | None = None, flags: int = 0, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, fstype, data)]
    _call(_libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]), f"mount on {target}")


def set_hostname(name: str) -> None:
    data = name.encode()
    _call(_libc.sethostname(data, ctypes.c_size_t(len(data))), "sethostname")


def become_subreaper() -> None:
    """Orphans among the descendants become children of this process instead of the machine's process 1."""
    _call(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def _call(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
