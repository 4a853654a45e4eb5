"""The agent of one node: takes orders from the controller, runs the role workers, holds the samples made here.

What it does for the controller is in the `on_*` methods; what its workers tell it arrives in `WorkerEvents`; what other
agents ask of it in `PeerRequests`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import time
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any, Callable, Iterable

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from dynarl import keys, wire
from dynarl.agent.gate import Gate
from dynarl.agent.remapper import Remapper
from dynarl.agent.supervisor import Supervisor, WorkerProcess
from dynarl.agent.verifier import Verifier
from dynarl.dataflow.store import Store
from dynarl.rpc import Link
from dynarl.scheduler.policy import ROLES
from dynarl.wire import Trajectory

log = logging.getLogger(__name__)

# The controller says something every 2 s; a silent one is gone, or the network to it is.
CONTROLLER_SILENCE_S = 60.0
FETCH_TIMEOUT_S = 60.0


class Agent:
    """State of one node. `links` are up after `start()`; `run()` returns when the controller says stop or falls silent.
    """

    def __init__(self, *, node: str, home: str, rank: int, remapper: Remapper, controller: str, key_dir: Path,
                 log_dir: Path, scratch: Path, staging: Path, host: str, mpi_library: str, world_size: int):
        self.node, self.home, self.rank, self.remapper = node, home, rank, remapper
        self._scratch, self._log_dir = scratch, log_dir
        self.staging = staging
        self.store = Store()
        self.verifier: Verifier | None = None
        self._peers: dict[str, Link] = {}
        self._requests: dict[str, dict[str, Any]] = {}  # sample -> {"worker", "split"} for requests in a rollout worker
        self._figures: dict[str, dict] = {}
        self._leases: dict[int, dict] = {}  # lease -> {"workers left", "samples"}
        self._environment_open: dict[str, Any] = {}
        self._python: dict[str, Any] = {}
        self.active = home
        self._versions: dict[str, int] = {}  # role -> version of the weights in its workers
        self._gate = Gate()
        self._plan: dict | None = None
        self._plan_ready = False
        self._last_heard = time.monotonic()
        self._stop = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._keys = keys.load(key_dir, "agent")
        controller_keys = keys.load(key_dir, "controller")
        self._worker_socket = self._context.socket(zmq.ROUTER)
        # A restarted worker takes over the identity of the one that died.
        self._worker_socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._peer_socket = self._context.socket(zmq.ROUTER)
        keys.as_server(self._peer_socket, self._keys)
        self._controller_socket = self._context.socket(zmq.DEALER)
        self._controller_socket.setsockopt(zmq.IDENTITY, node.encode())
        self._controller_socket.setsockopt(zmq.LINGER, 2000)
        keys.as_client(self._controller_socket, self._keys, controller_keys.public)
        self._controller_address = controller
        self.host = host
        self._hello = {"node": node, "home": home, "rank": rank, "pid": os.getpid(), "world_size": world_size,
                       "mpi_library": mpi_library, "staging": str(staging)}

    def start(self) -> None:
        """Open the sockets. Call inside the running event loop: the authenticator belongs to it."""
        self._authenticator = keys.admit(self._context, self._keys)
        self.staging.mkdir(mode=0o700, parents=True, exist_ok=True)
        address = f"ipc://{self._scratch}/agent.sock"
        self._worker_socket.bind(address)
        port = self._peer_socket.bind_to_random_port(f"tcp://{self.host}")
        self.peer_address = f"tcp://{self.host}:{port}"
        self._controller_socket.connect(self._controller_address)
        self.supervisor = Supervisor(self.node, address, self._log_dir, self._worker_died)
        self.workers = Link(self._worker_socket, WorkerEvents(self), routed=True)
        self.peers = Link(self._peer_socket, PeerRequests(self.store), routed=True)
        self.controller = Link(self._controller_socket, self, routed=False)

    async def run(self) -> None:
        """Serve until told to stop. Workers are gone when it returns."""
        servers = [asyncio.create_task(link.serve()) for link in (self.workers, self.peers, self.controller)]
        await self.controller.emit("", "hello", **self._hello, peer_address=self.peer_address)
        watch = asyncio.create_task(self._watch_controller())
        stop = asyncio.create_task(self._stop.wait())
        done, _ = await asyncio.wait([*servers, watch, stop], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task is not stop and task.exception() is not None:
                log.error("agent stops: %s", task.exception(), exc_info=task.exception())
        await self.supervisor.stop_all()
        for task in servers + [watch, stop]:
            task.cancel()

    def close(self) -> None:
        """Leave nothing behind on the node."""
        self.supervisor.kill_all()
        shutil.rmtree(self.staging, ignore_errors=True)
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._authenticator.stop()
        self._context.destroy(linger=200)

    def request_stop(self) -> None:
        self._stop.set()

    async def _watch_controller(self) -> None:
        while (silence := time.monotonic() - self._last_heard) < CONTROLLER_SILENCE_S:
            await asyncio.sleep(CONTROLLER_SILENCE_S - silence)
        log.error("nothing heard from the controller for %.0f s: it is gone, so this agent ends", silence)

    # --- orders: life

    def event_heartbeat(self, peer: str) -> None:
        self._last_heard = time.monotonic()
        self.controller.spawn(self.controller.emit("", "alive"))

    async def on_stop(self, peer: str) -> None:
        # After the answer is out.
        asyncio.get_running_loop().call_later(0.05, self._stop.set)

    # --- orders: workers

    async def on_start_worker(self, peer: str, role: str, device: int, python: str | None, env: dict, device_kind: str,
                              limit_s: float) -> dict:
        """Start a role worker and wait until it answers. Returns {name, pid, attempt}."""
        self._python[role] = {"python": python, "env": env, "device_kind": device_kind}
        worker = self.supervisor.start(role, device, python=python, env=env, device_kind=device_kind)
        try:
            await asyncio.wait_for(asyncio.shield(worker.up), limit_s)
        except TimeoutError:
            self.supervisor.kill(worker.name)
            raise TimeoutError(f"{worker.name} was not ready within {limit_s:g} s; see {worker.log_path}") from None
        return {"name": worker.name, "pid": worker.process.pid, "attempt": worker.attempt}

    async def on_worker(
        self, peer: str, role: str, device: int, method: str, args: dict, limit_s: float | None = None
    ) -> Any:
        """Pass a call on to one role worker."""
        return await self._call_worker(self.supervisor.name_of(role, device), method, timeout_s=limit_s, **args)

    async def on_kill_workers(self, peer: str, role: str) -> int:
        """End all workers of a role (to start them afresh). Returns how many there were."""
        names = [name for name, worker in self.supervisor.workers.items() if worker.role == role]
        for name in names:
            self.supervisor.workers[name].expected_to_end = True
            self.supervisor.kill(name)
        while any(name in self.supervisor.workers for name in names):
            await asyncio.sleep(0.01)
        for name in names:
            self.workers.peer_gone(name, f"{name} was ended")
        return len(names)

    async def _call_worker(self, name: str, method: str, /, timeout_s: float | None = None, **args: Any) -> Any:
        worker = self.supervisor.workers.get(name)
        if worker is None:
            raise wire.CallError(f"{name} is not running")
        try:
            await asyncio.shield(worker.up)  # a message to a process that has not connected yet would be lost
        except RuntimeError as error:
            raise wire.CallError(str(error)) from None
        return await self.workers.call(name, method, timeout_s=timeout_s, **args)

    def _processes(self, names: list[str]) -> list[WorkerProcess]:
        """The processes behind these names. Raises CallError when one is not running."""
        if absent := [name for name in names if name not in self.supervisor.workers]:
            raise wire.CallError(f"{', '.join(absent)} not running")
        return [self.supervisor.workers[name] for name in names]

    def _check_same(self, before: list[WorkerProcess]) -> None:
        """Raises CallError when a process was replaced since: the controller has offered its work to others then."""
        for worker in before:
            if self.supervisor.workers.get(worker.name) is not worker:
                raise wire.CallError(f"{worker.name} died while its work was on the way")

    def _worker_died(self, worker: WorkerProcess, status: str, tail: list[str]) -> None:
        self.workers.peer_gone(worker.name, f"{worker.name} died: {status}")
        self._requests = {s: r for s, r in self._requests.items() if r["worker"] != worker.name}
        self._leases = {n: lease for n, lease in self._leases.items() if worker.name not in lease["workers"]}
        self._versions.pop(worker.role, None)
        if worker.role == "environment" and self.verifier is not None:
            self.verifier.process_died()
            self.controller.spawn(self.verifier.revive())
        self.controller.spawn(
            self.controller.emit(
                "",
                "worker_died",
                role=worker.role,
                device=worker.device,
                attempt=worker.attempt,
                status=status,
                tail=tail,
            )
        )

    # --- orders: prompts and rewards

    async def on_open_environment(
        self, peer: str, task: dict, seed: int, limit_s: float, tokenizer_dir: str | None = None
    ) -> None:
        self._environment_open = {"task": task, "seed": seed, "tokenizer_dir": tokenizer_dir}
        self.verifier = Verifier(self._call_environment, self._restart_environment, limit_s)
        await self._call_environment("open", **self._environment_open)

    async def _call_environment(self, method: str, /, timeout_s: float | None = None, **args: Any) -> Any:
        return await self._call_worker(self.supervisor.name_of("environment", 0), method, timeout_s=timeout_s, **args)

    async def _restart_environment(self) -> None:
        name = self.supervisor.name_of("environment", 0)
        if (worker := self.supervisor.workers.get(name)) is not None:
            worker.expected_to_end = True
            self.supervisor.kill(name)
        while name in self.supervisor.workers:
            await asyncio.sleep(0.01)
        self.workers.peer_gone(name, f"{name} was ended")
        if self._stop.is_set():  # Slurm ends a job by ending all its processes at once
            return
        worker = self.supervisor.start("environment", 0, **self._python["environment"])
        try:
            await worker.up
            await self._call_environment("open", **self._environment_open)
        except RuntimeError:
            if not self._stop.is_set():
                raise

    async def on_demonstrations(self, peer: str, start: int, count: int) -> list[dict]:
        return await self.verifier.demonstrations(start, count)

    # --- orders: generation

    async def on_generate(
        self,
        peer: str,
        requests: list[dict],
        split: str,
        temperature: float,
        seed: int,
        max_response_tokens: int,
        holders: dict[str, str],
    ) -> None:
        """Give requests ({sample, holder}) to the rollout workers here. `holders`: node -> address, for partial
        answers.
        """
        async with self._gate.passing("a request"):
            await self._submit(requests, split, temperature, seed, max_response_tokens, holders)

    async def _submit(self, requests: list[dict], split: str, temperature: float, seed: int, max_response_tokens: int,
                      holders: dict[str, str]) -> None:
        names = self._of_role("rollout")
        if not names:
            raise wire.CallError(f"{self.node} has no rollout worker")
        workers = self._processes(names)
        prompts = await self.verifier.prompts(split, [wire.prompt_of(r["sample"]) for r in requests])
        partial = await self._gather([(r["sample"], r["holder"]) for r in requests if r["holder"]], holders)
        self._check_same(workers)
        load: dict[str, int] = defaultdict(int)
        for request in self._requests.values():
            load[request["worker"]] += 1
        batches: dict[str, list[dict]] = defaultdict(list)
        for request in requests:
            sample = request["sample"]
            so_far = partial.get(sample)
            name = min(names, key=lambda n: load[n])
            load[name] += 1
            self._requests[sample] = {"worker": name, "split": split, "prompt": prompts[wire.prompt_of(sample)]}
            batches[name].append({
                "sample": sample, "prompt": prompts[wire.prompt_of(sample)],
                "response": so_far.response if so_far else b"", "logprobs": so_far.rollout_logprobs if so_far else b"",
                "max_response_tokens": max_response_tokens, "temperature": temperature, "seed": seed})
        await asyncio.gather(*(self._call_worker(name, "submit", requests=batch) for name, batch in batches.items()))

    async def on_abort(self, peer: str) -> list[dict]:
        """Stop generating. Returns [{sample, tokens}] of what was given up; their tokens are in the store here.

        Requests that finished before are not among them: they are reported by their own events.
        """
        answers = await asyncio.gather(
            *(self._call_worker(name, "abort", samples=None) for name in self._of_role("rollout"))
        )
        given_up = []
        for partial in (p for answer in answers for p in answer):
            request = self._requests.pop(partial["sample"], None)
            if request is None:
                continue
            self.store.put(Trajectory(partial["sample"], request["prompt"], partial["response"], partial["logprobs"],
                                      finish="abort", version=partial["version"]))
            given_up.append({"sample": partial["sample"], "tokens": len(partial["response"]) // 4})
        return given_up

    async def _sample_finished(self, sample: str, response: bytes, logprobs: bytes, finish: str, version: int) -> None:
        request = self._requests.pop(sample, None)
        if request is None:
            return
        verdict = await self.verifier.score(sample, request["split"], wire.prompt_of(sample), response)
        trajectory = Trajectory(
            sample, request["prompt"], response, logprobs, reward=verdict.reward, finish=finish, version=version
        )
        self.store.put(trajectory)
        await self.controller.emit(
            "",
            "finished",
            sample=sample,
            reward=verdict.reward,
            correct=verdict.correct,
            timed_out=verdict.timed_out,
            tokens=trajectory.num_response_tokens,
            prompt_tokens=trajectory.num_prompt_tokens,
            finish=finish,
            version=version,
        )

    # --- orders: scoring and training

    async def on_score(
        self, peer: str, lease: int, device: int, samples: list[dict], holders: dict[str, str], width: int
    ) -> None:
        """Compute old log-probabilities of samples ({sample, holder}) on devices [device, device + width)."""
        await self._hand_out("inference", "logprobs", lease, device, samples, holders, width)

    async def on_train(
        self, peer: str, lease: int, device: int, samples: list[dict], holders: dict[str, str], width: int
    ) -> None:
        """Accumulate the gradient of samples ({sample, holder, advantage, weight}) on devices [device, device + width).
        """
        await self._hand_out("training", "train", lease, device, samples, holders, width)

    async def _hand_out(
        self, role: str, method: str, lease: int, device: int, samples: list[dict], holders: dict[str, str], width: int
    ) -> None:
        async with self._gate.passing("a lease"):
            await self._hand_to_workers(role, method, lease, device, samples, holders, width)

    async def _hand_to_workers(
        self, role: str, method: str, lease: int, device: int, samples: list[dict], holders: dict[str, str], width: int
    ) -> None:
        names = [self.supervisor.name_of(role, d) for d in range(device, device + width)]
        workers = self._processes(names)
        found = await self._gather([(s["sample"], s["holder"]) for s in samples], holders)
        self._check_same(workers)
        payload = []
        for item in samples:
            trajectory = found[item["sample"]]
            trajectory.advantage, trajectory.weight = item.get("advantage", 0.0), item.get("weight", 1.0)
            if trajectory.old_logprobs is None and role == "training":
                # No inference role in this job: the engine's own log-probabilities stand in.
                trajectory.old_logprobs = trajectory.rollout_logprobs
            payload.append(msgspec.to_builtins(trajectory, builtin_types=(bytes,)))
        self._leases[lease] = {"leader": names[0], "workers": set(names), "left": set(names), "found": found}
        await asyncio.gather(*(self._call_worker(name, method, lease=lease, samples=payload) for name in names))

    async def on_demonstrate(self, peer: str, lease: int, device: int, samples: list[dict], width: int) -> None:
        """Accumulate the gradient of demonstrations ({prompt, response}) on devices [device, device + width)."""
        payload = [
            msgspec.to_builtins(
                Trajectory(f"0:{lease}:{i}", s["prompt"], s["response"], b"", b""), builtin_types=(bytes,)
            )
            for i, s in enumerate(samples)
        ]
        names = [self.supervisor.name_of("training", d) for d in range(device, device + width)]
        self._leases[lease] = {"leader": names[0], "workers": set(names), "left": set(names), "found": {}}
        await asyncio.gather(*(self._call_worker(name, "train", lease=lease, samples=payload) for name in names))

    def _lease_done(self, peer: str, lease: int, event: str, data: dict) -> None:
        """One worker of the lease is done; tell the controller when the last is (tensor parallel workers do the same
        work).
        """
        entry = self._leases.get(lease)
        if entry is None:
            return
        entry["left"].discard(peer)
        if entry["left"]:
            return
        del self._leases[lease]
        if event == "scored":
            for sample, trajectory in entry["found"].items():
                trajectory.old_logprobs = data["logprobs"][sample]
                trajectory.ref_logprobs = (data.get("ref_logprobs") or {}).get(sample)
                self.store.put(trajectory)
            data = {"stats": compare(entry["found"].values())}
        self.controller.spawn(self.controller.emit("", event, lease=lease, **data))

    async def _gather(self, wanted: list[tuple[str, str]], holders: dict[str, str]) -> dict[str, Trajectory]:
        """Trajectories by sample, from here or from the nodes that hold them."""
        by_holder: dict[str, list[str]] = defaultdict(list)
        for sample, holder in wanted:
            by_holder[holder].append(sample)

        async def fetch(holder: str, samples: list[str]) -> list[Trajectory]:
            if holder == self.node:
                return self.store.get(samples)
            answer = await self._peer(holders[holder]).call("", "fetch", timeout_s=FETCH_TIMEOUT_S, samples=samples)
            return msgspec.convert(answer, list[Trajectory])

        parts = await asyncio.gather(*(fetch(h, s) for h, s in by_holder.items()))
        return {t.sample: t for part in parts for t in part}

    def _peer(self, address: str) -> Link:
        if address not in self._peers:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, self.node.encode())
            keys.as_client(socket, self._keys, self._keys.public)
            socket.connect(address)
            link = self._peers[address] = Link(socket, None, routed=False)
            link.spawn(link.serve())
        return self._peers[address]

    async def on_halt(self, peer: str, role: str) -> None:
        """Drop all work, all samples and any half-done change of roles; `role` is the active one from here on."""
        await self._gate.close()
        await self.on_abort(peer)
        self._leases.clear()
        self._plan, self.active = None, role
        self.store.forget(sys.maxsize)
        await asyncio.gather(
            *(self._call_worker(name, "sleep") for other in ROLES if other != role for name in self._of_role(other))
        )
        await asyncio.gather(*(self._call_worker(name, "wake") for name in self._of_role(role)))
        self._gate.open()

    async def on_forget(self, peer: str, iteration: int) -> None:
        """Trajectories up to this iteration are trained; drop them."""
        self.store.forget(iteration)
        if self.verifier is not None:
            self.verifier.forget_prompts()

    # --- orders: weights and epochs

    def version_dir(self, version: int) -> Path:
        return self.staging / f"v{version}"

    async def on_stage(self, peer: str, version: int, source: str) -> None:
        """Make the staging directory of a version from a model directory on the shared file system."""
        self._stage(version, Path(source), lambda path: True)

    def _stage(self, version: int, source: Path, wanted: Callable[[Path], bool]) -> None:
        target = self.version_dir(version)
        target.mkdir(exist_ok=True)
        for path in source.iterdir():
            if path.is_file() and wanted(path) and not (target / path.name).exists():
                shutil.copyfile(path, target / path.name)

    # --- orders: one change of roles, in the order of its phases

    async def on_prepare(self, peer: str, plan: dict) -> dict:
        """Take note of a plan {epoch, ranks, moves: {node: role}, version, digest}; wake what it needs here.

        Returns {ready, reason}. Nothing that runs is touched.
        """
        self._plan = plan
        self._plan_ready, reason = True, ""
        role = plan["moves"].get(self.node)
        if role is not None and not self._of_role(role):
            self._plan_ready, reason = False, f"{self.node} has no {role} worker"
        return {"ready": self._plan_ready, "reason": reason}

    async def on_vote(self, peer: str, epoch: int, limit_s: float) -> dict:
        """Meet the other members in MPI: is everybody ready, with the same plan (or, after the transfer, the same
        weights)?
        """
        plan = self._current(epoch)
        digest = zlib.crc32(
            msgspec.json.encode([plan["epoch"], sorted(plan["moves"].items()), plan["version"], plan["digest"]])
        )
        return await self.remapper.vote(epoch, plan["ranks"], self._plan_ready, digest, limit_s)

    async def on_quiesce(self, peer: str, epoch: int) -> dict:
        """Stop the active role here, if the plan moves this node. Returns {given_up: [{sample, tokens}], unstarted:
        [lease]}.
        """
        plan, result = self._current(epoch), {"given_up": [], "unstarted": []}
        if self.node not in plan["moves"]:
            return result
        await self._gate.close()
        if self.active == "rollout":
            result["given_up"] = await self.on_abort(peer)
        else:
            names = self._of_role(self.active)
            leases = list(self._leases)
            answers = await asyncio.gather(*(self._call_worker(name, "cancel", leases=leases) for name in names))
            # The first worker of a replica has the say, the others follow it.
            result["unstarted"] = sorted(lease for name, answer in zip(names, answers) for lease in answer
                                         if self._leases.get(lease, {}).get("leader") == name)
            for lease in result["unstarted"]:
                del self._leases[lease]
            await asyncio.gather(*(self._call_worker(name, "drain") for name in names))
        return result

    async def on_transfer(self, peer: str, epoch: int) -> None:
        """Put the old role to sleep, wake the new one and give it the weights of the plan's version from this node's
        staging.

        Memory is released before it is acquired. What was loaded is checked by the next vote.
        """
        plan = self._current(epoch)
        role = plan["moves"].get(self.node)
        if role is None:
            return
        await asyncio.gather(*(self._call_worker(name, "sleep") for name in self._of_role(self.active)))
        await asyncio.gather(*(self._call_worker(name, "wake") for name in self._of_role(role)))
        digests = await self._load(role, plan["version"])
        self._plan_ready = all(digest == plan["digest"] for digest in digests)

    async def on_commit(self, peer: str, epoch: int) -> None:
        """The new role is the active one from here on."""
        role = self._current(epoch)["moves"].get(self.node)
        if role is not None:
            self.active = role
        self._plan = None
        self._gate.open()

    async def on_rollback(self, peer: str, epoch: int) -> None:
        """The epoch was cancelled: the old role goes on."""
        if self._plan is None or self._plan["epoch"] != epoch:
            return
        self.remapper.forget(self._plan["ranks"])
        role = self._plan["moves"].get(self.node)
        self._plan = None
        try:
            if role is not None:
                await asyncio.gather(*(self._call_worker(name, "sleep") for name in self._of_role(role)))
                await asyncio.gather(*(self._call_worker(name, "wake") for name in self._of_role(self.active)))
        finally:
            self._gate.open()

    def _current(self, epoch: int) -> dict:
        if self._plan is None or self._plan["epoch"] != epoch:
            raise wire.CallError(f"{self.node} has no plan for epoch {epoch}")
        return self._plan

    def _of_role(self, role: str) -> list[str]:
        return sorted(w.name for w in self.supervisor.workers.values() if w.role == role and w.up.done())

    async def on_refresh(self, peer: str, version: int) -> list[int]:
        """Load a staged version into the active role's workers, where they do not have it yet."""
        return await self._load(self.active, version)

    async def on_loaded(self, peer: str, role: str, version: int) -> None:
        """The controller gave the workers of a role this version by other means (a build, an optimizer step)."""
        self._versions[role] = version

    async def _load(self, role: str, version: int) -> list[int]:
        """Weights of `version` into the workers of `role`, unless they hold it. Returns the digests of what was read.
        """
        if self._versions.get(role) == version:
            return []
        answers = await asyncio.gather(
            *(
                self._call_worker(name, "load", model_dir=str(self.version_dir(version)), version=version)
                for name in self._of_role(role)
            )
        )
        self._versions[role] = version
        return [answer["digest"] for answer in answers if answer and "digest" in answer]

    async def on_broadcast(
        self,
        peer: str,
        epoch: int,
        ranks: list[int],
        root: int,
        version: int,
        num_bytes: int,
        source: str,
        keep: list[int],
        limit_s: float,
    ) -> int:
        """Receive (or, at the root, send) the weights of a version into staging. Returns their CRC-32.

        The small files beside them (configuration, tokenizer) come from the model directory `source` on the shared file
        system. Staged versions that are not in `keep` are dropped.
        """
        self._stage(version, Path(source), lambda path: path.suffix != ".safetensors")
        checksum = await self.remapper.broadcast(
            epoch, ranks, root, self.version_dir(version) / "model.safetensors", num_bytes, limit_s
        )
        for path in self.staging.glob("v*"):
            if int(path.name[1:]) not in keep:
                shutil.rmtree(path, ignore_errors=True)
        return checksum


