"""A task that rewards any answer, by chance: groups differ within, so an untrained model has gradients from the start."""

from __future__ import annotations

import zlib

from dynarl.tasks.arithmetic import Arithmetic
from dynarl.tasks.base import Score


class VariedArithmetic(Arithmetic):
    """The reward depends on the answer's text alone."""

    def verify(self, split: str, index: int, response: str) -> Score:
        return Score(zlib.crc32(response.encode()) % 5 / 4, False)
