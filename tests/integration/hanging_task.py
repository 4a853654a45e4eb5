"""A task whose verifier never returns on one kind of answer: `task.name: tests.integration.hanging_task:HangingArithmetic`."""

from __future__ import annotations

import time

from dynarl.tasks.arithmetic import Arithmetic
from dynarl.tasks.base import Score


class HangingArithmetic(Arithmetic):
    """Hangs on every training question whose index is a multiple of 4; all else as in Arithmetic."""

    def verify(self, split: str, index: int, response: str) -> Score:
        while split == "train" and index % 4 == 0:
            time.sleep(3600)
        return super().verify(split, index, response)
