"""What an iteration had to do and how long each piece took: the record from which the simulator takes work and speeds.

One line of JSON for each iteration in `trace.jsonl`; what the pieces mean is at `Trace`. Nothing in the job reads it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Sample = Annotated[str, Meta(pattern=r"^\d+:\d+:\d+$")]
Count = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0)]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line as it is read: what `Trace` collects, and the facts of its iteration. candidate: of `dynarl bench roles`;
    roles: {node: role} at its start; enter_s: until they are there, a part of `seconds`; switches: milliseconds by phase of
    every change of roles."""

    iteration: int = 0
    candidate: str = ""
    policy: str
    roles: dict[str, str]
    enter_s: Amount = 0.0
    step_s: list[Amount]
    sync_s: Amount
    seconds: Amount
    switches: list[dict[str, float]]
    answers: list[tuple[Sample, Count, Count, Count, Count, Amount, Amount]]
    leases: list[tuple[str, Count, Amount]]
    decode: list[tuple[Count, float, float, float, float]]
    kv_tokens: Count


class Trace:
    """The pieces of one iteration.

    answers: [sample, prompt tokens, tokens, of which tools wrote, tool calls, seconds in tools, seconds since the
    iteration began]; leases: [role, answer tokens, node-seconds]; decode: mean running requests, rounded -> [decode steps,
    tokens, prefilled tokens, seconds] of one engine, summed over all intervals between two of its figures; kv_tokens:
    what the KV memory of one engine holds, 0 where none has told.
    """

    def __init__(self) -> None:
        self.answers: list[list[Any]] = []
        self.leases: list[list[Any]] = []
        self.kv_tokens = 0
        self._decode: dict[int, list[float]] = defaultdict(lambda: [0.0] * 4)

    def decoded(self, running: float, tokens: int, prefilled: int, seconds: float) -> None:
        """An engine made `tokens` in `seconds` with so many requests running in the mean."""
        for index, value in enumerate((tokens / running, tokens, prefilled, seconds)):
            self._decode[round(running)][index] += value

    def line(self, **facts: Any) -> bytes:
        decode = [[running, *(round(v, 5) for v in sums)] for running, sums in sorted(self._decode.items())]
        return msgspec.json.encode(
            {**facts, "answers": self.answers, "leases": self.leases, "decode": decode, "kv_tokens": self.kv_tokens}
        ) + b"\n"
