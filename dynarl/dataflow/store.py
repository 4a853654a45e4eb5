"""Trajectories held by one node, by sample id, and the tool calls made for them.

Other nodes fetch them; the controller only knows where they are.
"""

from __future__ import annotations

from typing import Iterable

from dynarl.wire import ToolCall, Trajectory


class Store:
    """A node's samples of the iterations that are not yet trained.

    >>> store = Store()
    >>> store.put(Trajectory("3:17:0", b"", b"", b""))
    >>> store.get(["3:17:0"])[0].sample
    '3:17:0'
    >>> store.forget(3); len(store)
    0
    """

    def __init__(self) -> None:
        self._samples: dict[str, Trajectory] = {}
        self._calls: dict[tuple[str, int], ToolCall] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def put(self, trajectory: Trajectory) -> None:
        """Keep a trajectory, unless the one that is held is further on: of newer weights, complete, or scored.

        After a fault a sample may be made twice. What was reported of the first is what will be trained, so the second,
        or a part of it, must not take its place.
        """
        held = self._samples.get(trajectory.sample)
        if held is None or _stage(trajectory) > _stage(held):
            self._samples[trajectory.sample] = trajectory

    def begin(self, trajectory: Trajectory) -> None:
        """An engine goes on from here: parts that it adds must not meet those of another attempt at the sample."""
        held = self._samples.get(trajectory.sample)
        if held is not None and held.finish == "abort":
            del self._samples[trajectory.sample]
        if trajectory.response:
            self.put(trajectory)

    def extend(self, sample: str, prompt: bytes, start: int, response: bytes, logprobs: bytes, version: int) -> None:
        """Tokens of an unfinished answer from its `start`-th on. Dropped where some before them are not here."""
        held = (start and self._samples.get(sample)) or Trajectory(sample, prompt, b"", b"")
        if held.num_response_tokens >= start:
            tokens, given = held.response[: 4 * start], held.rollout_logprobs[: 4 * start]
            self.put(held.sampled(tokens + response, given + logprobs, "abort", version))

    def has_part(self, sample: str) -> bool:
        """Whether an unfinished answer with at least one token is here."""
        held = self._samples.get(sample)
        return held is not None and held.finish == "abort" and held.num_response_tokens > 0

    def get(self, samples: Iterable[str]) -> list[Trajectory]:
        """Raises KeyError naming the first sample that is not held here."""
        return [self._samples[sample] for sample in samples]

    def record(self, call: ToolCall) -> None:
        """Keep what came of a tool call, to be done before it is used: whoever needs it again finds it here."""
        self._calls[call.sample, call.number] = call

    def call(self, sample: str, number: int, turn: bytes) -> ToolCall | None:
        """The call number `number` of a sample, if it is the one that `turn` asks for.

        An answer that was lost and begun again may have come to another call.
        """
        call = self._calls.get((sample, number))
        return call if call is not None and call.turn == turn else None

    def forget(self, iteration: int) -> None:
        """Drop every sample of iterations up to and including `iteration`."""
        self._samples = {s: t for s, t in self._samples.items() if int(s.split(":", 1)[0]) > iteration}
        self._calls = {key: call for key, call in self._calls.items() if int(key[0].split(":", 1)[0]) > iteration}


def _stage(trajectory: Trajectory) -> tuple[int, bool, bool, int]:
    """Orders the states of a sample; two complete answers of the same weights are equal, whatever their lengths."""
    complete = trajectory.finish != "abort"
    return trajectory.version, complete, trajectory.old_logprobs is not None, 0 if complete else trajectory.num_response_tokens
