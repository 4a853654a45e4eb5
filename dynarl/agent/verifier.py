"""Prompts and rewards on one node: the environment worker, behind a time limit.

A verifier can loop for ever on one answer, and nothing inside its process can be trusted to stop it. So it runs in a
process of its own, one question at a time; when the time is up the process is killed, the answer scores 0 and is counted,
and a fresh process takes the next question.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Awaitable, Callable

from dynarl.wire import CallError


@dataclass(frozen=True)
class Verdict:
    """reward: what the trainer sees; correct: whether the final answer is right; timed_out: the verifier was killed."""

    reward: float
    correct: bool
    timed_out: bool = False


class Verifier:
    """`call(method, timeout_s=, **args)` reaches the environment worker; `restart()` replaces it by a fresh one."""

    def __init__(self, call: Callable[..., Awaitable[Any]], restart: Callable[[], Awaitable[None]], timeout_s: float):
        self._call, self._restart, self._timeout_s = call, restart, timeout_s
        self._turn = asyncio.Lock()
        self._prompts: dict[tuple[str, int], bytes] = {}

    async def prompts(self, split: str, indices: list[int]) -> dict[int, bytes]:
        """Token ids (int32 bytes) of these prompts, asked for once each."""
        missing = sorted({index for index in indices if (split, index) not in self._prompts})
        if missing:
            async with self._turn:
                answers = await self._call("prompts", split=split, indices=missing)
            self._prompts.update({(split, a["index"]): a["prompt"] for a in answers})
        return {index: self._prompts[split, index] for index in indices}

    async def score(self, sample: str, split: str, index: int, response: bytes) -> Verdict:
        """The verdict on one answer; 0 when the verifier does not come to one in time, or dies of it."""
        async with self._turn:
            try:
                answer = await self._call(
                    "score", timeout_s=self._timeout_s, sample=sample, split=split, index=index, response=response)
            except TimeoutError:
                await self._restart()
                return Verdict(0.0, False, timed_out=True)
            except CallError:
                # Either it raised on this answer, or it died of it (and then _call waits for the next process).
                return Verdict(0.0, False, timed_out=True)
        return Verdict(float(answer["reward"]), bool(answer["correct"]))

    async def demonstrations(self, start: int, count: int) -> list[dict]:
        async with self._turn:
            return await self._call("demonstrations", start=start, count=count)

    def forget_prompts(self) -> None:
        self._prompts.clear()
