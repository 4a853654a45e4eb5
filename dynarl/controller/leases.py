"""Groups that replicas of the model have at the moment: each a lease, which comes back done, unstarted or lost."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from typing import Any, Awaitable, Callable, Iterable, Mapping, Sequence

from dynarl import wire
from dynarl.controller.fleet import Fleet
from dynarl.controller.replicas import Replica
from dynarl.controller.telemetry import Monitor
from dynarl.dataflow.ledger import Group, Ledger

# Leases that a worker holds: one that it works on, one that waits, so that it never waits for the network. The second
# only while more groups than replicas wait: of the last ones none should wait at one replica while another has nothing.
PER_REPLICA = 2
METHODS = {"inference": "score", "training": "train"}


class ReplicaTorn(wire.CallError):
    """Some workers of a replica have a lease that others have not; only a new start of the trainer helps."""


class Leases:
    """The ledger says which group is in which lease; this, which replica has it. `at`: lease -> (role, replica).

    replicas: role -> copies of its model; spawn: run a hand-out in the background; what undoes it if it fails.
    """

    def __init__(self, fleet: Fleet, ledger: Ledger, monitor: Monitor, replicas: Mapping[str, list[Replica]],
                 spawn: Callable[[Awaitable[Any], Callable[[], None]], None]):
        self._fleet, self._ledger, self._monitor, self.replicas, self._spawn = fleet, ledger, monitor, replicas, spawn
        self.at: dict[int, tuple[str, Replica]] = {}
        self._held: dict[str, Counter[Replica]] = defaultdict(Counter)  # role -> leases of each replica
        self._at_work: dict[str, list[str]] = {}  # role -> nodes that `_slots` is of
        # role -> replicas there that have no lease, one, ...; that which has been so longest first
        self._slots: dict[str, dict[int, dict[Replica, None]]] = {}
        # role -> these replicas in order, with their first node and how many of them are on the same nodes
        self._in_order: dict[str, list[tuple[Replica, str, int]]] = {}
        self._beside = {role: Counter(r.nodes for r in copies) for role, copies in replicas.items()}
        self._turns: dict[Replica, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._parts: dict[int, dict[str, dict[str, float]]] = {}  # lease -> node -> statistics, until all are done

    def hand_out(
        self, role: str, groups: Iterable[Group], at_work: list[str], of_sample: Callable[[str], dict],
        among: Sequence[Group] | None = None, count: int | None = None,
    ) -> None:  # fmt: skip
        """Give groups to the replicas with the fewest leases. at_work: nodes that take work of the role, the same list
        as long as they do; of_sample: what the workers are told of a sample besides its name and holder; among: all
        groups of the minibatch, where every replica gets an even share of them, in turn and at once; count: of groups,
        if it is known."""
        slots = self._slots_of(role, at_work)
        if count is None:
            groups = list(groups)
            count = len(groups)
        if not count:
            return
        if among is not None:
            self._share_out(role, groups, of_sample, among)
            return
        num_replicas = sum(map(len, slots.values()))
        free = sum((PER_REPLICA - held) * len(slots[held]) for held in range(PER_REPLICA))
        for index, group in enumerate(list(itertools.islice(groups, free))):
            replica = next(replica for held in range(PER_REPLICA) for replica in slots[held])
            # Of the last groups none waits behind another while a replica is about to be free.
            if count - index <= num_replicas and self._held[role][replica]:
                return
            self._give(role, replica, group, of_sample)

    def _share_out(
        self, role: str, groups: Iterable[Group], of_sample: Callable[[str], dict], among: Sequence[Group]
    ) -> None:
        replicas = self._in_order[role]
        room = _room(among, replicas)
        for group in groups:
            most = max(room, default=0)
            if most <= 0:
                return
            index = room.index(most)
            room[index] -= 1
            self._give(role, replicas[index][0], group, of_sample)

    def _give(self, role: str, replica: Replica, group: Group, of_sample: Callable[[str], dict]) -> None:
        lease = self._ledger.lease(group, replica.nodes[0])
        self.at[lease] = (role, replica)
        self._count(role, replica, 1)
        self._monitor.leased(lease, role, replica, group.num_tokens)
        samples = [{"sample": s, "holder": group.holders[s], **of_sample(s)} for s in group.samples]
        self._spawn(self.send(METHODS[role], lease, replica, samples), lambda: self.back(lease))

    def _slots_of(self, role: str, at_work: list[str]) -> dict[int, dict[Replica, None]]:
        if self._at_work.get(role) is not at_work:
            nodes, slots = set(at_work), defaultdict(dict)
            replicas = sorted(replica for replica in self.replicas[role] if nodes.issuperset(replica.nodes))
            beside = Counter(replica.nodes for replica in replicas)
            for replica in replicas:
                slots[self._held[role][replica]][replica] = None
            self._at_work[role], self._slots[role] = at_work, slots
            self._in_order[role] = [(replica, replica.nodes[0], beside[replica.nodes]) for replica in replicas]
        return self._slots[role]

    def _count(self, role: str, replica: Replica, change: int) -> None:
        """So many leases more, or less, for a replica."""
        held, slots = self._held[role], self._slots[role]
        if replica in slots[held[replica]]:
            del slots[held[replica]][replica]
            slots[held[replica] + change][replica] = None
        held[replica] += change

    def _take(self, lease: int) -> tuple[str, Replica] | None:
        """Nobody has it any more."""
        if (where := self.at.pop(lease, None)) is not None:
            self._count(*where, -1)
        return where

    async def send(self, method: str, lease: int, replica: Replica, samples: list[dict]) -> None:
        """Raises ReplicaTorn, or CallError when no node has got it."""
        agents = self._fleet.agents
        holders = sorted({item["holder"] for item in samples} & agents.keys())
        addresses = {node: agents[node].peer_address for node in holders}
        # One at a time: nodes of one replica must get its leases in the same order.
        async with self._turns[replica]:
            calls = [
                self._fleet.call(
                    node, method, lease=lease, devices=replica.on(node), samples=samples, holders=addresses
                )
                for node in replica.nodes
            ]
            if len(calls) == 1:
                await calls[0]
                return
            answers = await asyncio.gather(*calls, return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        if failed and len(failed) < len(answers):
            # Workers of one replica wait for each other: those that got the lease would do so for ever.
            raise ReplicaTorn(f"a lease reached only some of the nodes {', '.join(replica.nodes)}: {failed[0]}")
        if failed:
            raise failed[0]

    def back(self, lease: int) -> None:
        """Not started; its group is offered again."""
        self._take(lease)
        self._parts.pop(lease, None)
        self._ledger.handed_back(lease)

    def part(self, node: str, lease: int, stats: dict[str, float]) -> dict[str, float] | None:
        """`node` is done with its part. Returns the statistics once all nodes of the replica are, else None."""
        if lease not in self.at:
            return stats
        parts, replica = self._parts.setdefault(lease, {}), self.at[lease][1]
        parts[node] = stats
        if set(parts) < set(replica.nodes):
            return None
        # Every worker of a replica knows the sums of all of it.
        return self._parts.pop(lease)[replica.nodes[0]]

    def done(self, lease: int) -> None:
        self._parts.pop(lease, None)
        if (entry := self._take(lease)) is not None:
            role, replica = entry
            self._monitor.done(lease, self._beside[role][replica.nodes])

    def worker_lost(self, node: str) -> None:
        """The ledger has offered again what the worker held: those leases are void."""
        held = {group.lease for group in self._ledger.in_state("scoring", "training")}
        for lease in [lease for lease, where in self.at.items() if node in where[1].nodes and lease not in held]:
            self._take(lease)


def _room(among: Sequence[Group], replicas: Sequence[tuple[Replica, str, int]]) -> list[int]:
    """What each replica may still get of these groups: its even share, rounded up, less what its nodes have had.
    Shares follow the replicas that are at work now, so that nothing is left over when one is lost."""
    had = Counter([group.node for group in among if group.state in ("training", "accumulated", "trained")])
    share = -(-len(among) // max(len(replicas), 1))
    return [share - had[node] // beside for _, node, beside in replicas]
