"""Roles and weights of one node: which role is active, which weights its workers hold, and how both change.

    prepare -> vote -> quiesce -> transfer -> vote -> commit      or, after any of them that failed, rollback

Between `share` and `unshare` roles change without all that: they take turns at the devices of this node (`Sharing`).
"""

from __future__ import annotations

import asyncio
import shutil
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dynarl import wire
from dynarl.agent.gate import Gate
from dynarl.agent.sharing import Sharing
from dynarl.agent.work import Work
from dynarl.scheduler.policy import ROLES
from dynarl.transport.hf import copy_small_files

if TYPE_CHECKING:
    from dynarl.agent.agent import Agent


class Roles:
    """Orders of the controller about roles and weights (`on_*`). `gate` keeps hand-outs out while the role changes."""

    def __init__(self, agent: Agent, work: Work, gate: Gate, staging: Path, home: str):
        self._agent, self._work, self._gate = agent, work, gate
        self.staging, self.active = staging, home
        self._versions: dict[str, int] = {}  # role -> version of the weights in its workers
        self._plan: dict | None = None
        self._plan_ready = False
        self.sharing = Sharing(self._switch, work.has_work)
        self._shared: dict[str, dict] = {}  # role -> {version, digest} that it needs when it is given the devices

    def worker_died(self, role: str) -> None:
        self._versions.pop(role, None)

    # --- weights

    def version_dir(self, version: int) -> Path:
        return self.staging / f"v{version}"

    async def on_stage(self, peer: str, version: int, source: str) -> None:
        """Make the staging directory of a version from a model directory on the shared file system."""
        # In a thread: while this agent stands still its controller takes the node for lost.
        await asyncio.to_thread(self._stage, version, Path(source))

    def _stage(self, version: int, source: Path) -> None:
        target = self.version_dir(version)
        target.mkdir(exist_ok=True)
        for path in source.iterdir():
            if path.is_file() and not (target / path.name).exists():
                shutil.copyfile(path, target / path.name)

    # --- one change of roles, in the order of its phases

    async def on_prepare(self, peer: str, plan: dict) -> dict:
        """Take note of a plan {epoch, ranks, moves: {node: role}, version, digest}; wake what it needs here.

        Returns {ready, reason}. Nothing that runs is touched.
        """
        self._plan = plan
        self._plan_ready, reason = True, ""
        role = plan["moves"].get(self._agent.node)
        if role is not None and not self._agent.of_role(role):
            self._plan_ready, reason = False, f"{self._agent.node} has no {role} worker"
        return {"ready": self._plan_ready, "reason": reason}

    async def on_vote(self, peer: str, epoch: int, limit_s: float) -> dict:
        """Meet the other members in MPI: is everybody ready, with the same plan (or, after the transfer, the same
        weights)?
        """
        plan = self._current(epoch)
        digest = zlib.crc32(
            msgspec.json.encode([plan["epoch"], sorted(plan["moves"].items()), plan["version"], plan["digest"]])
        )
        return await self._agent.remapper.vote(epoch, plan["ranks"], self._plan_ready, digest, limit_s)

    async def on_quiesce(self, peer: str, epoch: int, limit_s: float) -> dict:
        """Stop the active role here, if the plan moves this node. Returns {given_up: [{sample, tokens,
        masked_tokens}], unstarted: [lease]}.

        A worker that keeps its work for longer than `limit_s` is ended, and CallError raised: the controller offers its
        work to others, from what is recorded here.
        """
        plan, result = self._current(epoch), {"given_up": [], "unstarted": []}
        if self._agent.node not in plan["moves"]:
            return result
        try:
            await self._gate.close(limit_s)
        except TimeoutError:
            workers = self._agent.processes(self._agent.of_role(self.active))
            late = [worker.name for worker in workers if worker.calls.keys() - {"ping"}]
            for name in late:
                self._agent.supervisor.kill(name, f"a hand-out did not end within {limit_s:g} s")
            ended = ", ".join(late) or "none"
            raise wire.CallError(f"hand-outs did not end within {limit_s:g} s; ended: {ended}") from None
        if self.active == "rollout":
            result["given_up"] = await self._work.on_abort(peer, limit_s=limit_s)
        else:
            result["unstarted"] = await self._work.give_back_leases(self.active, limit_s)
        return result

    async def on_transfer(self, peer: str, epoch: int) -> None:
        """Put the old role to sleep, wake the new one and give it the weights of the plan's version from this node's
        staging.

        Memory is released before it is acquired. What was loaded is checked by the next vote.
        """
        plan = self._current(epoch)
        role = plan["moves"].get(self._agent.node)
        if role is None:
            return
        await self._each([self.active], "sleep")
        await self._each([role], "wake")
        digests = await self._load(role, plan["version"])
        self._plan_ready = all(digest == plan["digest"] for digest in digests)

    async def on_commit(self, peer: str, epoch: int) -> None:
        """The new role is the active one from here on."""
        role = self._current(epoch)["moves"].get(self._agent.node)
        if role is not None:
            self.active = role
        self._plan = None
        self._gate.open()

    async def on_rollback(self, peer: str, epoch: int) -> None:
        """The epoch was cancelled: the old role goes on."""
        if self._plan is None or self._plan["epoch"] != epoch:
            return
        role = self._plan["moves"].get(self._agent.node)
        self._plan = None
        try:
            if role is not None:
                await self._give_back(role, self.active)
        finally:
            if self._plan is None:  # else the next change has begun, and closed it again
                self._gate.open()

    # --- roles that take turns

    async def on_share(self, peer: str, order: list[str], weights: dict[str, dict]) -> None:
        """Roles take turns at the devices here from now on. order: from the first to work on a sample to the last;
        weights: role -> {version, digest} that it works with. Asked again, the roles have these weights from their next
        turn on."""
        self._shared = weights
        self.sharing.begin(order)

    async def on_unshare(self, peer: str) -> str:
        """Roles take no turns any more. Returns the one that is active."""
        await self.sharing.end()
        return self.active

    async def on_take(self, peer: str, role: str) -> None:
        """Give the devices to a role that has no work here."""
        workers = self._agent.processes(self._agent.of_role(role))
        async with self.sharing.turn(role, lambda: self._agent.check_same(workers)):
            pass

    async def _switch(self, role: str) -> None:
        """Memory is released before it is acquired. If it fails, the role that was active has the devices again."""
        if role == self.active:
            return
        source, weights, began = self.active, self._shared[role], time.monotonic()
        if not self._agent.of_role(role):
            raise wire.CallError(f"{self._agent.node} has no {role} worker")
        phases: dict[str, float] = {}
        try:
            await self._each([source], "sleep")
            phases["sleep_ms"] = 1e3 * (time.monotonic() - began)
            await self._each([role], "wake")
            digests = await self._load(role, weights["version"])
            phases["load_ms"] = 1e3 * (time.monotonic() - began) - phases["sleep_ms"]
            if any(digest != weights["digest"] for digest in digests):
                self._versions.pop(role, None)
                raise wire.CallError(f"{role} on {self._agent.node} has read other weights than {weights}: {digests}")
        except BaseException:
            await self._give_back(role, source)
            raise
        self.active = role
        await self._agent.controller.emit("", "switched", source=source, target=role, phases=phases)

    async def _give_back(self, role: str, source: str) -> None:
        """`source` has the devices again after a change to `role` that failed. A worker that does not sleep or wake then
        is ended, and its death reported: nobody could say what it holds of a device."""
        supervisor = self._agent.supervisor
        for each, method in ((role, "sleep"), (source, "wake")):
            workers = self._agent.processes(self._agent.of_role(each))
            calls = (self._agent.call_worker(worker.name, method) for worker in workers)
            answers = await asyncio.gather(*calls, return_exceptions=True)
            failed = [(w, answer) for w, answer in zip(workers, answers) if isinstance(answer, BaseException)]
            for worker, error in failed:
                if supervisor.workers.get(worker.name) is worker:
                    supervisor.kill(worker.name, f"it could not {method} when a change of roles was undone: {error}")
            while any(supervisor.workers.get(worker.name) is worker for worker, _ in failed):
                await asyncio.sleep(0.01)  # until its memory is free

    async def _each(self, roles: list[str], method: str) -> None:
        """Call a method of all workers of these roles."""
        names = [name for role in roles for name in self._agent.of_role(role)]
        await asyncio.gather(*(self._agent.call_worker(name, method) for name in names))

    def _current(self, epoch: int) -> dict:
        if self._plan is None or self._plan["epoch"] != epoch:
            raise wire.CallError(f"{self._agent.node} has no plan for epoch {epoch}")
        return self._plan

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
                self._agent.call_worker(name, "load", model_dir=str(self.version_dir(version)), version=version)
                for name in self._agent.of_role(role)
            )
        )
        self._versions[role] = version
        return [answer["digest"] for answer in answers if answer and "digest" in answer]

    def stage_small_files(self, version: int, source: Path) -> None:
        copy_small_files(source, self.version_dir(version))

    def keep_versions(self, versions: list[int]) -> None:
        """Drop all other staged versions."""
        for path in self.staging.glob("v*"):
            if int(path.name[1:]) not in versions:
                shutil.rmtree(path, ignore_errors=True)

    async def on_halt(self, peer: str, role: str) -> None:
        """Drop all work, all samples and any half-done change of roles; `role` is the active one from here on."""
        await self.sharing.end()
        await self._gate.close()
        await self._work.drop_all()
        self._plan, self.active = None, role
        await self._each([other for other in ROLES if other != role], "sleep")
        await self._each([role], "wake")
        self._gate.open()
