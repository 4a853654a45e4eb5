"""Messages between controller, agents and workers: msgpack by msgspec, never pickle.

One small remote-call protocol serves every link::

    Call(id, method, args)  ->  Reply(id, value | error)
    Event(name, data)           one way, no answer

Arrays travel as raw little-endian bytes: token ids int32, log-probabilities float32. `pack_*` and `unpack_*` convert.
"""

from __future__ import annotations

from array import array
from typing import Any, Iterable, Union

import msgspec


class Call(msgspec.Struct, tag="call"):
    """Ask the peer to run `method(**args)`; it answers with a `Reply` that carries the same `id`."""

    id: int
    method: str
    args: dict[str, Any] = {}


class Reply(msgspec.Struct, tag="reply"):
    """Answer to a `Call`. `error` is None on success, else the message a person should read."""

    id: int
    value: Any = None
    error: str | None = None


class Event(msgspec.Struct, tag="event"):
    """Something that happened; nobody answers."""

    name: str
    data: dict[str, Any] = {}


Message = Union[Call, Reply, Event]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Decode one message. Raises msgspec.DecodeError on anything that is not one of the three."""
    return _decoder.decode(data)


class CallError(RuntimeError):
    """The peer answered a `Call` with an error."""


class Trajectory(msgspec.Struct):
    """One sampled answer, from the first token of its prompt to its reward.

    prompt, response: int32 token ids; rollout_logprobs: float32 per response token, as the engine sampled them;
    old_logprobs: the same tokens under the trainer's numerics, None until the inference role has computed them;
    finish: "stop" (end-of-sequence), "length" (cut at the limit) or "abort" (partial, to be continued elsewhere);
    version: of the weights that sampled the last token; weight: 0 for a sample that does not count in the loss.
    mask: a byte per response token, 1 where the model sampled it, 0 where a tool wrote it (its log-probability is 0.0
    and it is never trained on); empty: all were sampled. tool_calls: answered so far, which took tool_seconds; session:
    what the tools keep of this answer, msgpack.
    """

    sample: str
    prompt: bytes
    response: bytes
    rollout_logprobs: bytes
    old_logprobs: bytes | None = None
    ref_logprobs: bytes | None = None
    reward: float = 0.0
    advantage: float = 0.0
    weight: float = 1.0
    finish: str = "abort"
    version: int = 0
    mask: bytes = b""
    tool_calls: int = 0
    tool_seconds: float = 0.0
    session: bytes = b""

    @property
    def turns(self) -> int:
        """Times that the model had its turn: one more than tools had theirs."""
        return self.tool_calls + 1

    @property
    def num_masked_tokens(self) -> int:
        return self.mask.count(0)

    def sampled(self, response: bytes, logprobs: bytes, finish: str, version: int) -> Trajectory:
        """This answer once an engine has gone on with it: `response` and `logprobs` are those of all its tokens."""
        mask = self.mask and self.mask.ljust(len(response) // 4, b"\1")
        return msgspec.structs.replace(
            self, response=response, rollout_logprobs=logprobs, finish=finish, version=version, mask=mask)

    def answered(self, call: ToolCall, most_tokens: int) -> Trajectory:
        """This answer with a tool's output behind it, cut where the answer would have more than `most_tokens`."""
        output = call.output[: 4 * max(0, most_tokens - self.num_response_tokens)]
        count = len(output) // 4
        return msgspec.structs.replace(
            self, response=self.response + output, rollout_logprobs=self.rollout_logprobs + pack_floats([0.0] * count),
            mask=(self.mask or b"\1" * self.num_response_tokens) + bytes(count), tool_calls=self.tool_calls + 1,
            tool_seconds=self.tool_seconds + call.seconds, session=call.session)

    def last_turn(self) -> bytes:
        """Token ids that the model has written since the last tool's output."""
        return self.response[4 * (self.mask.rfind(0) + 1) :]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def num_response_tokens(self) -> int:
        return len(self.response) // 4


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call of a sample that has been made, and what came of it: the record that keeps it from being made twice.

    number: counts the sample's calls from 0; turn: token ids of the model's turn that asked for it; output: token ids
    that follow it; session: the tools' memory of the sample afterwards; seconds: how long it took.
    """

    sample: str
    number: int
    turn: bytes
    output: bytes
    session: bytes
    seconds: float


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as int32 bytes."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    return array("i", data).tolist()


def pack_floats(values: Iterable[float]) -> bytes:
    """Log-probabilities as float32 bytes."""
    return array("f", values).tobytes()


def unpack_floats(data: bytes) -> list[float]:
    return array("f", data).tolist()


def sample_id(iteration: int, prompt: int, member: int) -> str:
    """Name of one sample, unique in a run: `sample_id(3, 17, 0) == "3:17:0"`."""
    return f"{iteration}:{prompt}:{member}"


def group_of(sample: str) -> str:
    """The group (same prompt, same iteration) a sample belongs to: `group_of("3:17:0") == "3:17"`."""
    return sample.rpartition(":")[0]


def prompt_of(sample: str) -> int:
    """The prompt index in a sample id: `prompt_of("3:17:0") == 17`."""
    return int(sample.split(":")[1])
