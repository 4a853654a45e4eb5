"""What a rollout engine is: the one interface behind which the in-process engine and SGLang stand.

Life of a request::

    submit -> waiting -> running -> step() returns it once, finish "stop" or "length"
                 \\          \\
                  +----------+-> abort() returns it once, finish "abort": a partial answer

A partial answer (its tokens and log-probabilities) is all that another engine needs to go on with it: it is submitted
there as a request whose `response` is not empty. Keys and values are computed again where they are not in the cache,
which never travels.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod

import msgspec

from dynarl import wire

STOP = "stop"
LENGTH = "length"
ABORT = "abort"


class Request(msgspec.Struct):
    """One answer to be sampled, or gone on with.

    prompt, response: int32 token ids; logprobs: float32, one per token of `response` (what was sampled so far, or
    written by tools; empty for a fresh request). max_response_tokens counts the tokens of `response` too. temperature 0
    is greedy. stop_ids: tokens that end the answer as an end-of-sequence token does. tool_calls: those that the answer
    has made so far; with more of them a waiting request goes first, unless `order` is "arrival". masked_tokens: those of
    `response` that tools wrote.
    A token depends on the logits, on (seed, sample) and on its position in the sequence alone.
    """

    sample: str
    prompt: bytes
    max_response_tokens: int
    response: bytes = b""
    logprobs: bytes = b""
    temperature: float = 1.0
    seed: int = 0
    stop_ids: list[int] = []
    tool_calls: int = 0
    masked_tokens: int = 0
    order: str = "priority"


class Output(msgspec.Struct):
    """An answer, whole ("stop": it ends with an end-of-sequence or stop token; "length") or partial ("abort").

    logprobs: of each token under softmax(logits / temperature), of the plain softmax where temperature is 0.
    version: of the weights that sampled the last token here; start_version: the first. Both are the engine's version
    when it sampled nothing.
    """

    sample: str
    response: bytes
    logprobs: bytes
    finish: str
    version: int
    start_version: int


class Part(msgspec.Struct):
    """Tokens of an answer that goes on, from its `start`-th on. version: of the weights that sampled the last one."""

    sample: str
    start: int
    response: bytes
    logprobs: bytes
    version: int


class Figures(msgspec.Struct):
    """Load of an engine. tokens: sampled since it was made. kv_total_tokens: what the KV memory holds at most.

    prefill_tokens: computed in prefills since it was made; reused_tokens: those that a prefix in the cache saved.
    lengths: tokens sampled so far of its requests, sorted; of evenly many of them where there are many, none where the engine
    does not know.
    """

    running: int
    waiting: int
    tokens: int
    kv_used_tokens: int
    kv_total_tokens: int
    prefill_tokens: int
    reused_tokens: int
    lengths: list[int] = []


class Engine(ABC):
    """Samples answers with one copy of the model. Single-threaded: its owner calls one method at a time."""

    version: int = -1

    @abstractmethod
    def load(self, model_dir: str, version: int) -> None:
        """Take the weights of a Hugging Face directory, in place, and drop everything cached under the old ones.

        Requests that are here go on under the new weights. Raises ValueError when the directory holds another model.
        """

    @abstractmethod
    def submit(self, requests: list[Request]) -> None:
        """Queue requests. Raises ValueError, and queues none of them, when one is not acceptable."""

    @abstractmethod
    def step(self) -> list[Output]:
        """Go on for one decode step, or for a few milliseconds where the engine runs by itself. Returns what finished."""

    @abstractmethod
    def abort(self, samples: list[str] | None = None) -> list[Output]:
        """Take requests out (None: all). Samples that are not here are ignored.

        One that has ended meanwhile, or was submitted at its end, is returned with "stop" or "length".
        """

    def parts(self) -> list[Part]:
        """What was sampled since the last call for answers that are not finished; none from an engine that does not
        know before an answer is whole.
        """
        return []

    @abstractmethod
    def figures(self) -> Figures: ...

    @abstractmethod
    def sleep(self) -> None:
        """Give the KV memory back. Raises RuntimeError while there are requests."""

    @abstractmethod
    def wake(self) -> None:
        """Take the memory again; a second call does nothing."""

    @abstractmethod
    def busy(self) -> bool:
        """Whether `step` has anything to do."""

    def close(self) -> None:
        """End what belongs to the engine."""


def split_done(done: list[Output], wanted: set[str] | None) -> tuple[list[Output], list[Output]]:
    """(those of these samples, the others); None: all are wanted."""
    out = [output for output in done if wanted is None or output.sample in wanted]
    return out, [output for output in done if output not in out]


def thinned(lengths: list[int], most: int = 64) -> list[int]:
    """Sorted, and at most `most` of them, evenly many from short and long.

    >>> thinned([5, 1, 4, 2, 3, 0], most=3)
    [1, 3, 5]
    """
    lengths = sorted(lengths)
    count = min(most, len(lengths))
    return [lengths[(2 * i + 1) * len(lengths) // (2 * count)] for i in range(count)]


def stream_key(seed: int, sample: str) -> int:
    """The key of a sample's random numbers, 63 bits; other samples and other seeds have unrelated ones."""
    # Not 64: SGLang takes its seeds as signed numbers.
    return int.from_bytes(hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest(), "little") >> 1


def check_request(request: Request, known: set[str], vocab_size: int, max_tokens: int) -> None:
    """Raise ValueError, naming the sample, when no engine could serve this request.

    known: samples that are in the engine; max_tokens: positions of the model.
    """
    name = request.sample
    if name in known:
        raise ValueError(f"sample {name!r} is in this engine already")
    prompt = wire.unpack_ids(request.prompt)
    if not prompt:
        raise ValueError(f"sample {name!r} has an empty prompt")
    if len(prompt) >= max_tokens:
        raise ValueError(f"sample {name!r}: a prompt of {len(prompt)} tokens leaves no room in {max_tokens} positions")
    if len(request.response) != len(request.logprobs):
        raise ValueError(
            f"sample {name!r}: {len(request.response) // 4} response tokens but {len(request.logprobs) // 4} log-probabilities"
        )
    for token in (*prompt, *wire.unpack_ids(request.response)):
        if not 0 <= token < vocab_size:
            raise ValueError(f"sample {name!r}: token {token} is not in a vocabulary of {vocab_size}")
    if request.temperature < 0:
        raise ValueError(f"sample {name!r}: temperature {request.temperature} is negative")
