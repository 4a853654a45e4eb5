"""Chains of additions and subtractions, from reasoning-gym's `chain_sum`, answered with or without worked steps.

    question   State the final answer to the following arithmetic problem: 5 + 3 - 9 =
    worked     \\n5 + 3 = 8\\n8 - 9 = -1\\nanswer: -1
    direct     \\nanswer: -1

A worked answer is as long as the chain, and long chains are rare: lengths have a long tail. Demonstrations mix the two
forms, mostly direct, so a warm-started model guesses; that the steps pay is what reinforcement learning finds out.
Questions and the verdict on the final answer are reasoning-gym's; the demonstrations are written here.
"""

from __future__ import annotations

import functools
import math
import random
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dynarl.tasks import gym
from dynarl.tasks.base import Score, Task, check_split, is_held_out

INSTRUCTION = "State the final answer to the following arithmetic problem: "
MARKER = "\nanswer: "
# For one more held-out question. Eight draws are enough as long as there are plenty.
MOST_DRAWS = 20_000


class ArithmeticArgs(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`task.args` of the task arithmetic."""

    min_terms: Annotated[int, Meta(ge=2)] = 2
    max_terms: Annotated[int, Meta(ge=2)] = 24
    min_digits: Annotated[int, Meta(ge=1)] = 1
    max_digits: Annotated[int, Meta(ge=1)] = 1
    tail: float = 1.0  # a chain of n terms has probability proportional to n ** -tail; 0: all lengths alike
    worked: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.3  # share of demonstrations with worked steps ...
    worked_first: Annotated[int, Meta(ge=0)] = 0  # ... after this many, which all have them
    growing: Annotated[int, Meta(ge=0)] = 0  # over this many the longest chain grows from min_terms to max_terms

    def __post_init__(self) -> None:
        if not math.isfinite(self.tail):
            raise ValueError(f"tail = {self.tail} must be a finite number")
        for low, high in (("min_terms", "max_terms"), ("min_digits", "max_digits")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} {getattr(self, low)} is greater than {high} {getattr(self, high)}")


class Arithmetic(Task):
    """See the module's text. Train and eval questions are disjoint: a question's hash decides where it may appear."""

    def __init__(self, args: dict[str, Any], seed: int):
        super().__init__(args, seed)
        try:
            self.args = msgspec.convert(args, ArithmeticArgs)
        except msgspec.ValidationError as error:
            raise ValueError(f"task.args of arithmetic: {error}") from None
        self._terms = range(self.args.min_terms, self.args.max_terms + 1)
        self._weights = [n**-self.args.tail for n in self._terms]
        self._entry = functools.lru_cache(maxsize=4096)(self._make_entry)
        self._dataset = functools.cache(self._make_dataset)
        self._held_out: dict[str, dict[str, Any]] = {}  # by question, in the order of their indices

    def question(self, split: str, index: int) -> str:
        check_split(split, index)
        return self._entry_of(split, index)["question"]

    def verify(self, split: str, index: int, response: str) -> Score:
        """1 if the text after the last marker of the response is the right number, else 0.

        The verifier gives part marks for text that contains the right number; those count as wrong here.
        """
        check_split(split, index)
        entry = self._entry_of(split, index)
        _, marker, answer = response.rpartition(MARKER)
        dataset = self._dataset(entry["metadata"]["num_terms"])
        correct = bool(marker) and dataset.score_answer(answer, entry) == 1.0
        return Score(reward=float(correct), correct=correct)

    def demonstration(self, index: int) -> tuple[str, str]:
        check_split("train", index)
        entry = self._entry("demonstration", index)
        worked = index < self.args.worked_first or self._rng("form", index).random() < self.args.worked
        steps = worked_steps(entry["metadata"]["expression"]) if worked else ""
        return entry["question"], f"{steps}{MARKER}{entry['answer']}"

    def symbols(self) -> list[str]:
        """An operation with its digit, and each small number, is one symbol: a step of the working then is one addition to
        look up and one term to copy. Spelled digit by digit it takes several times the demonstrations to learn."""
        operations = [f" {operator} {digit}" for operator in "+-" for digit in range(10)]
        numbers = [*map(str, range(10, 100)), *map(str, range(-60, 0))]
        return [INSTRUCTION, " + ", " - ", " = ", " =", MARKER, "\n", "-", *"0123456789", *operations, *numbers]

    def _entry_of(self, split: str, index: int) -> dict[str, Any]:
        return self._entry(split, index) if split == "train" else self._held_out_entry(index)

    def _make_entry(self, stream: str, index: int) -> dict[str, Any]:
        """Draw questions from a stream of random numbers until one may be trained on."""
        rng = self._rng(stream, index)
        terms = range(self.args.min_terms, self._longest(stream, index) + 1)
        dataset = self._dataset(rng.choices(terms, self._weights[: len(terms)])[0])
        while is_held_out((entry := dataset[rng.getrandbits(48)])["question"]):
            pass
        return entry

    def _longest(self, stream: str, index: int) -> int:
        """Number of terms of the longest chain that may be drawn."""
        if stream == "train" or index >= self.args.growing:
            return self.args.max_terms
        return self.args.min_terms + (self.args.max_terms - self.args.min_terms) * index // self.args.growing

    def _held_out_entry(self, index: int) -> dict[str, Any]:
        """The held-out questions are all different: each is drawn until it is none of those before it."""
        while len(self._held_out) <= index:
            rng = self._rng("eval", len(self._held_out))
            for _ in range(MOST_DRAWS):
                num_terms = rng.choices(self._terms, self._weights)[0]
                entry = self._dataset(num_terms)[rng.getrandbits(48)]
                if is_held_out(entry["question"]) and entry["question"] not in self._held_out:
                    self._held_out[entry["question"]] = entry
                    break
            else:
                raise ValueError(
                    f"task: {len(self._held_out)} different held-out questions were found, and {MOST_DRAWS} more draws gave "
                    f"none; a smaller task.eval_size or a larger max_terms or max_digits helps"
                )
        return list(self._held_out.values())[index]

    def _rng(self, stream: str, index: int) -> random.Random:
        return random.Random(f"{self.seed} {stream} {index}")  # a string is hashed with SHA-512: the same everywhere

    def _make_dataset(self, num_terms: int) -> Any:
        digits = {"min_digits": self.args.min_digits, "max_digits": self.args.max_digits}
        return gym.create_dataset("arithmetic", "chain_sum", min_terms=num_terms, max_terms=num_terms, seed=0, **digits)


def worked_steps(expression: str) -> str:
    r"""Running totals, a line per operation: `worked_steps("5 + 3 - 9") == "\n5 + 3 = 8\n8 - 9 = -1"`."""
    first, *rest = expression.split(" ")
    total, lines = int(first), []
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        before, total = total, total + int(term) if operator == "+" else total - int(term)
        lines.append(f"\n{before} {operator} {term} = {total}")
    return "".join(lines)
