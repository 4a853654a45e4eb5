"""What a task is: questions by index, a verifier, demonstrations, a vocabulary, and tools if it has any.

A task is procedural: question `index` of a split is the same in every process, at every time, and costs nothing to
keep. So only indices travel between nodes, and a restarted environment worker has lost nothing.
"""

from __future__ import annotations

import hashlib
import importlib
from abc import ABC, abstractmethod
from typing import Any, Sequence

import msgspec

from dynarl.tasks.tools.base import Tool

KNOWN_TASKS = {"arithmetic": "dynarl.tasks.arithmetic:Arithmetic", "tools": "dynarl.tasks.toolbox:Toolbox"}
SPLITS = ("train", "eval")
HELD_OUT_ONE_IN = 8


class Score(msgspec.Struct, frozen=True):
    """Verdict on one answer. `reward` is what training sees, `correct` what accuracy counts."""

    reward: float
    correct: bool


class Task(ABC):
    """Base of all tasks. `args` is the job's `task.args`, `seed` its `run.seed`. Texts are plain strings.

    A task with tools: the model writes `<call>search Vorrin</call>` and finds `<result>...</result>` behind it. The
    marks are those below; `call_end`, at which generation stops, must be one token of the tokenizer that is used.
    """

    call_begin, call_end = "<call>", "</call>"
    output_begin, output_end = "<result>", "</result>"
    max_output_chars = 200  # of one answer of a tool; the rest is cut off

    def __init__(self, args: dict[str, Any], seed: int):
        self.seed = seed

    @abstractmethod
    def question(self, split: str, index: int) -> str:
        """Prompt `index` of a split. Raises ValueError on a split that is not in `SPLITS` or a negative index."""

    @abstractmethod
    def verify(self, split: str, index: int, response: str) -> Score:
        """Judge a response (the prompt is not part of it, nor the end-of-sequence token)."""

    @abstractmethod
    def demonstration(self, index: int) -> tuple[str, str | Sequence[str]]:
        """(question, response) number `index` for the supervised warm start; never a held-out question.

        A response with tool calls is given as the turns of the model; what the tools answer in between comes from them.
        """

    @abstractmethod
    def symbols(self) -> list[str]:
        """The strings that a tokenizer made for this task has as tokens; a longer one wins over a shorter."""

    def tools(self) -> dict[str, Tool]:
        """The tools of this task, by the names that the model calls them by."""
        return {}

    def parse_call(self, turn: str) -> tuple[str, str]:
        """(tool, arguments) that a turn of the model ending in `call_end` asks for; no such tool need be there."""
        _, _, call = turn.removesuffix(self.call_end).rpartition(self.call_begin)
        name, _, arguments = call.strip().partition(" ")
        return name, arguments


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


def is_held_out(text: str) -> bool:
    """Whether a question, or what it is about, belongs to the eval split: a property of its text, whatever the seed."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()[0] % HELD_OUT_ONE_IN == 0
