"""The tool `python`: runs a program that a model wrote, in a sandbox (jail.py), and gives back what it printed.

What holds it: no network, no file of the machine but Python's own and the system's libraries, a /tmp of its own that is
gone afterwards, an empty environment, and limits on wall-clock time, CPU time, memory, files, processes and output.
What does not: a fault of the kernel. docs/security.md says more.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynarl.tasks.tools.base import Tool
from dynarl.tasks.tools.jail import REFUSED

JAIL = str(Path(__file__).with_name("jail.py"))


@dataclass(frozen=True)
class Limits:
    """Of one program. memory_bytes: address space of each process; file_bytes: of all its files together."""

    wall_s: float = 5.0
    cpu_s: int = 4
    memory_bytes: int = 256 << 20
    file_bytes: int = 8 << 20
    processes: int = 8
    output_bytes: int = 2000


class PythonTool(Tool):
    """`arguments` is a program; the answer is its standard output, followed by the last line of a traceback.

    confined False: without namespaces, where a site forbids them; the program has the network and the user's files.
    """

    def __init__(self, limits: Limits = Limits(), confined: bool = True):
        self._limits, self._confined = limits, confined

    def check(self) -> None:
        if (answer := self.call("print(6 * 7)", {})) != "42":
            raise ValueError(f"the sandbox of the tool python runs no program on this node: {answer or 'no output'}")

    def call(self, arguments: str, session: dict[str, Any]) -> str:
        settings = {
            "parent": os.getpid(), "confined": self._confined, "python": sys._base_executable,
            "prefix": sys.base_prefix, **vars(self._limits)}
        # The interpreter under a virtual environment: of that one's directory the program sees nothing.
        command = [sys._base_executable, "-I", "-S", "-B", JAIL, json.dumps(settings)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with tempfile.TemporaryDirectory() as directory:
            process = subprocess.Popen(command, **pipes, env={}, cwd=directory, start_new_session=True)
            try:
                output, errors, why = _converse(process, arguments.encode(), self._limits)
            finally:
                # Also what lives on after the program: it must not outlast the call.
                os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
                for stream in (process.stdin, process.stdout, process.stderr):
                    stream.close()
        if status == REFUSED and not why:
            raise ValueError(
                f"this node does not let the tool python confine a program ({errors.strip()}): it needs user "
                "namespaces (sysctl user.max_user_namespaces), or set task.args.unconfined_python: true to run programs "
                "with the network and the rights of the job")
        lines = [line for line in (output.strip(), why or _last_line(errors)) if line]
        if not why and not errors and status == 128 + signal.SIGKILL:
            lines.append(f"error: killed; a program may take {self._limits.cpu_s} s of CPU time")
        return "\n".join(lines)


def _last_line(errors: str) -> str:
    lines = errors.strip().splitlines()
    return f"error: {lines[-1]}" if lines else ""


def _converse(process: subprocess.Popen, program: bytes, limits: Limits) -> tuple[str, str, str]:
    """Send the program, read until it closes its output or a limit is reached: (output, errors, why it was ended)."""
    deadline = time.monotonic() + limits.wall_s
    pieces: dict[int, bytes] = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    poll = select.poll()
    for descriptor in pieces:
        poll.register(descriptor, select.POLLIN)
    os.set_blocking(process.stdin.fileno(), False)
    poll.register(process.stdin.fileno(), select.POLLOUT)
    open_, why = set(pieces), ""
    while open_ and not why:
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready:
            why = f"error: stopped after {limits.wall_s:g} s"
        for descriptor, _ in ready:
            if descriptor not in pieces:
                program = _send(process, program)
                if not program:
                    poll.unregister(descriptor)
                    process.stdin.close()
                continue
            data = os.read(descriptor, 65536)
            pieces[descriptor] += data
            if not data:
                poll.unregister(descriptor)
                open_.discard(descriptor)
            elif len(pieces[descriptor]) > limits.output_bytes:
                pieces[descriptor] = pieces[descriptor][: limits.output_bytes]
                why = f"error: more than {limits.output_bytes} bytes of output"
    out, errors = (data.decode(errors="replace") for data in pieces.values())
    return out, errors, why


def _send(process: subprocess.Popen, program: bytes) -> bytes:
    """Write what the pipe takes; returns the rest."""
    try:
        return program[os.write(process.stdin.fileno(), program) :]
    except BrokenPipeError:
        return b""
