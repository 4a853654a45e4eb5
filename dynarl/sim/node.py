"""A simulated node: the agent's side of the controller's calls, and workers whose work takes its modelled time.

It answers what `dynarl.agent` answers, and reports what that reports, with the same rules: while its role changes the
gate is closed and hand-outs are refused; what it gives up keeps its tokens here; a lease that has begun is finished; a
tool call that is open goes on while its answer moves to another node.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from dynarl import wire
from dynarl.agent.sharing import Sharing
from dynarl.sim.rollout import Rollout
from dynarl.sim.stages import Stages

if TYPE_CHECKING:
    from dynarl.sim.fleet import SimFleet


class SimNode:
    """Orders of the controller are methods `on_*`; they return when the order is carried out. rollout, stages: what its
    workers do."""

    def __init__(self, fleet: SimFleet, name: str, home: str):
        self.fleet, self.name = fleet, name
        self._loop, self._log, self._world = fleet.loop, fleet.log, fleet.world
        self.active = home
        self.dead: set[str] = set()  # roles whose workers are not there
        self.attempts: Counter[str] = Counter()
        self.open = True
        self.sharing = Sharing(self._switch, self._has_work)
        self._shared: dict[str, dict[str, Any]] = {}  # role -> weights that it needs when it is given the devices
        self.versions: dict[str, int] = {}  # role -> version of the weights in its workers
        self.plan: dict[str, Any] | None = None
        self.held: dict[str, int] = {}  # sample -> tokens of its response in the store here
        self.rollout, self.stages = Rollout(self), Stages(self)
        self._busy_since_ns: int | None = None
        self.busy_ns = 0

    # --- whether it works

    @property
    def works(self) -> bool:
        return bool(self.rollout.where) or not self.stages.idle.is_set()

    def busy_until(self, now_ns: int) -> int:
        """Nanoseconds in which it has worked, ever."""
        return self.busy_ns + (now_ns - self._busy_since_ns if self._busy_since_ns is not None else 0)

    def account(self) -> None:
        """To be called after everything that may have begun its first work, or ended its last."""
        self.busy_ns = self.busy_until(self._loop.now_ns)
        self._busy_since_ns = self._loop.now_ns if self.works else None

    def work_ended(self) -> None:
        """Some work has; if it was the last of its role, the devices are free for others."""
        self.account()
        self.sharing.look()

    # --- hand-outs

    async def on_generate(
        self,
        requests: list[dict],
        split: str,
        temperature: float,
        seed: int,
        max_response_tokens: int,
        holders: dict[str, str],
        order: str,
    ) -> None:
        async with self._turn("rollout"):
            self._check_alive("rollout", "a request")
            self.rollout.take(requests)

    async def on_score(self, lease: int, devices: list[int], samples: list[dict], holders: dict[str, str]) -> None:
        await self._take("inference", lease, devices, samples)

    async def on_train(self, lease: int, devices: list[int], samples: list[dict], holders: dict[str, str]) -> None:
        await self._take("training", lease, devices, samples)

    async def _take(self, role: str, lease: int, devices: list[int], samples: list[dict]) -> None:
        async with self._turn(role):
            self._check_alive(role, "a lease")
            [device] = devices
            self.stages.take(role, lease, device, samples)

    def _turn(self, role: str) -> AbstractAsyncContextManager[None]:
        """Around a hand-out, which is refused where a worker dies while it waits for the devices."""
        lives = self.attempts[role]

        def check() -> None:
            if role in self.dead or self.attempts[role] != lives:
                raise wire.CallError(f"{role} on {self.name} died while its work was on the way")

        if role in self.dead:
            raise wire.CallError(f"{self.name} has no {role} worker")
        return self.sharing.turn(role, check)

    def _check_alive(self, role: str, what: str) -> None:
        if not self.open:
            raise wire.CallError(f"{what} came while this node changes its role")
        if role in self.dead:
            raise wire.CallError(f"{self.name} has no {role} worker")

    async def on_abort(self, samples: list[str] | None = None, limit_s: float | None = None) -> list[dict]:
        return self.rollout.give_up(samples)

    # --- calls to single workers

    async def on_worker(
        self, role: str, device: int, method: str, args: dict[str, Any], limit_s: float | None = None
    ) -> Any:
        if role in self.dead and method not in ("build", "serve_store", "enter", "load"):
            raise wire.CallError(f"{self.name} has no {role} worker")
        if handler := getattr(self, f"_worker_{method}", None):
            return await handler(device, **args)
        return None  # communicators, stores and sleep take no time here

    async def _worker_load(self, device: int, **_: Any) -> None:
        await self.fleet.pause(self._world.times.load("rollout"))

    async def _worker_begin(self, device: int, step: int, loss: str) -> None:
        self.fleet.check_empty(self.name, self.stages.gradient)

    async def _worker_reduce(self, device: int, members: list[list[int]]) -> None:
        await self.fleet.reduced((self.name, device), members)

    async def _worker_step(self, device: int, global_tokens: int, lr: float) -> dict[str, float]:
        await self.fleet.stepped(self.name)
        return {"grad_norm": 1.0, "lr": lr}

    # --- weights

    async def on_refresh(self, version: int) -> None:
        await self._load(self.active, version)

    async def _load(self, role: str, version: int) -> None:
        if self.versions.get(role) != version:
            await self.fleet.pause(self._world.times.load(role))
            self._take_weights(role, version)

    def _take_weights(self, role: str, version: int) -> None:
        if role == "rollout" and self.versions.get(role) != version:
            self.rollout.flush()
        self.versions[role] = version

    async def on_loaded(self, role: str, version: int) -> None:
        self._take_weights(role, version)

    async def on_forget(self, iteration: int) -> None:
        self.held.clear()
        self.rollout.forget()

    # --- a change of roles

    async def _order(self, seconds: float) -> None:
        """An order that takes so long on a node without work."""
        await self.fleet.pause(seconds * (self._world.times.at_work if self.works else 1.0))

    async def on_prepare(self, plan: dict[str, Any]) -> dict[str, Any]:
        await self._order(self._world.times.prepare_s)
        self.plan, role = plan, plan["moves"].get(self.name)
        ready = role not in self.dead
        return {"ready": ready, "reason": "" if ready else f"{self.name} has no {role} worker"}

    async def on_vote(self, epoch: int, limit_s: float) -> dict[str, Any]:
        await self._order(self._world.times.vote_s)
        return {"ready": True, "same_digest": True}

    async def on_quiesce(self, epoch: int, limit_s: float) -> dict[str, Any]:
        self.fleet.timeline.cut(self._loop.now_ns)
        self.open = False
        result: dict[str, Any] = {"given_up": [], "unstarted": []}
        await self.fleet.pause(self._world.times.drain_s)
        if self.active == "rollout":
            result["given_up"] = self.rollout.give_up()
            return result
        result["unstarted"] = self.stages.give_back(self.active)
        await self.stages.idle.wait()
        return result

    async def on_transfer(self, epoch: int) -> None:
        target = self.plan["moves"][self.name]
        await self.fleet.pause(self._world.times.transfer(self.active, target))
        self._take_weights(target, self.plan["version"])

    async def on_commit(self, epoch: int) -> None:
        await self._order(self._world.times.commit_s)
        self.fleet.timeline.cut(self._loop.now_ns)
        self.active, self.plan, self.open = self.plan["moves"].get(self.name, self.active), None, True
        self._log.note(f"role {self.name} {self.active}")

    async def on_rollback(self, epoch: int) -> None:
        self.fleet.timeline.cut(self._loop.now_ns)
        self.plan, self.open = None, True

    # --- roles that take turns by themselves

    async def on_share(self, order: list[str], weights: dict[str, dict[str, Any]]) -> None:
        self._shared = weights
        self.sharing.begin(order)

    async def on_unshare(self) -> str:
        await self.sharing.end()
        return self.active

    async def on_take(self, role: str) -> None:
        async with self.sharing.turn(role):
            pass

    def _has_work(self, role: str) -> bool:
        if role == "rollout":
            return bool(self.rollout.where)
        return self.stages.has_work(role)

    async def _switch(self, role: str) -> None:
        if role == self.active:
            return
        if role in self.dead:
            raise wire.CallError(f"{self.name} has no {role} worker")
        source, seconds = self.active, self._world.times.transfer(self.active, role)
        self.fleet.timeline.cut(self._loop.now_ns)
        self.open = False
        await self.fleet.pause(seconds)
        self.fleet.timeline.cut(self._loop.now_ns)
        self.open, self.active = True, role
        self._take_weights(role, self._shared[role]["version"])
        self._log.note(f"role {self.name} {role}")
        await self._loop.pause(self.fleet.message_ns)
        self.fleet.listener.event_switched(self.name, source=source, target=role, phases={"load_ms": 1e3 * seconds})

    # --- workers that die

    def die(self, role: str) -> None:
        """Its workers of a role are gone, with all that they had."""
        if role in self.dead:
            return
        self.dead.add(role)
        self.attempts[role] += 1
        self.fleet.deaths += 1
        self._log.note(f"died {self.name} {role}")
        held: list[str] = []
        if role == "rollout":
            held = [sample for sample in self.rollout.where if self.held.get(sample)]
            self.fleet.lose_rollout(self)
        self.stages.lose(role)
        self.work_ended()
        self.fleet.tell(
            "worker_died", self.name, role=role, device=0, attempt=self.attempts[role], status="killed", tail=[],
            held=held,
        )  # fmt: skip

    async def on_kill_workers(self, role: str) -> int:
        return 0

    async def on_start_worker(self, role: str, device: int, **_: Any) -> dict[str, Any]:
        await self.fleet.pause(self._world.times.restart_s)
        self.dead.discard(role)
        return {"attempt": self.attempts[role] + 1}
