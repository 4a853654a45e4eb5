"""The samples of one node: prompts, answers, verdicts, and the hand-outs of them to the role workers here."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections import defaultdict
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Iterable

import msgspec
import numpy as np
import zmq

from dynarl import keys, wire
from dynarl.agent.gate import Gate
from dynarl.agent.supervisor import WorkerProcess
from dynarl.agent.tools import Tools, ToolSeat
from dynarl.agent.turns import Turns
from dynarl.agent.verifier import Seat, Verifier
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
        self.turns: Turns | None = None  # of a task with tools
        # sample -> {worker, split, prompt, answer: Trajectory so far, at_tool, and what else an engine is told}, while
        # the rollout worker has it or (at_tool) a tool is at it
        self.requests: dict[str, dict[str, Any]] = {}
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
        seats: list[Seat | None] = [self.verifier, *(self.turns.tools.seats if self.turns else ())]
        if worker.role == "environment" and worker.device < len(seats) and (seat := seats[worker.device]) is not None:
            seat.process_died()
            self._agent.controller.spawn(seat.revive())
        return held

    def workers_ended(self, role: str) -> None:
        """Forget what the workers of a role have here: one that dies takes the others with it."""
        prefix = self._agent.supervisor.name_of(role, "")
        if role == "rollout":
            self.requests.clear()
        self._leases = {
            n: lease for n, lease in self._leases.items() if not any(w.startswith(prefix) for w in lease["workers"])
        }
        self._agent.roles.sharing.look()

    def has_work(self, role: str) -> bool:
        """Whether something that was handed to a role here is not done."""
        if role == "rollout":
            return bool(self.requests)
        prefix = self._agent.supervisor.name_of(role, "")
        return any(worker.startswith(prefix) for lease in self._leases.values() for worker in lease["workers"])

    def is_busy(self, worker: str) -> bool:
        return any(
            request["worker"] == worker and not request["at_tool"] for request in self.requests.values()
        ) or any(
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
        self.verifier = self._seat(Verifier, 0, limit_s)
        opened = await self._call_environment(0, "open", **self._environment_open)
        if opened["call_end"] is not None:
            devices = range(1, 1 + task["tool_workers"])
            seats = [self._seat(ToolSeat, device, task["tool_timeout_s"]) for device in devices]
            tools = Tools(seats, self.store, opened["call_end"], opened["no_answer"])
            self.turns = Turns(self._agent, self, self._gate, tools, task["max_tool_calls"])
            await asyncio.gather(*(self._restart_environment(device) for device in devices))

    def _seat(self, kind: type, device: int, limit_s: float) -> Any:
        call, restart = self._call_environment, self._restart_environment
        return kind(functools.partial(call, device), functools.partial(restart, device), limit_s)

    async def _call_environment(self, device: int, method: str, /, timeout_s: float | None = None, **args: Any) -> Any:
        name = self._agent.supervisor.name_of("environment", device)
        return await self._agent.call_worker(name, method, timeout_s=timeout_s, **args)

    async def _restart_environment(self, device: int) -> None:
        name = self._agent.supervisor.name_of("environment", device)
        if (worker := self._agent.supervisor.workers.get(name)) is not None:
            worker.expected_to_end = True
            self._agent.supervisor.kill(name)
        while name in self._agent.supervisor.workers:
            await asyncio.sleep(0.01)
        self._agent.workers.peer_gone(name, f"{name} was ended")
        if self._agent.stopping:  # Slurm ends a job by ending all its processes at once
            return
        worker = self._agent.supervisor.start("environment", device, **self._agent.start_settings["environment"])
        try:
            await worker.up
            await self._call_environment(device, "open", **self._environment_open)
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
        order: str = "priority",
    ) -> None:
        """Give requests ({sample, holder}) to the rollout workers here. `holders`: node -> address, for partial
        answers.
        """
        names = self._agent.of_role("rollout")
        if not names:
            raise wire.CallError(f"{self._agent.node} has no rollout worker")
        workers = self._agent.processes(names)
        async with self._at_devices("rollout", workers), self._gate.passing("a request"):
            try:
                await self._submit(workers, requests, split, temperature, seed, max_response_tokens, holders, order)
            except BaseException:  # they are offered to others now
                for request in requests:
                    self.requests.pop(request["sample"], None)
                raise

    def _at_devices(self, role: str, workers: list[WorkerProcess]) -> AbstractAsyncContextManager[None]:
        """Around a hand-out to a role that had these workers when it came. Raises CallError when they died while it
        waited for the devices."""
        return self._agent.roles.sharing.turn(role, lambda: self._agent.check_same(workers))

    async def _submit(self, workers: list[WorkerProcess], requests: list[dict], split: str, temperature: float,
                      seed: int, max_response_tokens: int, holders: dict[str, str], order: str) -> None:
        prompts = await self.verifier.prompts(split, [wire.prompt_of(r["sample"]) for r in requests])
        partial = await self._gather([(r["sample"], r["holder"]) for r in requests if r["holder"]], holders)
        self._agent.check_same(workers)
        places = self._places([worker.name for worker in workers], [r["sample"] for r in requests])
        batches: dict[str, list[dict]] = defaultdict(list)
        for request in requests:
            sample, prompt = request["sample"], prompts[wire.prompt_of(request["sample"])]
            name = self._homes[sample] = places[sample]
            answer = partial.get(sample) or Trajectory(sample, prompt, b"", b"")
            self.store.begin(answer)
            entry = self.requests[sample] = {
                "worker": name, "split": split, "prompt": prompt, "at_tool": False, "answer": answer,
                "max_response_tokens": max_response_tokens, "temperature": temperature, "seed": seed,
                "order": order}
            if self.turns and self.turns.may_call(entry):
                self._agent.controller.spawn(self.turns.use_tool(entry, request["holder"], holders))
                entry["at_tool"] = True  # at once, and not when that begins
            else:
                batches[name].append(self.for_engine(entry))
        await asyncio.gather(*(self._agent.call_worker(name, "submit", requests=batch) for name, batch in batches.items()))

    def for_engine(self, entry: dict[str, Any]) -> dict[str, Any]:
        """The request that an engine gets, fields of `roles.rollout.engine.Request`."""
        answer: Trajectory = entry["answer"]
        return {"sample": answer.sample, "prompt": entry["prompt"], "response": answer.response,
                "logprobs": answer.rollout_logprobs, "tool_calls": answer.tool_calls,
                "masked_tokens": answer.num_masked_tokens,
                "stop_ids": [self.turns.tools.call_end] if self.turns else [],
                **{name: entry[name] for name in ("max_response_tokens", "temperature", "seed", "order")}}

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
        """Stop generating (None: everything). Returns [{sample, tokens, masked_tokens}] of what was given up; their tokens,
        those that tools wrote (masked) included, are in the store here.

        Requests that finished before are not among them: they are reported by their own events. A worker that has not
        answered in time is ended.
        """
        answers = await asyncio.gather(
            *(self._agent.call_or_end(name, "abort", limit_s, samples=samples) for name in self._agent.of_role("rollout"))
        )
        parts = []
        for part in (p for answer in answers for p in answer):
            if (entry := self.requests.pop(part["sample"], None)) is not None:
                parts.append(entry["answer"].sampled(part["response"], part["logprobs"], "abort", part["version"]))
        # Tools go on; what comes of them is for the node that takes the answer over.
        at_tool = [sample for sample, entry in self.requests.items() if entry["at_tool"]]
        for sample in at_tool if samples is None else set(at_tool) & set(samples):
            parts.append(msgspec.structs.replace(self.requests.pop(sample)["answer"], finish="abort"))
        for part in parts:
            self.store.put(part)
        self._agent.roles.sharing.look()
        return [
            {"sample": part.sample, "tokens": part.num_response_tokens, "masked_tokens": part.num_masked_tokens}
            for part in parts
        ]

    async def sample_finished(self, sample: str, response: bytes, logprobs: bytes, finish: str, version: int) -> None:
        entry = self.requests.get(sample)
        if entry is None or entry["at_tool"]:
            return
        trajectory = entry["answer"] = entry["answer"].sampled(response, logprobs, finish, version)
        if finish == "stop" and self.turns and self.turns.asks_for_tool(trajectory):
            if self.turns.may_call(entry):
                return await self.turns.use_tool(entry)
            finish = trajectory.finish = "length"
        del self.requests[sample]
        self._agent.roles.sharing.look()
        verdict = await self.verifier.score(sample, entry["split"], wire.prompt_of(sample), response)
        trajectory.reward = verdict.reward
        self.store.put(trajectory)
        await self._agent.controller.emit(
            "",
            "finished",
            sample=sample,
            reward=verdict.reward,
            correct=verdict.correct,
            timed_out=verdict.timed_out,
            tokens=trajectory.num_response_tokens,
            masked_tokens=trajectory.num_masked_tokens,
            tool_calls=trajectory.tool_calls,
            tool_seconds=trajectory.tool_seconds,
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
        workers = self._agent.processes([self._agent.supervisor.name_of(role, d) for d in devices])
        async with self._at_devices(role, workers), self._gate.passing("a lease"):
            await self._hand_to_workers(workers, role, method, lease, samples, holders)

    async def _hand_to_workers(self, workers: list[WorkerProcess], role: str, method: str, lease: int,
                               samples: list[dict], holders: dict[str, str]) -> None:
        names = [worker.name for worker in workers]
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
        try:
            ask = self._agent.call_worker
            await asyncio.gather(*(ask(name, method, lease=lease, samples=payload) for name in names))
        except BaseException:  # it is offered again
            self._leases.pop(lease, None)
            raise

    async def on_demonstrate(self, peer: str, lease: int, devices: list[int], samples: list[dict]) -> None:
        """Accumulate the gradient of demonstrations ({prompt, response}) on these devices."""
        payload = [
            msgspec.to_builtins(
                Trajectory(f"0:{lease}:{i}", s["prompt"], s["response"], b"", b"", mask=s.get("mask", b"")),
                builtin_types=(bytes,),
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
        self._agent.roles.sharing.look()
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
            answer = await self.peer(holders[holder]).call("", "fetch", timeout_s=FETCH_TIMEOUT_S, samples=samples)
            return msgspec.convert(answer, list[Trajectory])

        parts = await asyncio.gather(*(fetch(h, s) for h, s in by_holder.items()))
        return {t.sample: t for part in parts for t in part}

    def peer(self, address: str) -> Link:
        """The link to another agent."""
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
    """How far the engine's probabilities of the tokens that it sampled are from the trainer's: sums and maximum of
    |p_engine - p_trainer|."""
    total, largest, count = 0.0, 0.0, 0
    for trajectory in trajectories:
        engine = np.frombuffer(trajectory.rollout_logprobs, dtype="<f4").astype(np.float64)
        trainer = np.frombuffer(trajectory.old_logprobs, dtype="<f4").astype(np.float64)
        if trajectory.mask:
            sampled = np.frombuffer(trajectory.mask, dtype=bool)
            engine, trainer = engine[sampled], trainer[sampled]
        if len(engine):
            difference = np.abs(np.exp(engine) - np.exp(trainer))
            total, largest, count = (
                total + float(difference.sum()),
                max(largest, float(difference.max())),
                count + len(engine),
            )
    return {"rollout_probs_diff": total, "rollout_probs_diff_max": largest, "tokens": float(count)}
