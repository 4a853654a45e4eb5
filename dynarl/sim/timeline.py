"""Which GPUs did what and when: the map of roles over one iteration, cut where nodes change role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dynarl.scheduler.policy import ROLES
from dynarl.sim.loop import SECOND_NS

if TYPE_CHECKING:
    from dynarl.sim.node import SimNode


class Timeline:
    """GPUs of each role between two cuts. Those of a node that is on the move, or does nothing all the time between two
    cuts, are idle."""

    def __init__(self, nodes: Mapping[str, SimNode], gpus_per_node: int, now_ns: int):
        self._nodes, self._gpus = nodes, gpus_per_node
        self._start_ns = self._since_ns = now_ns
        self._busy_ns = {name: node.busy_until(now_ns) for name, node in nodes.items()}
        self._cuts: list[tuple[int, int, dict[str, int]]] = []

    def cut(self, now_ns: int) -> None:
        """Roles change now: to be called before they do; more than once at one time does nothing."""
        if now_ns == self._since_ns:
            return
        gpus: Counter[str] = Counter()
        for name, node in self._nodes.items():
            busy_ns = node.busy_until(now_ns)
            does = node.active if node.open and busy_ns > self._busy_ns[name] else "idle"
            gpus[does] += self._gpus
            self._busy_ns[name] = busy_ns
        self._cuts.append((self._since_ns, now_ns, {role: gpus[role] for role in (*ROLES, "idle")}))
        self._since_ns = now_ns

    def intervals(self, now_ns: int) -> list[dict[str, float]]:
        """[{start_s, end_s, rollout, inference, training, idle}] up to now, neighbours that are the same in one."""
        self.cut(now_ns)
        found: list[dict[str, float]] = []
        for since_ns, until_ns, gpus in self._cuts:
            end_s = (until_ns - self._start_ns) / SECOND_NS
            if found and all(found[-1][role] == number for role, number in gpus.items()):
                found[-1]["end_s"] = end_s
            else:
                found.append({"start_s": (since_ns - self._start_ns) / SECOND_NS, "end_s": end_s, **gpus})
        return found
