"""Starts, calls and ends one SGLang server on this node's loopback interface."""

from __future__ import annotations

import http.client
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

import dynarl
from dynarl.roles.rollout.sglang_server import KEY_VARIABLE

HOST = "127.0.0.1"
CPU_SUPPORT = Path(__file__).parent / "sglang_cpu"
FIRST_PORT = 20_000
# A port is tried before the server starts and bound a minute later, so somebody may have taken it in between.
START_ATTEMPTS = 3
CALL_TIMEOUT_S = 120.0
EXIT_SERVER_LOST = 72
# A connection breaks a moment before its process is gone.
ENDED_WITHIN_S = 1.0


class SGLangProcess:
    """The server, from its start to its end. Every method may be called from any thread."""

    def __init__(self, args: list[str], device: str, start_timeout_s: float):
        self._key = secrets.token_hex(16)
        self._process: subprocess.Popen | None = None
        self._descriptor: int | None = None  # of the process, once the server has been ready
        self._closing = False
        deadline = time.monotonic() + start_timeout_s
        for _ in range(START_ATTEMPTS):
            self.port = free_port()
            self._process = self._start(args, device)
            if self._wait_until_ready(deadline):
                self._descriptor = os.pidfd_open(self._process.pid)
                threading.Thread(target=self._end_with_server, daemon=True).start()
                return
            if not port_is_taken(self.port):
                break
        status = self._process.returncode
        raise RuntimeError(f"the SGLang server ended with status {status} before it was ready; what it said is above in this log")

    def _start(self, args: list[str], device: str) -> subprocess.Popen:
        path = [str(Path(dynarl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        # TQDM_DISABLE: its progress bars would fill the worker's log.
        environment = os.environ | {KEY_VARIABLE: self._key, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        if device == "cpu":
            path.insert(0, str(CPU_SUPPORT))
            # The seeded draw is a compiled function, and compiling for a CPU needs a C++ compiler on every node.
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
            environment.setdefault("OMP_NUM_THREADS", "1")
        environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
        command = [sys.executable, "-m", "dynarl.roles.rollout.sglang_server", "--host", HOST, "--port", str(self.port), *args]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)

    def _wait_until_ready(self, deadline: float) -> bool:
        """False when the server has ended. Raises TimeoutError, with the server ended, past the deadline."""
        while self._process.poll() is None:
            try:
                self.call("GET", "/health", timeout_s=5.0)
                return True
            except (OSError, http.client.HTTPException, SGLangError):
                pass
            if time.monotonic() > deadline:
                self.close()
                raise TimeoutError("the SGLang server was not ready in time (rollout.start_timeout_s)")
            time.sleep(0.2)
        return False

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = CALL_TIMEOUT_S) -> Any:
        """The decoded answer, None if it is empty. Raises SGLangError on any status but 200, OSError without an answer."""
        # A connection per call: the server closes idle ones, and a POST must not be sent twice.
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout_s)
        try:
            headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json", "Connection": "close"}
            connection.request(method, path, None if body is None else msgspec.json.encode(body), headers)
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException):
            self._end_with_server(ENDED_WITHIN_S)
            raise
        finally:
            connection.close()
        if response.status != 200:
            raise SGLangError(f"SGLang answered {response.status} to {path}: {data.decode(errors='replace')[:500]}")
        try:
            return msgspec.json.decode(data) if data else None
        except msgspec.DecodeError:
            return data.decode(errors="replace")

    def status(self) -> int | None:
        """Exit status of the server, None while it runs."""
        return self._process.poll()

    def _end_with_server(self, timeout_s: float | None = None) -> None:
        """End this worker if the server, which was ready once, ends within the time. Without its server a worker is of no
        use, and while idle would not even notice; the agent starts it again.
        """
        if self._descriptor is None:
            return
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if poll.poll(None if timeout_s is None else 1000 * timeout_s) and not self._closing:
            logging.error("the SGLang server has ended, and so does this worker; what the server said is above in this log")
            os._exit(EXIT_SERVER_LOST)

    def close(self) -> None:
        """End the server and its children."""
        self._closing = True
        if self._process.poll() is None:
            # Its own session: the group is the server with its scheduler and detokenizer.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class SGLangError(RuntimeError):
    """The server refused a call."""


def free_port() -> int:
    """A port below those that the kernel hands out by itself; neighbours on the node begin their search elsewhere."""
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    span = max(first_ephemeral, FIRST_PORT + 1000) - FIRST_PORT
    start = secrets.randbelow(span)
    for offset in range(span):
        port = FIRST_PORT + (start + offset) % span
        if not port_is_taken(port):
            return port
    raise RuntimeError(f"no free port from {FIRST_PORT} to {FIRST_PORT + span}")


def port_is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
    return False
