"""A fleet of agents whose workers only pretend, for tests of the controller's iteration.

Answers and gradients take milliseconds of virtual time, workers die, messages fail, gradient buffers are counters: what an
optimizer step would add up can be read from them.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter, defaultdict

from dynarl.agent.sharing import Sharing
from dynarl.controller.epochs import Weights
from dynarl.controller.fleet import Fleet
from dynarl.controller.iteration import Iteration
from dynarl.rpc import PeerGone
from dynarl.wire import CallError

WEIGHTS = Weights(version=7, digest="c0ffee")
TICK_S = 0.001
TURN = 7  # tokens after which a tool has its turn and writes one of them


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop on which waiting takes no time: its clock jumps to the next timer. For programs without real I/O."""

    def __init__(self):
        super().__init__()
        self._now = 0.0
        self._poll = self._selector.select
        self._selector.select = self._jump

    def time(self) -> float:
        return self._now

    def _jump(self, timeout_s: float | None) -> list:
        if timeout_s is None:
            raise RuntimeError("everybody waits and nothing is due")
        self._now += timeout_s
        return self._poll(0)


class Node:
    """An agent with its workers. `requests`: sample -> [tokens so far]; `work[role]`: leases in the workers' queues."""

    def __init__(self, name: str, active: str):
        self.name, self.active = name, active
        self.peer_address, self.rank = f"tcp://{name}", int(name[1:])
        self.open, self.inside = True, 0
        self.dead: set[str] = set()
        self.lives: Counter[str] = Counter()
        self.requests: dict[str, list[int]] = {}
        self.made, self.slowness = 0, 1.0  # tokens since the start; time that one takes, to others
        self.held: dict[str, int] = {}  # sample -> tokens in the store
        self.work: dict[str, list[dict]] = defaultdict(list)
        self.buffer: Counter[str] = Counter()
        self.plan: dict | None = None
        self.sharing: Sharing | None = None  # the cluster's

    def has_work(self, role: str) -> bool:
        return bool(self.requests if role == "rollout" else self.work[role])


