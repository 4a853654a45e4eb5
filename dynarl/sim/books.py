"""What happened in a simulated job, and whether anything was lost or made up: its event log, its samples' books."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from dynarl.errors import DynarlError
from dynarl.sim.workload import SimRequest


class ConservationError(DynarlError):
    """A sample or a token was lost, or counted twice: the simulation is wrong."""


class EventLog:
    """Every event as one line, hashed in their order. sink: gets the lines too."""

    def __init__(self, clock_ns: Callable[[], int], sink: Callable[[bytes], None] | None = None):
        self._clock_ns, self._sink = clock_ns, sink
        self._hash = hashlib.sha256()
        self.num_events = 0

    def note(self, event: str) -> None:
        """An event of the simulated world, now."""
        self.line(f"{self._clock_ns()} {event}\n".encode())

    def line(self, line: bytes) -> None:
        self.num_events += 1
        self._hash.update(line)
        if self._sink is not None:
            self._sink(line)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


class Books:
    """One iteration: who was generated, scored and summed into an optimizer step. scoring: it has an inference role."""

    def __init__(self, requests: Iterable[SimRequest], scoring: bool):
        self._due = {request.sample: request for request in requests}
        self._scoring = scoring
        self._reached: dict[str, int] = {}  # sample -> tokens of its response that some engine has brought it to
        self.generated: dict[str, int] = {}  # sample -> tokens of its response
        self.scored: Counter[str] = Counter()
        self.summed: Counter[str] = Counter()
        self.lost_tokens = 0  # that engines decoded, and had to decode again after a worker had died

    def begun(self, sample: str, tokens: int) -> None:
        """An engine goes on from so many tokens of the response."""
        if (reached := self._reached.get(sample, 0)) > tokens:
            request = self._due[sample]
            self.lost_tokens += decoded(request, reached) - decoded(request, tokens)
        self._reached[sample] = tokens

    def left(self, sample: str, tokens: int) -> None:
        """It has left its engine with so many tokens."""
        self._reached[sample] = tokens

    def close(self, decoded_tokens: int, deaths: int) -> None:
        """Hold what happened against what was due. decoded_tokens: that all engines made; deaths: workers that died.
        Raises ConservationError."""
        wanted = {sample: request.response_tokens for sample, request in self._due.items()}
        once = dict.fromkeys(wanted, 1)
        _same("generated", self.generated, wanted)
        _same("summed into a step", self.summed, once)
        if self._scoring:  # what was scored as its worker died is scored again
            _same("scored", dict.fromkeys(self.scored, 1) if deaths else self.scored, once)
        due = sum(turn.decode_tokens for request in self._due.values() for turn in request.turns)
        if decoded_tokens - self.lost_tokens != due or (self.lost_tokens and not deaths):
            raise ConservationError(
                f"engines decoded {decoded_tokens} tokens, {self.lost_tokens} in vain, as {deaths} workers died; "
                f"the answers have {due} decoded tokens"
            )


def decoded(request: SimRequest, tokens: int) -> int:
    """How many of the first so many tokens of a response the model itself writes; tools write the others."""
    made = 0
    for turn in request.turns:
        made += min(tokens, turn.decode_tokens)
        tokens -= turn.decode_tokens + turn.tool_tokens
        if tokens <= 0:
            break
    return made


def _same(what: str, found: Mapping[str, int], wanted: Mapping[str, int]) -> None:
    if found == wanted:
        return
    wrong = [s for s in sorted({*found, *wanted}) if found.get(s, 0) != wanted.get(s, 0)]
    shown = ", ".join(f"{s}: {found.get(s, 0)} instead of {wanted.get(s, 0)}" for s in wrong[:5])
    raise ConservationError(f"{len(wrong)} of {len(wanted)} samples were not {what} as they are due ({shown})")
