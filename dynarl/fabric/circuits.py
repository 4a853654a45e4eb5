"""When optical circuits are changed, and how, without losing a message.

A change takes T seconds beside draining. Of a predicted idle window W with standard deviation s, W' = W - 2 s is
counted on. D bytes at B_old or at B_new then say whether it pays:

    D / B_old > max(0, T - W') + D / B_new

which holds for any D where the window hides the change (OrchestrRL's rule), and otherwise from
D_min = (T - W') / (1 / B_old - 1 / B_new) bytes on.

A change goes through steps, one change at a time:

    prepare    new messages avoid the circuits that go; those on them end         abort: as before, nothing was touched
    program    once nothing uses them; mirrors move, only circuits common to both settings carry light
    activate   T later: the new setting. A circuit that did not lock stays dark; its pods have the others or the core
"""

from __future__ import annotations

from math import ceil, inf

from dynarl.fabric.flows import FlowNetwork
from dynarl.fabric.rfabric import NO_CIRCUITS, Circuits, RFabric

# Standard deviations of the predicted window that are not counted on.
MARGIN = 2.0


def least_bytes(reconfiguration_s: float, window_s: float, old_bytes_per_s: float, new_bytes_per_s: float) -> float:
    """D_min: bytes above which a change saves time. 0: the window hides it. Infinite: the rate gets no better.

    >>> [round(least_bytes(t, 0.0, 12.5e9, 50e9) / 1e9, 2) for t in (0.010, 0.015, 0.030)]
    [0.17, 0.25, 0.5]
    """
    if new_bytes_per_s <= old_bytes_per_s:
        return inf
    return max(0.0, reconfiguration_s - window_s) / (1 / old_bytes_per_s - 1 / new_bytes_per_s)


def is_worthwhile(
    nbytes: float,
    reconfiguration_s: float,
    window_s: float,
    window_sigma_s: float,
    old_bytes_per_s: float,
    new_bytes_per_s: float,
) -> bool:
    """Whether the bytes of the next phase are done earlier with the change."""
    window_s -= MARGIN * window_sigma_s
    return nbytes > least_bytes(reconfiguration_s, window_s, old_bytes_per_s, new_bytes_per_s)


class CircuitSwitch:
    """The circuits of a fabric whose messages run in `network`, made with `fabric.topology(circuits)`.

    `epoch` counts settings that were activated. Calls in the wrong order raise ValueError.
    """

    def __init__(self, fabric: RFabric, network: FlowNetwork, circuits: Circuits) -> None:
        self.fabric, self.circuits = fabric, circuits
        self.epoch = 0
        self._network = network
        self._target: Circuits | None = None
        self._ready_ns: int | None = None

    def prepare(self, now_ns: int, circuits: Circuits) -> None:
        """Begin a change."""
        if self._target is not None:
            raise ValueError("a change of circuits is under way: activate or abort it first")
        self.fabric.count(circuits)
        self._network.change(now_ns, self.fabric.draining(self.circuits, self.circuits & circuits))
        self._target = circuits

    def waits_for(self) -> dict[int, object]:
        """Transfers that still use circuits between pods that lose all of theirs: id to tag."""
        self._require(programmed=False)
        kept = self.circuits & self._target
        return self._network.users(self.fabric.links(self.circuits) - self.fabric.links(kept))

    def abort(self, now_ns: int) -> None:
        """Give the change up, before mirrors have moved."""
        self._require(programmed=False)
        self._network.change(now_ns, self.fabric.topology(self.circuits))
        self._target = None

    def program(self, now_ns: int) -> int:
        """Move the mirrors. Returns when the new setting can be activated. Raises ValueError while a message would be
        lost."""
        waits_for = self.waits_for()
        if waits_for:
            raise ValueError(f"transfers {waits_for} are on circuits that go: finish them, or abort the change")
        self._network.change(now_ns, self.fabric.topology(self.circuits & self._target))
        moves = self.circuits != self._target
        self._ready_ns = now_ns + (ceil(self.fabric.reconfiguration_s * 1e9) if moves else 0)
        return self._ready_ns

    def activate(self, now_ns: int, failed: Circuits = NO_CIRCUITS) -> None:
        """The new setting is in use from now on, without circuits that did not lock."""
        self._require(programmed=True)
        if now_ns < self._ready_ns:
            raise ValueError(f"circuits are ready at {self._ready_ns} ns, not at {now_ns} ns")
        self.circuits = self._target - failed
        self._network.change(now_ns, self.fabric.topology(self.circuits))
        self.epoch += 1
        self._target = self._ready_ns = None

    def _require(self, programmed: bool) -> None:
        if self._target is None:
            raise ValueError("no change of circuits is under way: prepare one first")
        if programmed != (self._ready_ns is not None):
            raise ValueError("program the change first" if programmed else "mirrors have moved: activate the change")
