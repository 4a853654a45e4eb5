r"""Small questions that need a tool: a product, a made-up fact, both in turn, or a few lines of Python.

    multiply   347 * 582 =                  <call>calculator 347*582</call><result>201954</result>\nanswer: 201954
    lookup     How high is Mount Keldar?    <call>search Keldar</call><result>Mount Keldar is 418 metres high....
    chain      The height of Mount Keldar * 370 =      a search, then the calculator; with `calculations` above 1 more
               of them, one call each: ... * 370 + 582 - 114 =
    digits     The sum of the digits of 347 ** 23 =    <call>python print(sum(map(int,str(347**23))))</call>...

Demonstrations mix answers with calls and answers given at once, mostly the latter, so a warm-started model guesses;
that a call pays is what reinforcement learning finds out. The facts (corpus.txt beside the tools) are nowhere else.
"""

from __future__ import annotations

import functools
import math
import operator
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Sequence

import msgspec
from msgspec import Meta

from dynarl.tasks.base import Score, Task, check_split, is_held_out
from dynarl.tasks.tools import base
from dynarl.tasks.tools.base import Tool
from dynarl.tasks.tools.calculator import Calculator
from dynarl.tasks.tools.sandbox import PythonTool
from dynarl.tasks.tools.search import Search

MARKER = "\nanswer: "
KINDS = ("multiply", "lookup", "chain", "digits")
TOOLS = ("calculator", "search", "python")
# A sentence of the corpus, the question for its number, and the number as part of an expression. {}: the name.
FACTS = (
    ("Mount {} is 0 metres high.", "How high is Mount {}?", "The height of Mount {}"),
    ("Lake {} is 0 feet deep.", "How deep is Lake {}?", "The depth of Lake {}"),
    ("The river {} is 0 miles long.", "How long is the river {}?", "The length of the river {}"),
    ("The moon {} takes 0 hours to turn.", "How long does the moon {} take to turn?", "The day of the moon {}"),
    ("The tower of {} has 0 steps.", "How many steps has the tower of {}?", "The steps of {}"),
    ("The city of {} has 0 bridges.", "How many bridges has the city of {}?", "The bridges of {}"),
)
OPERATIONS = {"*": operator.mul, "+": operator.add, "-": operator.sub}
PROGRAM = ("print(sum(map(int,str(", "**", "))))")
ASK_DIGITS = "The sum of the digits of "


