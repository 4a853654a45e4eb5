"""The agent of one node: takes orders from the controller, runs the role workers, holds the samples made here.

An order of the controller is a method `on_<order>` of the part that it is about: `Agent` (the node's life and its
workers), `Work` (samples) or `Roles` (roles and weights) or
`StateMoves` (model state between layouts). What workers tell arrives in `WorkerEvents`; what other agents
ask, in `PeerRequests`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from dynarl import keys, wire
from dynarl.agent import pulse
from dynarl.agent.gate import Gate
from dynarl.agent.orphan import SILENCE_S, ControllerWatch
from dynarl.agent.remapper import Remapper
from dynarl.agent.roles import Roles
from dynarl.agent.state_moves import StateMoves
from dynarl.agent.supervisor import Supervisor, WorkerProcess
from dynarl.agent.work import Work
from dynarl.rpc import Link
from dynarl.wire import ToolCall, Trajectory

log = logging.getLogger(__name__)


class Agent:
    """State of one node. `links` are up after `start()`; `run()` returns when the controller says stop or falls silent.
    """

    def __init__(self, *, node: str, home: str, rank: int, remapper: Remapper, controller: str, watch: ControllerWatch,
                 key_dir: Path, log_dir: Path, scratch: Path, staging: Path, host: str, mpi_library: str, world_size: int):
        self.node, self.home, self.rank, self.remapper = node, home, rank, remapper
        self._scratch, self._log_dir = scratch, log_dir
        gate = Gate()
        self.work = Work(self, gate)
        self.roles = Roles(self, self.work, gate, staging, home)
        self.state_moves = StateMoves(self, self.roles)
        self.start_settings: dict[str, dict[str, Any]] = {}  # role -> how its workers are started
        self._controller_watch = watch
        self._stop = asyncio.Event()
        self.context = zmq.asyncio.Context()
        self.keys = keys.load(key_dir, "agent")
        controller_keys = keys.load(key_dir, "controller")
        self._worker_socket = self.context.socket(zmq.ROUTER)
        # A restarted worker takes over the identity of the one that died.
        self._worker_socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._peer_socket = self.context.socket(zmq.ROUTER)
        keys.as_server(self._peer_socket, self.keys)
        self._controller_socket = self.context.socket(zmq.DEALER)
        self._controller_socket.setsockopt(zmq.IDENTITY, node.encode())
        self._controller_socket.setsockopt(zmq.LINGER, 2000)
        keys.as_client(self._controller_socket, self.keys, controller_keys.public)
        self._controller_address = controller
        self.host = host
        self._hello = {"node": node, "home": home, "rank": rank, "pid": os.getpid(), "world_size": world_size,
                       "mpi_library": mpi_library, "staging": str(staging)}

    def start(self) -> None:
        """Open the sockets. Call inside the running event loop: the authenticator belongs to it."""
        self._authenticator = keys.admit(self.context, self.keys)
        make_staging(self.roles.staging)
        address = f"ipc://{self._scratch}/agent.sock"
        self._worker_socket.bind(address)
        port = self._peer_socket.bind_to_random_port(f"tcp://{self.host}")
        self.peer_address = f"tcp://{self.host}:{port}"
        self._controller_socket.connect(self._controller_address)
        self.supervisor = Supervisor(self.node, address, self._log_dir, self._worker_died)
        self.workers = Link(self._worker_socket, WorkerEvents(self), routed=True)
        self.peers = Link(self._peer_socket, PeerRequests(self.work), routed=True)
        orders = Orders(self, self.work, self.roles, self.state_moves)
        self.controller = Link(self._controller_socket, orders, routed=False, lasting=True)

    async def run(self) -> None:
        """Serve until told to stop. Workers are gone when it returns."""
        servers = [asyncio.create_task(link.serve()) for link in (self.workers, self.peers, self.controller)]
        await self.controller.emit("", "hello", **self._hello, peer_address=self.peer_address)
        watch = asyncio.create_task(self._watch_controller())
        hang = asyncio.create_task(self._watch_workers())
        progress = asyncio.create_task(self.remapper.keep_going())
        stop = asyncio.create_task(self._stop.wait())
        done, _ = await asyncio.wait([*servers, watch, hang, progress, stop], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task is not stop and task.exception() is not None:
                log.error("agent stops: %s", task.exception(), exc_info=task.exception())
        await self.supervisor.stop_all()
        for task in servers + [watch, hang, progress, stop]:
            task.cancel()

    def close(self) -> None:
        """Leave nothing behind on the node."""
        self.supervisor.kill_all()
        self.state_moves.transitions.close()
        shutil.rmtree(self.roles.staging, ignore_errors=True)
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._authenticator.stop()
        self.context.destroy(linger=200)

    def request_stop(self) -> None:
        self._stop.set()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    async def _watch_controller(self) -> None:
        await self._controller_watch.until_gone()
        log.error("nothing heard from the controller for %.0f s: this agent ends", SILENCE_S)

    async def _watch_workers(self) -> None:
        """End workers that hang. Their deaths are reported like any other."""
        while True:
            watched = [w for w in self.supervisor.workers.values() if w.pulse is not None]
            pause_s = min((w.pulse.limit_s / pulse.LOOKS for w in watched), default=0.1)
            slept_at = time.monotonic()
            await asyncio.sleep(pause_s)
            now = time.monotonic()
            # If this process stood still (it may, while MPI makes a communicator), it has not listened either.
            missed_s = now - slept_at - pause_s
            for worker in watched:
                if missed_s > pause_s:
                    worker.pulse.forgive(missed_s)
                if self.supervisor.workers.get(worker.name) is worker:
                    self._look_at(worker, now)

    def _look_at(self, worker: WorkerProcess, now: float) -> None:
        building = not worker.up.done() or not pulse.BUILDING.isdisjoint(worker.calls)
        reason = worker.pulse.look(
            now,
            heard=self.workers.heard.get(worker.name, 0.0),
            busy=self.work.is_busy(worker.name),
            done=worker.done,
            cpu_s=pulse.cpu_seconds(worker.process.pid) if building else None,
        )
        if reason is not None:
            self.supervisor.kill(worker.name, reason)
        elif worker.up.done() and worker.pulse.is_quiet(now) and "ping" not in worker.calls:
            self.workers.spawn(self._ping(worker.name))

    async def _ping(self, name: str) -> None:
        with contextlib.suppress(wire.CallError):  # its death is reported
            await self.call_worker(name, "ping")

    # --- orders: life

    def event_heartbeat(self, peer: str) -> None:
        self._controller_watch.heard()
        self.controller.spawn(self.controller.beat("", "alive"))

    async def on_stop(self, peer: str) -> None:
        # After the answer is out.
        asyncio.get_running_loop().call_later(0.05, self._stop.set)

    # --- orders: workers

    async def on_start_worker(self, peer: str, role: str, device: int, python: str | None, env: dict, device_kind: str,
                              limit_s: float, hang_s: float = 0.0) -> dict:
        """Start a role worker and wait until it answers. Returns {name, pid, attempt}."""
        settings = {"python": python, "env": env, "device_kind": device_kind, "hang_s": hang_s}
        self.start_settings[role] = settings
        worker = self.supervisor.start(role, device, **settings)
        try:
            await asyncio.wait_for(asyncio.shield(worker.up), limit_s)
        except TimeoutError:
            self.supervisor.kill(worker.name, f"not ready within {limit_s:g} s of its start")
            raise TimeoutError(f"{worker.name} was not ready within {limit_s:g} s; see {worker.log_path}") from None
        return {"name": worker.name, "pid": worker.process.pid, "attempt": worker.attempt}

    async def on_worker(
        self, peer: str, role: str, device: int, method: str, args: dict, limit_s: float | None = None
    ) -> Any:
        """Pass a call on to one role worker."""
        return await self.call_worker(self.supervisor.name_of(role, device), method, timeout_s=limit_s, **args)

    async def on_kill_workers(self, peer: str, role: str) -> int:
        """End all workers of a role (to start them afresh). Returns how many there were."""
        names = [name for name, worker in self.supervisor.workers.items() if worker.role == role]
        for name in names:
            self.supervisor.workers[name].expected_to_end = True
            self.supervisor.kill(name)
        self.work.workers_ended(role)
        while any(name in self.supervisor.workers for name in names):
            await asyncio.sleep(0.01)
        for name in names:
            self.workers.peer_gone(name, f"{name} was ended")
        return len(names)

    async def call_worker(self, name: str, method: str, /, timeout_s: float | None = None, **args: Any) -> Any:
        worker = self.supervisor.workers.get(name)
        if worker is None:
            raise wire.CallError(f"{name} is not running")
        try:
            await asyncio.shield(worker.up)  # a message to a process that has not connected yet would be lost
        except RuntimeError as error:
            raise wire.CallError(str(error)) from None
        worker.calls[method] += 1
        try:
            return await self.workers.call(name, method, timeout_s=timeout_s, **args)
        finally:
            worker.calls -= Counter({method: 1})  # drops what is 0

    async def call_or_end(self, name: str, method: str, limit_s: float | None, /, **args: Any) -> Any:
        """As `call_worker`; a worker that does not answer in time is ended, and CallError raised."""
        try:
            return await self.call_worker(name, method, timeout_s=limit_s, **args)
        except TimeoutError as error:
            self.supervisor.kill(name, str(error))
            raise wire.CallError(f"{error}; it was ended") from None

    def of_role(self, role: str) -> list[str]:
        """Names of the workers of a role that are ready."""
        return sorted(w.name for w in self.supervisor.workers.values() if w.role == role and w.up.done())

    def processes(self, names: list[str]) -> list[WorkerProcess]:
        """The processes behind these names. Raises CallError when one is not running."""
        if absent := [name for name in names if name not in self.supervisor.workers]:
            raise wire.CallError(f"{', '.join(absent)} not running")
        return [self.supervisor.workers[name] for name in names]

    def check_same(self, before: list[WorkerProcess]) -> None:
        """Raises CallError when a process was replaced since: the controller has offered its work to others then."""
        for worker in before:
            if self.supervisor.workers.get(worker.name) is not worker:
                raise wire.CallError(f"{worker.name} died while its work was on the way")

    def _worker_died(self, worker: WorkerProcess, status: str, tail: list[str]) -> None:
        self.workers.peer_gone(worker.name, f"{worker.name} died: {status}")
        self.roles.worker_died(worker.role)
        held = self.work.worker_died(worker)
        self.controller.spawn(
            self.controller.emit(
                "",
                "worker_died",
                role=worker.role,
                device=worker.device,
                attempt=worker.attempt,
                status=status,
                tail=tail,
                reason=worker.reason,
                held=held,
            )
        )


def make_staging(path: Path) -> None:
    """A fresh directory for staged weights. Its path can be guessed, so one that somebody else made is refused.

    What a killed agent of this job left there goes. Raises OSError.
    """
    if path.is_symlink() or (path.exists() and path.stat().st_uid != os.getuid()):
        raise PermissionError(f"{path} is there already and is not ours; remove it, or set cluster.staging to another place")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700, parents=True)


class Orders:
    """The controller's messages, each for the part of the agent that has a method for it."""

    def __init__(self, *parts: Any):
        self._parts = parts

    def __getattr__(self, name: str) -> Any:
        for part in self._parts:
            if hasattr(part, name):
                return getattr(part, name)
        raise AttributeError(name)