def compare(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """How far the engine's token probabilities are from the trainer's: sums and maximum of |p_engine - p_trainer|."""
    total, largest, count = 0.0, 0.0, 0
    for trajectory in trajectories:
        engine = np.frombuffer(trajectory.rollout_logprobs, dtype="<f4").astype(np.float64)
        trainer = np.frombuffer(trajectory.old_logprobs, dtype="<f4").astype(np.float64)
        if len(engine):
            difference = np.abs(np.exp(engine) - np.exp(trainer))
            total, largest, count = (
                total + float(difference.sum()),
                max(largest, float(difference.max())),
                count + len(engine),
            )
    return {"rollout_probs_diff": total, "rollout_probs_diff_max": largest, "tokens": float(count)}


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
        self._agent.workers.spawn(self._agent._sample_finished(sample, response, logprobs, finish, version))

    def event_figures(self, peer: str, **figures: Any) -> None:
        self._agent.controller.spawn(self._agent.controller.emit("", "figures", worker=peer, **figures))

    def event_trained(self, peer: str, lease: int, **data: Any) -> None:
        self._agent._lease_done(peer, lease, "trained", data)

    def event_scored(self, peer: str, lease: int, **data: Any) -> None:
        self._agent._lease_done(peer, lease, "scored", data)


class PeerRequests:
    """What other agents may ask for."""

    def __init__(self, store: Store):
        self._store = store

    async def on_fetch(self, peer: str, samples: list[str]) -> list[Trajectory]:
        return self._store.get(samples)
