"""What every role worker is: a process that an agent started and talks to over one private socket.

A worker answers calls between units of work, so every call lands at a safe point: a rollout worker between two decode
steps, a trainer between two micro-batches. Subclasses add methods named `do_<method>` and, if they work in the
background, `work()`.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import traceback
from typing import Any

import zmq

from dynarl import wire
from dynarl.parent import die_with_parent


class Worker:
    """Base of the role workers. `role` is set by the subclass, `name` by the agent that started it."""

    role = "?"

    def __init__(self, socket: zmq.Socket, name: str):
        self.name = name
        self._socket = socket
        self._stopping = False

    def emit(self, event: str, **data: Any) -> None:
        """Tell the agent that something happened."""
        self._socket.send(wire.encode(wire.Event(event, data)))

    def work(self) -> bool:
        """Do one unit of background work. Return True while there is more, False when there is nothing to do."""
        return False

    def do_stop(self) -> None:
        """Leave the loop after this call has been answered."""
        self._stopping = True

    def do_ping(self) -> str:
        return self.name

    def run(self) -> None:
        """Serve calls and work until stopped. Sleeps in the socket while there is nothing to do."""
        self.emit("up", role=self.role, pid=os.getpid())
        busy = True
        while not self._stopping:
            if self._socket.poll(0 if busy else None):
                self._serve(self._socket.recv())
                busy = True
                continue
            busy = self.work()

    def _serve(self, data: bytes) -> None:
        call = wire.decode(data)
        if not isinstance(call, wire.Call):
            raise TypeError(f"a worker takes calls only, got {type(call).__name__}")
        handler = getattr(self, f"do_{call.method}", None)
        try:
            if handler is None:
                raise AttributeError(f"{self.role} worker has no method {call.method!r}")
            # Encoded here: an answer that cannot be sent is this call's error, not the worker's end.
            reply = wire.encode(wire.Reply(call.id, handler(**call.args)))
        except Exception as error:
            logging.exception("%s failed", call.method)
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
            reply = wire.encode(wire.Reply(call.id, None, text))
        self._socket.send(reply)


def main(worker_class: type[Worker]) -> None:
    """Entry point shared by the role programs: `python -m dynarl.roles.<role>.worker --socket ipc://... --name n1-rollout-0`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True, help="address of the agent, ipc://PATH")
    parser.add_argument("--name", required=True, help="identity of this worker")
    parser.add_argument("--parent", type=int, help="process id of the agent")
    args = parser.parse_args()
    # The agent may be killed without a chance to clean up: then this process must not outlive it.
    die_with_parent()
    if args.parent not in (None, os.getppid()):  # it died before the line above; an orphan's parent need not be process 1
        sys.exit("the agent that started this worker is gone")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {args.name} %(levelname)s %(message)s", stream=sys.stderr)
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, args.name.encode())
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(args.socket)
    worker_class(socket, args.name).run()
    socket.close()
    zmq.Context.instance().term()
