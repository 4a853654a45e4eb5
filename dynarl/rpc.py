"""Remote calls over ZeroMQ sockets for asyncio programs (controller and agents).

A `Link` wraps one socket. Its handler is any object with `async def on_<method>(peer, **args)` for calls and
`def event_<name>(peer, **data)` for events. Calls of one peer run concurrently; order is kept only among events.

With `lasting`, at both ends, nothing is lost or doubled when a connection breaks and is made again (`delivery`).
Someone has to `beat` regularly, at both ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import Any

import zmq
import zmq.asyncio

from dynarl import wire
from dynarl.delivery import Delivery

log = logging.getLogger(__name__)


class PeerGone(wire.CallError):
    """The peer was declared dead while a call to it was open."""


class Link:
    """Calls, replies and events over one socket. With `routed`, peers are named by their socket identity,
    which they must set (to text: the one that ZeroMQ invents is not). `heard`: when each peer last said something."""

    def __init__(self, socket: zmq.asyncio.Socket, handler: Any, *, routed: bool, lasting: bool = False):
        self._socket, self._handler, self._routed, self._lasting = socket, handler, routed, lasting
        self._start = time.time_ns()
        self._deliveries: dict[str, Delivery] = {}
        self.heard: dict[str, float] = {}
        self._ids = itertools.count(1)
        self._open: dict[int, tuple[str, asyncio.Future]] = {}
        self._tasks: set[asyncio.Task] = set()

    async def call(self, peer: str, method: str, /, timeout_s: float | None = None, **args: Any) -> Any:
        """Run `method` at `peer`. Raises CallError with the peer's message, TimeoutError, or PeerGone."""
        number = next(self._ids)
        future = asyncio.get_running_loop().create_future()
        self._open[number] = (peer, future)
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(peer, wire.Call(number, method, args))
                return await future
        except TimeoutError:
            raise TimeoutError(f"{peer}: no answer to {method} within {timeout_s:g} s") from None
        finally:
            self._open.pop(number, None)

    async def emit(self, peer: str, event: str, /, **data: Any) -> None:
        await self._send(peer, wire.Event(event, data))

    async def beat(self, peer: str, event: str, /, **data: Any) -> None:
        """Emit an event that may get lost, after what got lost before."""
        if self._lasting:
            for frames in self._delivery(peer).again():
                await self._send_frames(peer, *frames)
        await self._send_bytes(peer, wire.encode(wire.Event(event, data)), numbered=False)

    def peer_gone(self, peer: str, why: str) -> None:
        """Fail every open call to `peer`."""
        for name, future in list(self._open.values()):
            if name == peer and not future.done():
                future.set_exception(PeerGone(why))

    async def serve(self) -> None:
        """Receive until cancelled."""
        while True:
            frames = await self._socket.recv_multipart()
            peer = frames[0].decode(errors="replace") if self._routed else ""
            self.heard[peer] = time.monotonic()
            try:
                if self._lasting and not self._delivery(peer).take(frames[-2]):
                    continue
                message = wire.decode(frames[-1])
            except Exception as error:  # anything may be sent to an open socket; it must not stop the server
                log.warning("dropped a message from %r that does not decode: %s", peer, error)
                continue
            if isinstance(message, wire.Reply):
                self._settle(peer, message)
            elif isinstance(message, wire.Event):
                self._deliver(peer, message)
            else:
                self.spawn(self._answer(peer, message))

    def spawn(self, coroutine) -> asyncio.Task:
        """Run a coroutine in the background; its failure is logged, not lost."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("background task failed", exc_info=task.exception())

    def _settle(self, peer: str, reply: wire.Reply) -> None:
        asked, future = self._open.get(reply.id, (None, None))
        if future is None or future.done():
            return
        if self._routed and asked != peer:
            log.warning("dropped an answer of %r to a call that went to %r", peer, asked)
            return
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(wire.CallError(reply.error))

    def _deliver(self, peer: str, event: wire.Event) -> None:
        handler = getattr(self._handler, f"event_{event.name}", None)
        if handler is None:
            log.warning("no handler for event %r of %s", event.name, peer)
            return
        try:
            handler(peer, **event.data)
        except Exception:  # a wrong event costs itself, not all that come after it
            log.exception("event %s of %r failed", event.name, peer)

    async def _answer(self, peer: str, call: wire.Call) -> None:
        handler = getattr(self._handler, f"on_{call.method}", None)
        try:
            if handler is None:
                raise AttributeError(f"unknown method {call.method!r}")
            # Encoded here: an answer that cannot be sent must reach the caller as an error, or it waits for ever.
            reply = wire.encode(wire.Reply(call.id, await handler(peer, **call.args)))
        except Exception as error:
            log.info("%s from %s failed", call.method, peer, exc_info=not isinstance(error, wire.CallError))
            text = str(error) if isinstance(error, wire.CallError) else f"{type(error).__name__}: {error}"
            reply = wire.encode(wire.Reply(call.id, None, text))
        await self._send_bytes(peer, reply)

    async def _send(self, peer: str, message: wire.Message) -> None:
        await self._send_bytes(peer, wire.encode(message))

    async def _send_bytes(self, peer: str, data: bytes, numbered: bool = True) -> None:
        await self._send_frames(peer, *(self._delivery(peer).pack(data, numbered) if self._lasting else (data,)))

    async def _send_frames(self, peer: str, *frames: bytes) -> None:
        await self._socket.send_multipart([peer.encode(), *frames] if self._routed else list(frames))

    def _delivery(self, peer: str) -> Delivery:
        if peer not in self._deliveries:
            self._deliveries[peer] = Delivery(self._start)
        return self._deliveries[peer]