class WorkerEvents:
    """What role workers report."""

    def __init__(self, agent: Agent):
        self._agent = agent

    def event_up(self, peer: str, role: str, pid: int) -> None:
        worker = self._agent.supervisor.workers.get(peer)
        if worker is not None and worker.process.pid == pid and not worker.up.done():
            worker.up.set_result(None)

    def event_finished(
        self, peer: str, sample: str, response: bytes, logprobs: bytes, finish: str, version: int, **_: Any
    ) -> None:
        self._got_done(peer, sample)
        self._agent.workers.spawn(self._agent.work.sample_finished(sample, response, logprobs, finish, version))

    def event_parts(self, peer: str, parts: list[dict]) -> None:
        self._agent.work.parts_came(peer, parts)

    def event_figures(self, peer: str, **figures: Any) -> None:
        self._got_done(peer, figures)
        self._agent.controller.spawn(self._agent.controller.emit("", "figures", worker=peer, **figures))

    def event_trained(self, peer: str, lease: int, **data: Any) -> None:
        self._got_done(peer, lease)
        self._agent.work.lease_done(peer, lease, "trained", data)

    def event_scored(self, peer: str, lease: int, **data: Any) -> None:
        self._got_done(peer, lease)
        self._agent.work.lease_done(peer, lease, "scored", data)

    def _got_done(self, peer: str, what: Any) -> None:
        if (worker := self._agent.supervisor.workers.get(peer)) is not None:
            worker.done = what


class PeerRequests:
    """What other agents may ask for."""

    def __init__(self, work: Work):
        self._work = work

    async def on_fetch(self, peer: str, samples: list[str]) -> list[Trajectory]:
        return self._work.store.get(samples)

    async def on_tool_call(self, peer: str, sample: str, number: int, turn: bytes) -> ToolCall | None:
        """What came of a tool call made here, once it is done; None for one that was not made here."""
        return await self._work.turns.tools.known(sample, number, turn) if self._work.turns else None
