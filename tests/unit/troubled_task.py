"""A task with every trouble that a verifier can have: `troubled_task:Troubled`. What happens depends on the question's index."""

from __future__ import annotations

import os
import time
from fractions import Fraction
from pathlib import Path

from dynarl.tasks.base import Score, Task

GOOD, HANGS, DIES, DIES_ONCE, RAISES, NO_NUMBER, OTHER_NUMBER = range(7)


class Troubled(Task):
    def __init__(self, args, seed):
        super().__init__(args, seed)
        self.died = Path(args["marker"])

    def question(self, split: str, index: int) -> str:
        return "1"

    def verify(self, split: str, index: int, response: str) -> Score:
        if index == HANGS:
            time.sleep(3600)
        if index == DIES or (index == DIES_ONCE and not self.died.exists()):
            self.died.touch()
            os._exit(9)
        if index == RAISES:
            raise ValueError("not a number")
        if index == NO_NUMBER:
            return Score(object(), True)
        if index == OTHER_NUMBER:
            return Score(Fraction(1, 2), 1)
        return Score(1.0, True)

    def demonstration(self, index: int) -> tuple[str, str]:
        return "1", "1"

    def symbols(self) -> list[str]:
        return ["1"]
