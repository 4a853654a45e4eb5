"""A rollout worker that takes as many steps as it is told, however fast the machine is."""

from __future__ import annotations

from dynarl.roles.rollout.worker import RolloutWorker
from dynarl.roles.worker import main


class SteppedRolloutWorker(RolloutWorker):
    """Events: stepped (all steps that it was told to take are taken)."""

    steps = 0

    def do_go_on(self, steps: int) -> None:
        self.steps = steps

    def work(self) -> bool:
        if not self.steps or self._engine is None or not self._engine.busy():
            return False
        more = super().work()
        self.steps -= 1
        if not self.steps:
            self.emit("stepped")
        return more


if __name__ == "__main__":
    main(SteppedRolloutWorker)
