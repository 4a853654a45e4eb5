"""What a task is: questions by index, a verifier, demonstrations, a vocabulary.

A task is procedural: question `index` of a split is the same in every process, at every time, and costs nothing to
keep. So only indices travel between nodes, and a restarted environment worker has lost nothing.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Any

import msgspec

KNOWN_TASKS = {"arithmetic": "dynarl.tasks.arithmetic:Arithmetic"}
SPLITS = ("train", "eval")


class Score(msgspec.Struct, frozen=True):
    """Verdict on one answer. `reward` is what training sees, `correct` what accuracy counts."""

    reward: float
    correct: bool


class Task(ABC):
    """Base of all tasks. `args` is the job's `task.args`, `seed` its `run.seed`. Texts are plain strings."""

    def __init__(self, args: dict[str, Any], seed: int):
        self.seed = seed

    @abstractmethod
    def question(self, split: str, index: int) -> str:
        """Prompt `index` of a split. Raises ValueError on a split that is not in `SPLITS` or a negative index."""

    @abstractmethod
    def verify(self, split: str, index: int, response: str) -> Score:
        """Judge a response (the prompt is not part of it, nor the end-of-sequence token)."""

    @abstractmethod
    def demonstration(self, index: int) -> tuple[str, str]:
        """(question, response) number `index` for the supervised warm start; never a held-out question."""

    @abstractmethod
    def symbols(self) -> list[str]:
        """The strings that a tokenizer made for this task has as tokens; a longer one wins over a shorter."""


def open_task(name: str, args: dict[str, Any], seed: int) -> Task:
    """Make a task by its short name or by `package.module:Class`.

    Raises ValueError on a name that is neither, or on arguments that the task does not take.
    """
    path = KNOWN_TASKS.get(name, name)
    module, colon, attribute = path.partition(":")
    if not colon:
        raise ValueError(f"unknown task {name!r}: known are {', '.join(KNOWN_TASKS)}; your own is package.module:Class")
    task_class = getattr(importlib.import_module(module), attribute, None)
    if not (isinstance(task_class, type) and issubclass(task_class, Task)):
        raise ValueError(f"task {name!r}: {module} has no class {attribute} derived from dynarl.tasks.base.Task")
    return task_class(args, seed)


def check_split(split: str, index: int) -> None:
    """Raise ValueError unless (split, index) can name a question."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: expected one of {', '.join(SPLITS)}")
    if index < 0:
        raise ValueError(f"prompt index {index} is negative")
