"""What is asked of the engines in a step: prompts, and how long each answer will turn out to be.

Lengths are drawn, or read from a recorded trace. Drawn ones, of the tokens that the model itself produces:

    body    median * exp(sigma * z),  z = sqrt(rho) * z_group + sqrt(1 - rho) * z_sample
    tail    with probability tail_share: tail_start * u ** (-1 / tail_alpha)   (Pareto)
    cap     what would be longer ends there: a mass of answers at the cap is a feature of real runs
    drift   the median grows by `drift` with every step: a policy learns to think longer

Answers with tools have turns: after each but the last the answer waits `tool_ns` for a tool, whose result adds
`tool_tokens`. The length above is that of all turns together; each turn is about `later_turn_share` of the one before
it. The cap is on everything, results of tools included.

The same seed gives the same requests on any machine. Uniform numbers are the bits of PCG64, which numpy keeps stable.
The C library's exp and log, and numpy's own, may differ in the last bit from one CPU to the next, and rounding to whole
tokens could turn that into another length; so both are computed here from sums, products and roots, which IEEE 754
fixes to the last bit.

>>> response = Lengths(median=900, sigma=0.8, cap=4096, correlation=0.5)
>>> workload = Workload(prompts=1, group_size=3, prompt=Lengths(median=100, cap=200), response=response)
>>> [(one.sample, one.prompt_tokens, one.turns[0].decode_tokens) for one in workload.draw(step=1, seed=7)]
[('1:0:0', 100, 2149), ('1:0:1', 100, 924), ('1:0:2', 100, 2682)]
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from dynarl.errors import ConfigError

NS_PER_S = 10**9
# A tool call of thirty years; times are whole nanoseconds in 64 bits.
MOST_S = 1e9


def _at_least(section: msgspec.Struct, **least: float) -> None:
    """Numbers are finite, and these not below their bounds. Raises ValueError."""
    for name, value in msgspec.structs.asdict(section).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} = {value:g} must be a finite number")
        if name in least and value < least[name]:
            raise ValueError(f"{name} = {value:g} must be at least {least[name]}")


class Turn(NamedTuple):
    """`decode_tokens` from the model; then, unless it is the last turn, a tool that takes `tool_ns` and adds tokens."""

    decode_tokens: int
    tool_ns: int = 0
    tool_tokens: int = 0


class SimRequest(NamedTuple):
    """An answer as it will be. Policies must not see `turns`. sample: step:group:member.

    >>> request = SimRequest("1:0:3", 100, (Turn(50, 2_000_000_000, 10), Turn(40)))
    >>> request.response_tokens, request.position(0), request.position(60)
    (100, (0, 50), (1, 100))
    """

    sample: str
    prompt_tokens: int
    turns: tuple[Turn, ...]

    @property
    def group(self) -> str:
        """What all answers to one prompt share."""
        return self.sample.rpartition(":")[0]

    @property
    def response_tokens(self) -> int:
        """At its end, with what tools added."""
        return sum(turn.decode_tokens + turn.tool_tokens for turn in self.turns)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

    def position(self, tokens_done: int) -> tuple[int, int]:
        """(turn that is being decoded, tokens of the response at this turn's end) once `tokens_done` are there.

        Raises ValueError where the model has nothing to decode: the answer is complete, or waits for a tool.
        """
        start = 0
        for index, turn in enumerate(self.turns):
            end = start + turn.decode_tokens
            if start <= tokens_done < end:
                return index, end
            start = end + turn.tool_tokens
        raise ValueError(
            f"{self.sample} with {tokens_done} tokens of its response has nothing to decode: its turns are "
            f"{[tuple(turn) for turn in self.turns]}"
        )


class Lengths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A law of lengths in whole tokens, 1 to `cap`; see the top of the module."""

    median: float
    cap: int
    sigma: float = 0.0
    tail_share: float = 0.0
    tail_start: float = 0.0  # default: the median
    tail_alpha: float = 1.5
    correlation: float = 0.0  # rho: between the samples of a group
    drift: float = 0.0  # relative growth of the median per step

    def __post_init__(self) -> None:
        _at_least(self, median=1, cap=1, sigma=0, tail_share=0, tail_start=0, correlation=0)
        for name in ("tail_share", "correlation"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} = {getattr(self, name):g} is a share, at most 1")
        if self.tail_alpha <= 0:
            raise ValueError(f"tail_alpha = {self.tail_alpha:g} must be above 0")
        if self.drift <= -1:
            raise ValueError(f"drift = {self.drift:g} leaves no tokens: it must be above -1")

    def draw(self, random: Random, groups: int, members: int, step: int) -> np.ndarray:
        """int64 [groups, members]."""
        shared, own = random.normal(groups)[:, None], random.normal(groups * members).reshape(groups, members)
        z = math.sqrt(self.correlation) * shared + math.sqrt(1 - self.correlation) * own
        median = self.median * _power(1.0 + self.drift, step - 1)
        tokens = median * exp(self.sigma * z)
        in_tail = random.uniform(groups * members).reshape(groups, members) < self.tail_share
        u = random.uniform(groups * members).reshape(groups, members)
        tail = (self.tail_start or median) * exp(-log(1.0 - u) / self.tail_alpha)
        return np.clip(np.rint(np.where(in_tail, tail, tokens)), 1, self.cap).astype(np.int64)


class Tools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tool calls of an answer. Their number is geometric with mean `mean_calls`, at most `most_calls`."""

    mean_calls: float
    most_calls: int
    median_s: float
    sigma: float = 0.0
    most_s: float = 600.0
    tokens: Lengths = Lengths(median=100, cap=100)
    later_turn_share: float = 1.0

    def __post_init__(self) -> None:
        _at_least(self, mean_calls=0, most_calls=0, median_s=0, sigma=0, most_s=0)
        if self.most_s > MOST_S:
            raise ValueError(f"most_s = {self.most_s:g} must be at most {MOST_S:g}")
        if self.later_turn_share <= 0:
            raise ValueError(f"later_turn_share = {self.later_turn_share:g} must be above 0")

    def calls(self, random: Random, count: int) -> np.ndarray:
        """Number of calls of each answer, int64 [count]."""
        if not self.mean_calls:
            return np.zeros(count, np.int64)
        again = log(np.array([self.mean_calls / (1 + self.mean_calls)]))[0]
        return np.minimum(np.floor(log(1.0 - random.uniform(count)) / again), self.most_calls).astype(np.int64)

    def durations_ns(self, random: Random, count: int) -> np.ndarray:
        """int64 [count]"""
        seconds = np.minimum(self.median_s * exp(self.sigma * random.normal(count)), self.most_s)
        return np.rint(seconds * NS_PER_S).astype(np.int64)


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`prompts` groups of `group_size` answers in a step. trace: a file of recorded requests that replaces the laws."""

    prompts: int
    group_size: int
    prompt: Lengths | None = None
    response: Lengths | None = None
    tools: Tools | None = None
    trace: str | None = None

    def __post_init__(self) -> None:
        _at_least(self, prompts=1, group_size=1)
        if self.trace is None and (self.prompt is None or self.response is None):
            raise ValueError("a workload has `prompt` and `response`, the laws of their lengths, or a `trace`")

    @property
    def samples(self) -> int:
        """In a step."""
        return self.prompts * self.group_size

    def draw(self, step: int, seed: int) -> list[SimRequest]:
        """The requests of a step (the first is 1), group by group."""
        if self.trace is not None:
            return _from_trace(Path(self.trace), step, self.prompts, self.group_size)
        random = Random(seed, step)
        groups, members = self.prompts, self.group_size
        prompts = self.prompt.draw(random, groups, 1, step)[:, 0].tolist()
        responses = self.response.draw(random, groups, members, step)
        turns = [[(Turn(tokens),) for tokens in row] for row in responses.tolist()]
        if self.tools is not None:
            turns = _with_tools(self.tools, random, responses, step, self.response.cap)
        return [
            SimRequest(f"{step}:{group}:{member}", prompts[group], turns[group][member])
            for group in range(groups)
            for member in range(members)
        ]


def _with_tools(
    tools: Tools, random: Random, responses: np.ndarray, step: int, cap: int
) -> list[list[tuple[Turn, ...]]]:
    """Turns of every answer, by group and member. Every turn decodes at least a token."""
    groups, members = responses.shape
    calls = np.minimum(tools.calls(random, responses.size), responses.ravel() - 1)
    total = int(calls.sum())
    seconds = iter(tools.durations_ns(random, total).tolist())
    results = iter(tools.tokens.draw(random, total, 1, step)[:, 0].tolist()) if total else iter(())
    out = []
    for tokens, number in zip(responses.ravel().tolist(), calls.tolist()):
        parts = _split(tokens, number + 1, tools.later_turn_share)
        turns = [Turn(part, next(seconds), next(results)) for part in parts[:-1]]
        out.append(_cut((*turns, Turn(parts[-1])), cap))
    return [out[group * members : (group + 1) * members] for group in range(groups)]


def _cut(turns: tuple[Turn, ...], cap: int) -> tuple[Turn, ...]:
    """An answer ends at `cap` tokens, results of tools included.

    >>> _cut((Turn(50, 1000, 30), Turn(50)), 100)
    (Turn(decode_tokens=50, tool_ns=1000, tool_tokens=30), Turn(decode_tokens=20, tool_ns=0, tool_tokens=0))
    """
    start = 0
    for index, turn in enumerate(turns):
        end = start + turn.decode_tokens + turn.tool_tokens
        # The result must leave room for a token behind it.
        if end >= cap and index + 1 < len(turns) or end > cap:
            return (*turns[:index], Turn(min(turn.decode_tokens, cap - start)))
        start = end
    return turns


def _split(tokens: int, parts: int, ratio: float) -> list[int]:
    """Whole parts of at least one token, each about `ratio` times the one before.

    >>> _split(700, 3, 0.5)
    [400, 200, 100]
    """
    weights = [1.0]
    for _ in range(parts - 1):
        weights.append(weights[-1] * ratio)
    ends, total, so_far = [0], sum(weights), 0.0
    for index, weight in enumerate(weights[:-1]):
        so_far += weight
        least, most = ends[-1] + 1, tokens - (parts - 1 - index)
        ends.append(min(max(round(tokens * so_far / total), least), most))
    ends.append(tokens)
    return [end - start for start, end in zip(ends, ends[1:])]


# ---- recorded requests


class _Recorded(msgspec.Struct, frozen=True):
    """A line of a trace: turns as (decode_tokens, tool_s, tool_tokens)."""

    step: int
    group: int
    prompt_tokens: int
    turns: list[tuple[int, float, int]]


def _from_trace(path: Path, step: int, prompts: int, group_size: int) -> list[SimRequest]:
    """A step of a trace; behind the last one the first follows again. Raises ConfigError where it does not fit."""
    recorded = _read_trace(str(path))
    steps = sorted(recorded)
    groups = recorded[steps[(step - 1) % len(steps)]]
    if len(groups) < prompts or any(len(members) < group_size for members in groups.values()):
        raise ConfigError(
            f"{path}: step {steps[(step - 1) % len(steps)]} has {len(groups)} groups, the smallest of "
            f"{min(map(len, groups.values()))} answers; {prompts} of {group_size} are asked for"
        )
    return [
        SimRequest(
            f"{step}:{index}:{member}",
            one.prompt_tokens,
            tuple(Turn(decode, round(tool_s * NS_PER_S), added) for decode, tool_s, added in one.turns),
        )
        for index, group in enumerate(sorted(groups)[:prompts])
        for member, one in enumerate(groups[group][:group_size])
    ]


def _read_trace(path: str) -> dict[int, dict[int, list[_Recorded]]]:
    """A JSON object per line -> by step and group."""
    found: dict[int, dict[int, list[_Recorded]]] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None
    decoder = msgspec.json.Decoder(_Recorded)
    for number, line in enumerate(lines, 1):
        try:
            one = decoder.decode(line)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise ConfigError(f"{path}:{number}: {error} in {line[:80]!r}") from None
        if not one.turns or any(turn[0] < 1 for turn in one.turns):
            raise ConfigError(f"{path}:{number}: every turn must decode at least a token, in {line[:80]!r}")
        found.setdefault(one.step, {}).setdefault(one.group, []).append(one)
    if not found:
        raise ConfigError(f"the trace {path} is empty")
    return found


# ---- numbers that are the same everywhere


class Random:
    """A stream of numbers of its own for every (seed, step)."""

    def __init__(self, seed: int, step: int):
        self._bits = np.random.PCG64(np.random.SeedSequence([seed, step]))

    def uniform(self, count: int) -> np.ndarray:
        """float64 [count] in [0, 1): 53 bits of each word."""
        words = np.atleast_1d(self._bits.random_raw(count)) if count else np.zeros(0, np.uint64)
        return (words >> np.uint64(11)) * (1.0 / (1 << 53))

    def normal(self, count: int) -> np.ndarray:
        """float64 [count], by Marsaglia's polar method (1964)."""
        parts, missing = [], count
        while missing > 0:
            # Of the pairs pi / 4 are inside the circle; a few more at once than that, to be done at the first try.
            pairs = 2.0 * self.uniform(2 * (missing * 2 // 3 + 16)).reshape(-1, 2) - 1.0
            square = pairs[:, 0] * pairs[:, 0] + pairs[:, 1] * pairs[:, 1]
            inside = (square > 0.0) & (square < 1.0)
            pairs, square = pairs[inside], square[inside]
            parts.append((pairs * np.sqrt(-2.0 * log(square) / square)[:, None]).ravel())
            missing -= parts[-1].size
        return np.concatenate(parts)[:count] if parts else np.zeros(0)


_LN2 = 0.6931471805599453


def exp(x: np.ndarray) -> np.ndarray:
    """e ** x to about 1e-15, from sums and products alone: x = k ln 2 + r, and Taylor's series of r. Beyond 600, where
    e ** x is more than anything that is counted here, x is taken to be 600."""
    x = np.clip(x, -600.0, 600.0)
    k = np.rint(x / _LN2)
    r = x - k * _LN2
    result = np.ones_like(r)
    for n in range(17, 0, -1):
        result = 1.0 + result * r / n
    return np.ldexp(result, k.astype(np.int64))


def log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of x > 0 to about 1e-15: x = m * 2 ** k, and the series of artanh((m - 1) / (m + 1))."""
    m, k = np.frexp(x)
    low = m < 0.7071067811865476
    m, k = np.where(low, 2.0 * m, m), k - low
    s = (m - 1.0) / (m + 1.0)
    square, result = s * s, np.zeros_like(s)
    for n in range(25, 0, -2):
        result = result * square + 1.0 / n
    return k * _LN2 + 2.0 * s * result


def _power(base: float, exponent: int) -> float:
    result = 1.0
    for _ in range(exponent):
        result *= base
    return result