class ToolboxArgs(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`task.args` of the task tools. Lists are words with spaces between them."""

    kinds: str = " ".join(KINDS)
    tools: str = " ".join(TOOLS)  # those that are there; the questions stay the same
    digits: Annotated[int, Meta(ge=1, le=9)] = 3  # of a factor
    calculations: Annotated[int, Meta(ge=1)] = 1  # of a chain at most; the first is a product, others add or subtract
    tail: float = 1.0  # n calculations have probability proportional to n ** -tail; 0: all numbers alike
    called: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.3  # share of demonstrations that call a tool ...
    called_first: Annotated[int, Meta(ge=0)] = 0  # ... after this many, which all do
    unconfined_python: bool = False  # run programs without a sandbox where the node permits none

    def __post_init__(self) -> None:
        if not math.isfinite(self.tail):
            raise ValueError(f"tail = {self.tail} must be a finite number")
        for field, known in (("kinds", KINDS), ("tools", TOOLS)):
            if unknown := set(getattr(self, field).split()) - set(known):
                raise ValueError(f"{field}: unknown {', '.join(sorted(unknown))}; known are {', '.join(known)}")
        if not self.kinds.split():
            raise ValueError("kinds is empty")


@dataclass(frozen=True)
class Problem:
    """calls: (tool, arguments) that lead to the answer."""

    question: str
    calls: Sequence[tuple[str, str]]
    answer: str
    held_out: bool


@dataclass(frozen=True)
class Fact:
    name: str
    number: int
    question: str
    phrase: str


@functools.cache
def corpus() -> list[str]:
    return Path(base.__file__).with_name("corpus.txt").read_text(encoding="utf-8").splitlines()


@functools.cache
def facts() -> list[Fact]:
    """The corpus as questions. Raises ValueError on a sentence of another form."""
    found = []
    for sentence in corpus():
        for form, question, phrase in FACTS:
            if match := re.fullmatch(re.escape(form).replace(r"\{\}", r"(\w+)").replace("0", r"(\d+)"), sentence):
                found.append(Fact(match[1], int(match[2]), question.format(match[1]), phrase.format(match[1])))
                break
        else:
            raise ValueError(f"corpus: no question is known for {sentence!r}")
    return found


class Toolbox(Task):
    """See the module's text. A product or a fact that the eval split asks for is in no question that is trained on."""

    def __init__(self, args: dict[str, Any], seed: int):
        super().__init__(args, seed)
        try:
            self.args = msgspec.convert(args, ToolboxArgs)
        except msgspec.ValidationError as error:
            raise ValueError(f"task.args of tools: {error}") from None
        self._problem = functools.lru_cache(maxsize=4096)(self._make_problem)

    def question(self, split: str, index: int) -> str:
        check_split(split, index)
        return self._problem(split, index).question

    def verify(self, split: str, index: int, response: str) -> Score:
        """1 if the text after the last marker is the right number, else 0. What a tool wrote is no answer."""
        check_split(split, index)
        _, marker, answer = response.rpartition(self.output_end)[2].rpartition(MARKER)
        correct = bool(marker) and answer.strip() == self._problem(split, index).answer
        return Score(reward=float(correct), correct=correct)

    def demonstration(self, index: int) -> tuple[str, Sequence[str]]:
        check_split("train", index)
        problem = self._problem("demonstration", index)
        called = index < self.args.called_first or self._rng("form", index).random() < self.args.called
        calls = [f"{self.call_begin}{name} {arguments}{self.call_end}" for name, arguments in problem.calls if called]
        return problem.question, [*calls, f"{MARKER}{problem.answer}"]

    def tools(self) -> dict[str, Tool]:
        made = {"calculator": Calculator, "search": lambda: Search(corpus()),
                "python": lambda: PythonTool(confined=not self.args.unconfined_python)}
        return {name: made[name]() for name in self.args.tools.split()}

    def symbols(self) -> list[str]:
        """Phrases, syllables of names, digits; and letters, so that the errors of tools can be read."""
        phrases = {part for form in FACTS for text in form for part in re.split(r"\{\}|0", text)} - {"", " "}
        names = {half for fact in facts() for half in (fact.name[:3], fact.name[3:])}
        marks = [self.call_begin, self.call_end, self.output_begin, self.output_end, MARKER]
        words = [*(f"{name} " for name in TOOLS), "error: ", "no answer", *PROGRAM, ASK_DIGITS, " * ", " ** ", " ="]
        letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
        characters = [*"0123456789", *letters, *" *+-/.:'()"]
        return list(dict.fromkeys([*marks, *words, *sorted(phrases), *sorted(names), *characters]))

    def _make_problem(self, stream: str, index: int) -> Problem:
        """Draw until the problem belongs to the split."""
        rng = self._rng(stream, index)
        kind = rng.choice(self.args.kinds.split())
        while (problem := self._draw(kind, rng)).held_out != (stream == "eval"):
            pass
        return problem

    def _draw(self, kind: str, rng: random.Random) -> Problem:
        def number() -> int:
            return rng.randrange(10 ** (self.args.digits - 1), 10**self.args.digits)

        if kind == "multiply":
            a, b = number(), number()
            question = f"{a} * {b} ="
            return Problem(question, [("calculator", f"{a}*{b}")], str(a * b), is_held_out(question))
        if kind == "digits":
            a, b = number(), rng.randrange(11, 30)
            question = f"{ASK_DIGITS}{a} ** {b} ="
            program = f"{PROGRAM[0]}{a}{PROGRAM[1]}{b}{PROGRAM[2]}"
            return Problem(question, [("python", program)], str(sum(map(int, str(a**b)))), is_held_out(question))
        fact = rng.choice(facts())
        search, held_out = ("search", fact.name), is_held_out(fact.name)
        if kind == "lookup":
            return Problem(fact.question, [search], str(fact.number), held_out)
        signs, numbers = ["*"], range(1, self.args.calculations + 1)
        if len(numbers) > 1:
            (count,) = rng.choices(numbers, [n**-self.args.tail for n in numbers])
            signs += rng.choices("+-", k=count - 1)
        value, phrase, calls = fact.number, fact.phrase, [search]
        for sign in signs:
            term = number()
            calls.append(("calculator", f"{value}{sign}{term}"))
            phrase += f" {sign} {term}"
            value = OPERATIONS[sign](value, term)
        return Problem(f"{phrase} =", calls, str(value), held_out)

    def _rng(self, stream: str, index: int) -> random.Random:
        return random.Random(f"{self.seed} {stream} {index}")  # a string is hashed with SHA-512: the same everywhere
