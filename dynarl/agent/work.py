"""The samples of one node: prompts, answers, verdicts, and the hand-outs of them to the role workers here."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Iterable

import msgspec
import numpy as np
import zmq

from dynarl import keys, wire
from dynarl.agent.gate import Gate
from dynarl.agent.supervisor import WorkerProcess
from dynarl.agent.verifier import Verifier
from dynarl.dataflow import routing
from dynarl.dataflow.store import Store
from dynarl.rpc import Link
from dynarl.wire import Trajectory

if TYPE_CHECKING:
    from dynarl.agent.agent import Agent

FETCH_TIMEOUT_S = 60.0


class Work:
    """Orders of the controller about samples (`on_*`), and what becomes of them. `gate` closes while roles change."""

    def __init__(self, agent: Agent, gate: Gate):
        self._agent, self._gate = agent, gate
        self.store = Store()
        self.verifier: Verifier | None = None
        self.requests: dict[str, dict[str, Any]] = {}  # sample -> {"worker", "split", "prompt"}, while a rollout worker has it
        self._homes: dict[str, str] = {}  # sample -> the worker that had it last
        self._leases: dict[int, dict] = {}  # lease -> {"leader", "workers", "left", "found"}
        self._environment_open: dict[str, Any] = {}
        self._peers: dict[str, Link] = {}

    def worker_died(self, worker: WorkerProcess) -> list[str]:
        """What it held is offered again by the controller, with all that other workers of its role have here. Returns
        the samples whose answers go on from what is recorded here.
        """
        held = [sample for sample in self.requests if self.store.has_part(sample)] if worker.role == "rollout" else []
        self.workers_ended(worker.role)
        if worker.role == "environment" and self.verifier is not None:
            self.verifier.process_died()
            self._agent.controller.spawn(self.verifier.revive())
        return held

    def workers_ended(self, role: str) -> None:
        """Forget what the workers of a role have here: one that dies takes the others with it."""
        prefix = self._agent.supervisor.name_of(role, "")
        if role == "rollout":
            self.requests.clear()
        self._leases = {
            n: lease for n, lease in self._leases.items() if not any(w.startswith(prefix) for w in lease["workers"])
        }

    def is_busy(self, worker: str) -> bool:
        return any(request["worker"] == worker for request in self.requests.values()) or any(
            worker in lease["left"] for lease in self._leases.values()
        )

    async def give_back_leases(self, role: str, limit_s: float | None = None) -> list[int]:
        """Cancel the leases that the workers of `role` have not started, and have them finish the others. A worker that
        has not done so in time is ended.
        """
        names = self._agent.of_role(role)
        leases = list(self._leases)
        ask = self._agent.call_or_end
        answers = await asyncio.gather(*(ask(name, "cancel", limit_s, leases=leases) for name in names))
        # The first worker of a replica has the say, the others follow it.
        unstarted = sorted(lease for name, answer in zip(names, answers) for lease in answer
                           if self._leases.get(lease, {}).get("leader") == name)
        for lease in unstarted:
            del self._leases[lease]
        await asyncio.gather(*(ask(name, "drain", limit_s) for name in names))
        return unstarted

    async def drop_all(self) -> None:
        """Forget all work and all samples."""
        await self.on_abort("")
        self._leases.clear()
        self.store.forget(sys.maxsize)

    # --- prompts and rewards

    async def on_open_environment(
        self, peer: str, task: dict, seed: int, limit_s: float, tokenizer_dir: str | None = None
    ) -> None:
        self._environment_open = {"task": task, "seed": seed, "tokenizer_dir": tokenizer_dir}
        self.verifier = Verifier(self._call_environment, self._restart_environment, limit_s)
        await self._call_environment("open", **self._environment_open)

    async def _call_environment(self, method: str, /, timeout_s: float | None = None, **args: Any) -> Any:
        return await self._agent.call_worker(self._agent.supervisor.name_of("environment", 0), method, timeout_s=timeout_s, **args)

    async def _restart_environment(self) -> None:
        name = self._agent.supervisor.name_of("environment", 0)
        if (worker := self._agent.supervisor.workers.get(name)) is not None:
            worker.expected_to_end = True
            self._agent.supervisor.kill(name)
        while name in self._agent.supervisor.workers:
            await asyncio.sleep(0.01)
        self._agent.workers.peer_gone(name, f"{name} was ended")
        if self._agent.stopping:  # Slurm ends a job by ending all its processes at once
            return
        worker = self._agent.supervisor.start("environment", 0, **self._agent.start_settings["environment"])
        try:
            await worker.up
            await self._call_environment("open", **self._environment_open)
        except RuntimeError:
            if not self._agent.stopping:
                raise

    async def on_demonstrations(self, peer: str, start: int, count: int) -> list[dict]:
        return await self.verifier.demonstrations(start, count)

    # --- generation

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
            try:
                await self._submit(requests, split, temperature, seed, max_response_tokens, holders)
            except BaseException:  # they are offered to others now
                for request in requests:
                    self.requests.pop(request["sample"], None)
                raise

    async def _submit(self, requests: list[dict], split: str, temperature: float, seed: int, max_response_tokens: int,
                      holders: dict[str, str]) -> None:
        names = self._agent.of_role("rollout")
        if not names:
            raise wire.CallError(f"{self._agent.node} has no rollout worker")
        workers = self._agent.processes(names)
        prompts = await self.verifier.prompts(split, [wire.prompt_of(r["sample"]) for r in requests])
        partial = await self._gather([(r["sample"], r["holder"]) for r in requests if r["holder"]], holders)
        self._agent.check_same(workers)
        places = self._places(names, [r["sample"] for r in requests])
        batches: dict[str, list[dict]] = defaultdict(list)
        for request in requests:
            sample = request["sample"]
            if so_far := partial.get(sample):
                self.store.put(so_far)  # what is sampled from here on is added to it
            name = self._homes[sample] = places[sample]
            self.requests[sample] = {"worker": name, "split": split, "prompt": prompts[wire.prompt_of(sample)]}
            batches[name].append({
                "sample": sample, "prompt": prompts[wire.prompt_of(sample)],
                "response": so_far.response if so_far else b"", "logprobs": so_far.rollout_logprobs if so_far else b"",
                "max_response_tokens": max_response_tokens, "temperature": temperature, "seed": seed})
        await asyncio.gather(*(self._agent.call_worker(name, "submit", requests=batch) for name, batch in batches.items()))

    def parts_came(self, worker: str, parts: list[dict]) -> None:
        """Keep what a rollout worker has sampled of answers that go on: all that is left of them should it die."""
        for part in parts:
            request = self.requests.get(part["sample"])
            if request is not None and request["worker"] == worker:
                self.store.extend(prompt=request["prompt"], **part)

    def _places(self, names: list[str], samples: list[str]) -> dict[str, str]:
        """Sample -> worker: even numbers, groups whole where they can be, and what was here before where it was."""
        running: dict[str, list[routing.Request]] = {name: [] for name in names}
        for sample, held in self.requests.items():
            if held["worker"] in running:
                running[held["worker"]].append(routing.Request(sample, wire.group_of(sample), 0, 1))
        most = len(samples) + len(self.requests)  # how many a node gets is decided by the controller
        assigned = routing.route(
            (routing.Request(s, wire.group_of(s), 0, 1, self._homes.get(s), "preferred") for s in samples),
            (routing.Instance(name, most, mine) for name, mine in running.items()),
        ).assigned
        return {sample: name for name, mine in assigned.items() for sample in mine}

    async def on_abort(
        self, peer: str, samples: list[str] | None = None, limit_s: float | None = None
    ) -> list[dict]:
        """Stop generating (None: everything). Returns [{sample, tokens}] of what was given up; their tokens are in the
        store here.

        Requests that finished before are not among them: they are reported by their own events. A worker that has not
        answered in time is ended.
        """
        answers = await asyncio.gather(
            *(self._agent.call_or_end(name, "abort", limit_s, samples=samples) for name in self._agent.of_role("rollout"))
        )
        given_up = []
        for partial in (p for answer in answers for p in answer):
            request = self.requests.pop(partial["sample"], None)
            if request is None:
                continue
            self.store.put(Trajectory(partial["sample"], request["prompt"], partial["response"], partial["logprobs"],
                                      finish="abort", version=partial["version"]))
            given_up.append({"sample": partial["sample"], "tokens": len(partial["response"]) // 4})
        return given_up

    async def sample_finished(self, sample: str, response: bytes, logprobs: bytes, finish: str, version: int) -> None:
        request = self.requests.pop(sample, None)
        if request is None:
            return
        verdict = await self.verifier.score(sample, request["split"], wire.prompt_of(sample), response)
        trajectory = Trajectory(
            sample, request["prompt"], response, logprobs, reward=verdict.reward, finish=finish, version=version
        )
        self.store.put(trajectory)
        await self._agent.controller.emit(
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

    # --- scoring and training

    async def on_score(
        self, peer: str, lease: int, devices: list[int], samples: list[dict], holders: dict[str, str]
    ) -> None:
        """Compute old log-probabilities of samples ({sample, holder}) on these devices."""
        await self._hand_out("inference", "logprobs", lease, devices, samples, holders)

    async def on_train(
        self, peer: str, lease: int, devices: list[int], samples: list[dict], holders: dict[str, str]
    ) -> None:
        """Accumulate the gradient of samples ({sample, holder, advantage, weight}) on these devices."""
        await self._hand_out("training", "train", lease, devices, samples, holders)

    async def _hand_out(
        self, role: str, method: str, lease: int, devices: list[int], samples: list[dict], holders: dict[str, str]
    ) -> None:
        async with self._gate.passing("a lease"):
            await self._hand_to_workers(role, method, lease, devices, samples, holders)

    async def _hand_to_workers(
        self, role: str, method: str, lease: int, devices: list[int], samples: list[dict], holders: dict[str, str]
    ) -> None:
        names = [self._agent.supervisor.name_of(role, d) for d in devices]
        workers = self._agent.processes(names)
        found = await self._gather([(s["sample"], s["holder"]) for s in samples], holders)
        self._agent.check_same(workers)
        payload = []
        for item in samples:
            trajectory = found[item["sample"]]
            trajectory.advantage, trajectory.weight = item.get("advantage", 0.0), item.get("weight", 1.0)
            if trajectory.old_logprobs is None and role == "training":
                # No inference role in this job: the engine's own log-probabilities stand in.
                trajectory.old_logprobs = trajectory.rollout_logprobs
            payload.append(msgspec.to_builtins(trajectory, builtin_types=(bytes,)))
        self._leases[lease] = {"leader": names[0], "workers": set(names), "left": set(names), "found": found}
        await asyncio.gather(*(self._agent.call_worker(name, method, lease=lease, samples=payload) for name in names))

    async def on_demonstrate(self, peer: str, lease: int, devices: list[int], samples: list[dict]) -> None:
        """Accumulate the gradient of demonstrations ({prompt, response}) on these devices."""
        payload = [
            msgspec.to_builtins(
                Trajectory(f"0:{lease}:{i}", s["prompt"], s["response"], b"", b""), builtin_types=(bytes,)
            )
            for i, s in enumerate(samples)
        ]
        names = [self._agent.supervisor.name_of("training", d) for d in devices]
        self._leases[lease] = {"leader": names[0], "workers": set(names), "left": set(names), "found": {}}
        await asyncio.gather(*(self._agent.call_worker(name, "train", lease=lease, samples=payload) for name in names))

    def lease_done(self, peer: str, lease: int, event: str, data: dict) -> None:
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
        self._agent.controller.spawn(self._agent.controller.emit("", event, lease=lease, **data))

    async def _gather(self, wanted: list[tuple[str, str]], holders: dict[str, str]) -> dict[str, Trajectory]:
        """Trajectories by sample, from here or from the nodes that hold them."""
        by_holder: dict[str, list[str]] = defaultdict(list)
        for sample, holder in wanted:
            by_holder[holder].append(sample)

        async def fetch(holder: str, samples: list[str]) -> list[Trajectory]:
            if holder == self._agent.node:
                return self.store.get(samples)
            answer = await self._peer(holders[holder]).call("", "fetch", timeout_s=FETCH_TIMEOUT_S, samples=samples)
            return msgspec.convert(answer, list[Trajectory])

        parts = await asyncio.gather(*(fetch(h, s) for h, s in by_holder.items()))
        return {t.sample: t for part in parts for t in part}

    def _peer(self, address: str) -> Link:
        if address not in self._peers:
            socket = self._agent.context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, self._agent.node.encode())
            keys.as_client(socket, self._agent.keys, self._agent.keys.public)
            socket.connect(address)
            link = self._peers[address] = Link(socket, None, routed=False)
            link.spawn(link.serve())
        return self._peers[address]

    async def on_forget(self, peer: str, iteration: int) -> None:
        """Trajectories up to this iteration are trained; drop them."""
        self.store.forget(iteration)
        self._homes.clear()
        if self.verifier is not None:
            self.verifier.forget_prompts()


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
