"""Nodes whose roles take turns by themselves, during one iteration: which role each is given work of.

The controller hands a node work of a role, and the node switches when its devices are free. The map of roles follows
when the node tells (`Epochs.switched`). While the optimizer steps, and until the new weights are there, nobody
switches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from dynarl.controller.epochs import Epochs, Weights
from dynarl.controller.fleet import Fleet
from dynarl.controller.leases import Leases
from dynarl.dataflow.ledger import Ledger
from dynarl.wire import CallError

# An agent that has not ended its turns by then, a switch under way included, is not waited for: it may be on a lost
# node, and the step is started again only when whoever waits here has ended.
END_S = 20.0


class Turns:
    """given: role that each node is given work of; num_changes: of what `take_work` answers, those of the map of roles
    left out; order: of the roles, from the first to work on a sample."""

    def __init__(self, fleet: Fleet, epochs: Epochs, ledger: Ledger, leases: Leases, order: list[str]):
        self._fleet, self._epochs, self._ledger, self._leases, self._order = fleet, epochs, ledger, leases, order
        self.given = dict(epochs.roles)
        self.num_changes = 0
        self._still = False

    async def begin(self, weights: Mapping[str, Weights]) -> None:
        """Nodes may switch, each to a role on its `weights`."""
        needed = {role: {"version": each.version, "digest": each.digest} for role, each in weights.items()}
        await self._fleet.call_each(self.given, "share", order=self._order, weights=needed)
        self._hold(False)

    async def end(self) -> None:
        """No node switches by itself any more, also where its agent is not there to be told."""
        calls = (self._fleet.call(node, "unshare", timeout_s=END_S) for node in self.given)
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, (CallError, TimeoutError)):
                raise answer

    def hold_still(self) -> None:
        """Until `begin`: a node that is in another role than it is given work of gets no more of it."""
        self._hold(True)

    def _hold(self, still: bool) -> None:
        self._still = still
        self.num_changes += 1

    def give(self, roles: Mapping[str, str]) -> None:
        """Other roles that nodes are given work of."""
        if roles:
            self.given.update(roles)
            self.num_changes += 1

    def take_work(self, role: str) -> list[str]:
        """Nodes that are given work of a role."""
        roles = self._epochs.roles if self._still else self.given
        return [node for node, given in self.given.items() if given == roles[node] == role]

    def free(self) -> list[str]:
        """Nodes that have nothing to do."""
        busy = {node for _, replica in self._leases.at.values() for node in replica.nodes}
        return [node for node in self.given if node not in busy and not self._ledger.num_running_on(node)]

    def only_free(self, moves: Mapping[str, str]) -> dict[str, str]:
        """Those of `moves` whose nodes have nothing else to do. Requests that a fault left behind wait for the step."""
        free = self.free()
        return {node: role for node, role in moves.items() if node in free}

    def are_settled(self) -> bool:
        """Whether every node that has work is in the role of it: then no switch is under way."""
        roles = self._epochs.roles
        return all(roles[node] == "rollout" for node in self._ledger.running.values()) and all(
            roles[node] == role for role, replica in self._leases.at.values() for node in replica.nodes
        )

    async def take(self, moves: Mapping[str, str]) -> None:
        """Switch these free nodes now, whether there is work or not. Raises CallError where one could not."""
        self.give(moves)
        answers = await asyncio.gather(
            *(self._fleet.call(node, "take", role=role) for node, role in moves.items()), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