class Cluster:
    """Stands for the fleet and all nodes. Events go to `iteration`. `chaos(kind)` is asked before everything that can fail."""

    call_each = Fleet.call_each

    def __init__(self, roles: dict[str, str], seed: int, chaos_share: float = 0.0, longest: int = 30):
        self.random = random.Random(seed)
        self.agents = {name: Node(name, role) for name, role in roles.items()}
        for node in self.agents.values():
            node.sharing = Sharing(functools.partial(self.switch, node), node.has_work)
        self.down: set[tuple[str, str]] = set()
        self.iteration: Iteration | None = None
        self.chaos_share, self.longest = chaos_share, longest
        self.faults: Counter[str] = Counter()
        self.switched: Counter[tuple[str, str]] = Counter()  # by nodes themselves
        self.begun: dict[str, Counter[str]] = {}  # role -> groups by state when it got its first lease
        self.relocated: Counter[str] = Counter()  # requests given up for another node, without a change of roles
        self.tasks: set[asyncio.Task] = set()

    def chaos(self, kind: str) -> bool:
        struck = self.random.random() < self.chaos_share
        self.faults[kind] += struck
        return struck

    def spawn(self, work) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def pause(self, ticks: float = 1.0) -> None:
        await asyncio.sleep(self.random.random() * ticks * TICK_S)

    async def call(self, name, method, /, timeout_s=None, **args):
        await self.pause()
        answer = await getattr(self, f"on_{method}")(self.agents[name], **args)
        await self.pause()
        return answer

    # --- workers

    def kill(self, node: Node, role: str) -> None:
        """As the agent reports it and the controller takes it; the worker is back after some ticks."""
        node.dead.add(role)
        node.lives[role] += 1
        self.down.add((node.name, role))
        recorded = []
        if role == "rollout":
            for sample, [tokens] in node.requests.items():
                if part := self.random.randrange(tokens + 1):
                    node.held[sample] = max(part, node.held.get(sample, 0))
                    recorded.append(sample)
            node.requests.clear()
        node.work[role].clear()
        if role == "training":
            node.buffer.clear()
        node.sharing.look()
        self.iteration.worker_lost(node.name, role, recorded)
        self.spawn(self.revive(node, role))

    async def reap(self, may: dict[str, frozenset[str]]) -> None:
        """Any worker may die at any time, also one that sleeps."""
        while True:
            await self.pause(20)
            node = self.random.choice(list(self.agents.values()))
            role = self.random.choice(sorted(may[node.name]))
            if role not in node.dead and self.chaos("a worker dies, asleep or not"):
                self.kill(node, role)

    async def revive(self, node: Node, role: str) -> None:
        await asyncio.sleep(10 * TICK_S)  # longer than any message takes
        await self.pause(30)
        node.dead.discard(role)
        self.down.discard((node.name, role))

    async def decode(self, node: Node, sample: str, request: list[int]) -> None:
        while request[0] < self.lengths(sample):
            await self.pause(node.slowness)
            if node.requests.get(sample) is not request:
                return
            request[0] += 1
            node.made += 1
        del node.requests[sample]
        node.sharing.look()
        await self.pause(20)  # the verifier
        node.held[sample] = request[0]
        self.iteration.event_finished(node.name, sample=sample, reward=self.reward(sample), correct=True, timed_out=False,
                                      tokens=request[0], prompt_tokens=2, finish="stop", version=WEIGHTS.version,
                                      masked_tokens=request[0] // TURN, tool_calls=request[0] // TURN)

    async def report(self, every_s: float = 5 * TICK_S) -> None:
        """What rollout workers say of their load."""
        while True:
            await asyncio.sleep(every_s)
            for node in self.agents.values():
                self.iteration.requests.router.figures(
                    node.name, asyncio.get_running_loop().time(), worker=f"{node.name}-rollout-0", tokens=node.made,
                    running=len(node.requests), kv_total_tokens=0)

    def reward(self, sample: str) -> float:
        return float(random.Random(f"reward {sample}").randrange(2))

    def lengths(self, sample: str) -> int:
        return 1 + random.Random(sample).randrange(self.longest)

    async def serve(self, node: Node, role: str) -> None:
        """Works off the queue of a role, one lease at a time, until it is empty."""
        while node.work[role]:
            entry = node.work[role][0]
            entry["started"] = True
            await self.pause(6)
            if not node.work[role] or node.work[role][0] is not entry:
                return
            node.work[role].pop(0)
            node.sharing.look()
            if role == "training":
                for sample in entry["samples"]:
                    node.buffer[sample] += 1
                event = {"stats": {"tokens": 1.0}}
            else:
                node.held |= dict.fromkeys(entry["samples"], 1)
                event = {"stats": {}}
            if role in node.dead:
                return
            handler = self.iteration.event_trained if role == "training" else self.iteration.event_scored
            self.spawn(self.later(handler, node.name, entry["lease"], event))

    async def later(self, handler, name: str, lease: int, event: dict) -> None:
        await self.pause()
        handler(name, lease=lease, **event)

    # --- orders

    async def passing(self, node: Node, role: str, wanted: list[tuple[str, str]], lives: int) -> None:
        """The way of a hand-out through the agent: the gate, fetching from other nodes, the worker, which had had so many
        lives when it came."""
        if not node.open:
            raise CallError("came while this node changes its role")
        node.inside += 1
        try:
            await self.pause(4)
            for sample, holder in wanted:
                assert sample in self.agents[holder].held, f"{holder} does not hold {sample}"
            if self.chaos("a hand-out that fails"):
                raise CallError("the network is in the way")
            if role not in node.dead and self.chaos(f"{role} dies"):
                self.kill(node, role)
            if lives != node.lives[role]:
                raise PeerGone(f"{role} of {node.name} died")
            assert node.active == role, f"{node.name} is {node.active} and got work of {role}"
        finally:
            node.inside -= 1

    def turn(self, node: Node, role: str):
        """At the devices of a node, unless its worker has died by then."""
        lives = node.lives[role]

        def check() -> None:
            if lives != node.lives[role]:
                raise PeerGone(f"{role} of {node.name} died")

        if role in node.dead:
            raise CallError(f"{role} of {node.name} is not running")
        return node.sharing.turn(role, check)

    async def on_generate(self, node, requests, split, temperature, seed, max_response_tokens, holders, order):
        lives = node.lives["rollout"]
        async with self.turn(node, "rollout"):
            await self.passing(node, "rollout", [(r["sample"], r["holder"]) for r in requests if r["holder"]], lives)
            for request in requests:
                assert request["sample"] not in node.requests, "the same request twice on one node"
                tokens = self.agents[request["holder"]].held[request["sample"]] if request["holder"] else 0
                node.requests[request["sample"]] = [tokens]
                self.spawn(self.decode(node, request["sample"], node.requests[request["sample"]]))

    async def on_abort(self, node, samples):
        if "rollout" not in node.dead and self.chaos("a worker dies as it gives up requests"):
            self.kill(node, "rollout")
            raise PeerGone(f"rollout of {node.name} died")
        given_up = []
        for sample in set(samples) & node.requests.keys():
            [tokens] = node.requests.pop(sample)
            if tokens:
                node.held[sample] = tokens
            given_up.append({"sample": sample, "tokens": tokens})
        node.sharing.look()
        self.relocated.update(partial["sample"] for partial in given_up)
        return given_up

    async def hand_out(self, node, role, lease, samples):
        states = Counter(group.state for group in self.iteration.ledger.groups.values())
        self.begun.setdefault(role, states)
        lives = node.lives[role]
        async with self.turn(node, role):
            await self.passing(node, role, [(s["sample"], s["holder"]) for s in samples], lives)
            node.work[role].append({"lease": lease, "samples": [s["sample"] for s in samples], "started": False})
            if len(node.work[role]) == 1:
                self.spawn(self.serve(node, role))

    async def on_score(self, node, lease, devices, samples, holders):
        await self.hand_out(node, "inference", lease, samples)

    async def on_train(self, node, lease, devices, samples, holders):
        rewards = [self.reward(s["sample"]) for s in samples]
        for item, reward in zip(samples, rewards):
            # Relative to the whole group, wherever its members were made and in whatever order they finished.
            assert abs(item["advantage"] - (reward - sum(rewards) / len(rewards))) < 1e-6 and item["weight"] == 1.0
        await self.hand_out(node, "training", lease, samples)

    # --- roles that take turns by themselves

    async def on_share(self, node, order, weights):
        node.sharing.begin(order)

    async def on_unshare(self, node):
        await node.sharing.end()
        return node.active

    async def on_take(self, node, role):
        async with node.sharing.turn(role):
            pass

    async def switch(self, node, role):
        if role == node.active:
            return
        assert not node.has_work(node.active), f"{node.active} on {node.name} has work and loses the devices"
        await self.pause(8)
        if role in node.dead or self.chaos("a switch that fails"):
            raise CallError(f"{node.name} has no {role} worker")
        source, node.active = node.active, role
        self.switched[node.name, role] += 1
        self.iteration.event_switched(node.name, source=source, target=role, phases={"load_ms": 1.0})

    # --- a change of roles

    async def on_prepare(self, node, plan):
        node.plan = plan
        role = plan["moves"].get(node.name)
        return {"ready": role not in node.dead, "reason": f"{node.name} has no {role} worker"}

    async def on_vote(self, node, epoch, limit_s):
        agreed = not any(agent.plan and agent.plan.get("bad") for agent in self.agents.values())
        return {"agreed": agreed, "ready": agreed, "same_digest": True}

    async def on_quiesce(self, node, epoch, limit_s):
        node.open = False
        while node.inside:
            await self.pause()
        result = {"given_up": [], "unstarted": []}
        if node.active not in node.dead and self.chaos("a worker dies as it stops"):
            self.kill(node, node.active)
            raise PeerGone(f"{node.active} of {node.name} died")
        if node.active == "rollout":
            for sample, [tokens] in node.requests.items():
                if tokens:
                    node.held[sample] = tokens
                result["given_up"].append({"sample": sample, "tokens": tokens})
            node.requests.clear()
        else:
            waiting = [entry for entry in node.work[node.active] if not entry["started"]]
            result["unstarted"] = [entry["lease"] for entry in waiting]
            node.work[node.active] = [entry for entry in node.work[node.active] if entry["started"]]
            while node.work[node.active]:
                await self.pause()
        return result

    async def on_transfer(self, node, epoch):
        if self.chaos("a transfer that fails"):
            raise CallError("no such file")
        node.plan["bad"] = self.chaos("weights that differ")

    async def on_commit(self, node, epoch):
        node.active, node.plan, node.open = node.plan["moves"].get(node.name, node.active), None, True

    async def on_rollback(self, node, epoch):
        node.plan, node.open = None, True
