"""The agents of one step, as the controller sees them: starting the step, calling agents, noticing that it ended."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable

import zmq
import zmq.asyncio

from dynarl import keys, rundir
from dynarl.config.schema import Config
from dynarl.errors import SlurmError
from dynarl.parent import in_child_of
from dynarl.rpc import Link
from dynarl.slurm import environ
from dynarl.slurm.srun import Component, StepSpec, command_line

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
# An agent may be silent inside an MPI phase (up to the vote's deadline); one that is silent for longer is on a lost
# node. srun does not tell: with --no-kill it waits for the nodes that are left.
AGENT_SILENCE_S = 20.0


class StepLost(RuntimeError):
    """The step is of no use any more: it ended, or agents on `nodes` fell silent."""

    def __init__(self, message: str, nodes: frozenset[str] = frozenset()):
        super().__init__(message)
        self.nodes = nodes


@dataclass(frozen=True)
class AgentInfo:
    """What an agent said in its hello."""

    node: str
    home: str
    rank: int
    peer_address: str
    staging: str
    mpi_library: str
    world_size: int
    pid: int

    @property
    def host(self) -> str:
        """Address of the node, without the port."""
        return self.peer_address.removeprefix("tcp://").rpartition(":")[0]


def agent_command(
    config: Config, address: str, run: Path, attempt: int, python: str = sys.executable
) -> tuple[str, ...]:
    """The argv of an agent; under mpi4py's runner, so that an uncaught exception ends the world instead of hanging it.
    """
    optional = [("--scratch", config.cluster.scratch), ("--interface", config.cluster.interface)]
    return (
        python,
        "-m",
        "mpi4py",
        "-m",
        "dynarl.agent",
        "--controller",
        address,
        "--run-dir",
        str(run),
        "--attempt",
        str(attempt),
        "--staging",
        config.cluster.staging,
        "--max-requeues",
        str(config.cluster.max_requeues if config.cluster.requeue else 0),
        *(part for name, value in optional if value for part in (name, value)),
    )


def step_spec(config: Config, nodes: dict[str, str], address: str, run: Path, attempt: int) -> StepSpec:
    """The heterogeneous step for these nodes ({node: home role}): a component per role."""
    command = agent_command(config, address, run, attempt)
    components = tuple(
        Component(role, tuple(n for n, r in nodes.items() if r == role), command, {})
        for role in ("rollout", "inference", "training")
    )
    return StepSpec(
        components,
        str(rundir.logs(run, attempt)),
        mpi=config.cluster.mpi,
        cpus_per_node=config.cluster.cpus_per_node,
        gpus_per_node=config.cluster.devices_per_node if config.cluster.device == "cuda" else None,
        extra_args=tuple(config.cluster.srun_args),
    )


class Fleet:
    """All agents, through the steps of one start of the controller (one socket for all of them).

    `listener` gets the agents' events as methods `event_<name>(node, **data)`.
    """

    def __init__(self, config: Config, run: Path, attempt: int, host: str):
        self._config, self._run, self._attempt = config, run, attempt
        self._context = zmq.asyncio.Context()
        socket = self._socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        own = keys.load(rundir.keys(run), "controller")
        self._authenticator = keys.admit(self._context, keys.load(rundir.keys(run), "agent"))
        keys.as_server(socket, own)
        self.address = f"tcp://{host}:{socket.bind_to_random_port(f'tcp://{host}')}"
        self.listener: Any = None
        self.link = Link(socket, self, routed=True, lasting=True)
        self._server = asyncio.create_task(self.link.serve())
        self.agents: dict[str, AgentInfo] = {}
        self._unanswered: dict[str, int] = {}  # heartbeats since the last sign of life
        self._hello = asyncio.Event()
        self._srun: asyncio.subprocess.Process | None = None
        self.ended: asyncio.Task[int] | None = None
        self.is_up = False  # all agents of the step were there, and nobody told them to stop
        self._heartbeat = asyncio.create_task(self._beat())

    # --- the step

    async def launch(self, nodes: dict[str, str], timeout_s: float = 120.0) -> list[str]:
        """Start the step on `nodes` and wait for all agents. Returns the command line. Raises SlurmError."""
        self.agents.clear()
        self._unanswered.clear()
        self._hello.clear()
        self.is_up = False
        argv = command_line(step_spec(self._config, nodes, self.address, self._run, self._attempt))
        log.info("starting the step: %s", " ".join(argv))
        # scancel ends this process first. An srun that then hangs in its own way out would be nobody's child, and a Slurm
        # that follows the parents of processes (proctrack/linuxproc) would wait for it for ever.
        self._srun = await asyncio.create_subprocess_exec(
            *argv,
            env=environ.for_srun(os.environ),
            stdin=asyncio.subprocess.DEVNULL,
            preexec_fn=functools.partial(in_child_of, os.getpid()),
        )
        self.ended = asyncio.create_task(self._wait())
        hello = asyncio.create_task(self._all_here(set(nodes)))
        await asyncio.wait({hello, self.ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if hello.done():
            self.is_up = True
            return argv
        hello.cancel()
        absent = sorted(set(nodes) - set(self.agents))
        if self.ended.done():
            raise SlurmError(
                f"the step ended with status {self.ended.result()} before its agents were there "
                f"(absent: {', '.join(absent)}); "
                f"see {rundir.logs(self._run, self._attempt)}/*-agent.log"
            )
        await self.kill()
        raise SlurmError(f"agents of {', '.join(absent)} did not report within {timeout_s:g} s; "
                         f"see {rundir.logs(self._run, self._attempt)}/*-agent.log")

    async def _all_here(self, nodes: set[str]) -> None:
        while not nodes <= set(self.agents):
            self._hello.clear()
            await self._hello.wait()

    async def _wait(self) -> int:
        code = await self._srun.wait()
        for node in self.agents:
            self.link.peer_gone(node, f"{node}: the step has ended")
        return code

    async def stop(self, grace_s: float = 10.0) -> None:
        """End the step in good order; kill it when it does not end."""
        self.is_up = False
        if self._srun is None or self.ended.done():
            return
        await asyncio.gather(
            *(self.link.call(node, "stop", timeout_s=5.0) for node in self.agents), return_exceptions=True
        )
        try:
            await asyncio.wait_for(asyncio.shield(self.ended), grace_s)
        except TimeoutError:
            log.warning("the step did not end within %g s after its agents were told to; ending srun", grace_s)
            await self.kill()

    async def kill(self) -> None:
        """End srun by force; srun ends the tasks."""
        if self.ended.done():
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._srun.send_signal(number)
            done, _ = await asyncio.wait({self.ended}, timeout=10.0)
            if done:
                return

    async def close(self) -> None:
        for task in (self._heartbeat, self._server):
            task.cancel()
        await asyncio.gather(self._heartbeat, self._server, return_exceptions=True)
        self._authenticator.stop()
        self._socket.close(linger=200)
        self._context.term()

    async def _beat(self) -> None:
        while True:
            for node in list(self.agents):
                self._unanswered[node] = self._unanswered.get(node, 0) + 1
                await self.link.beat(node, "heartbeat")
            await asyncio.sleep(HEARTBEAT_S)

    async def lost(self) -> None:
        """Raises StepLost when the step, once it is up, ends unasked or an agent falls silent."""
        while True:
            if self.is_up:
                await asyncio.wait({self.ended}, timeout=HEARTBEAT_S)
            if not self.is_up:
                await asyncio.sleep(HEARTBEAT_S / 4)
                continue
            if self.ended.done():
                raise StepLost(f"the step ended with status {self.ended.result()}")
            # Counted, not timed: if this process itself stands still for a while, it has not asked either.
            silent = frozenset(n for n, count in self._unanswered.items() if count * HEARTBEAT_S > AGENT_SILENCE_S)
            if silent:
                raise StepLost(f"no sign of life from {', '.join(sorted(silent))} for {AGENT_SILENCE_S:g} s", silent)

    # --- calls

    async def call(self, node: str, method: str, /, timeout_s: float | None = None, **args: Any) -> Any:
        return await self.link.call(node, method, timeout_s=timeout_s, **args)

    async def call_each(
        self, nodes: Iterable[str], method: str, /, timeout_s: float | None = None, **args: Any
    ) -> dict[str, Any]:
        """The same call to several agents at once; answers by node. Raises the first error, after all have answered."""
        nodes = list(nodes)
        answers = await asyncio.gather(
            *(self.call(node, method, timeout_s=timeout_s, **args) for node in nodes), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return dict(zip(nodes, answers))

    async def worker(
        self, node: str, role: str, device: int, method: str, /, timeout_s: float | None = None, **args: Any
    ) -> Any:
        """Call a method of one role worker."""
        return await self.call(node, "worker", limit_s=timeout_s, role=role, device=device, method=method, args=args)

    # --- events

    def event_alive(self, peer: str) -> None:
        self._unanswered[peer] = 0

    def event_hello(self, peer: str, **data: Any) -> None:
        self._unanswered[peer] = 0
        self.agents[peer] = AgentInfo(**data)
        self._hello.set()
        self.listener.event_agent_up(self.agents[peer])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("event_"):
            return getattr(self.listener, name)
        raise AttributeError(name)
