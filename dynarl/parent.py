"""Processes that must not outlive the one that started them, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Kept across exec, not across fork. A parent that ended before this call is not noticed: compare os.getppid().
    """
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def in_child_of(parent: int) -> None:
    """For `preexec_fn`: die with `parent`, the process that forks."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
