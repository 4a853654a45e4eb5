"""Stands in for the agent in tests: starts one role worker as its own process and talks to it over a private socket.

    with Harness(tmp_path) as harness:
        worker = harness.start("dynarl.roles.rollout.worker", "n1-rollout-0")
        worker.call("load", model_dir="...", version=0)
        worker.wait_event("finished", timeout_s=30)
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import zmq

from dynarl import wire

CHECKOUT = Path(__file__).resolve().parents[1]


class Handle:
    """A started worker. `pending` keeps its events in the order of arrival until somebody takes them."""

    def __init__(self, harness: Harness, name: str, process: subprocess.Popen, log: Path):
        self.harness = harness
        self.name = name
        self.process = process
        self.log = log
        self.pending: list[wire.Event] = []
        self.replies: dict[int, wire.Reply] = {}
        self._last_id = 0

    def post(self, method: str, **args) -> int:
        """Send a call and return its id at once; `reply(id)` waits for the answer."""
        self._last_id += 1
        self.harness.router.send_multipart([self.name.encode(), wire.encode(wire.Call(self._last_id, method, args))])
        return self._last_id

    def reply(self, call_id: int, timeout_s: float | None = None):
        """The value of the answer. Raises wire.CallError with the worker's message when the call failed."""
        timeout_s = timeout_s or self.harness.timeout_s
        self._until(lambda: call_id in self.replies, timeout_s, f"answer to call {call_id}")
        reply = self.replies.pop(call_id)
        if reply.error is not None:
            raise wire.CallError(reply.error)
        return reply.value

    def call(self, method: str, timeout_s: float | None = None, **args):
        return self.reply(self.post(method, **args), timeout_s)

    def events(self, name: str | None = None) -> list[dict]:
        """Take the data of all events that have arrived (of one name, or of all names)."""
        self.harness.pump(0)
        taken = [event for event in self.pending if name in (None, event.name)]
        self.pending = [event for event in self.pending if event not in taken]
        return [event.data for event in taken]

    def wait_event(self, name: str, timeout_s: float = 120.0) -> dict:
        """Take the oldest event of that name, waiting for it if need be."""
        self._until(lambda: any(event.name == name for event in self.pending), timeout_s, f"event {name!r}")
        event = next(event for event in self.pending if event.name == name)
        self.pending.remove(event)
        return event.data

    def _until(self, condition, timeout_s: float, what: str) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            self.harness.pump(100)
            if self.process.poll() is not None:
                self.harness.pump(0)
                if condition():
                    return
                raise RuntimeError(f"{self.name} ended with status {self.process.returncode}, no {what}:\n{self.log.read_text()[-3000:]}")
            if time.monotonic() > end:
                raise TimeoutError(f"{self.name}: no {what} within {timeout_s} s:\n{self.log.read_text()[-3000:]}")


class Harness:
    """The agent's side: one ROUTER socket for any number of workers. Ends them all on exit. timeout_s: for an answer."""

    def __init__(self, directory: Path, timeout_s: float = 120.0):
        self.directory, self.timeout_s = directory, timeout_s
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.address = f"ipc://{directory}/agent"
        self.router.bind(self.address)
        self.handles: dict[str, Handle] = {}

    def start(self, module: str, name: str, python: str = sys.executable, env: dict[str, str] | None = None, up_timeout_s: float = 240.0) -> Handle:
        """Start `python -m module` and wait until it reports that it is up."""
        log = self.directory / f"{name}.log"
        path = os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "tests")])  # the programs of tests, too
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | (env or {})
        with open(log, "w") as file:
            process = subprocess.Popen(
                [python, "-m", module, "--socket", self.address, "--name", name], env=environment, stdout=file, stderr=file
            )
        handle = self.handles[name] = Handle(self, name, process, log)
        handle.wait_event("up", up_timeout_s)
        return handle

    def pump(self, wait_ms: int) -> None:
        """Take in all messages that have arrived, waiting up to `wait_ms` for the first."""
        while self.router.poll(wait_ms):
            name, data = self.router.recv_multipart()
            handle, message = self.handles[name.decode()], wire.decode(data)
            if isinstance(message, wire.Reply):
                handle.replies[message.id] = message
            else:
                handle.pending.append(message)
            wait_ms = 0

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *_) -> None:
        for handle in self.handles.values():
            handle.process.kill()
            handle.process.wait()
        self.router.close()
        self.context.term()
