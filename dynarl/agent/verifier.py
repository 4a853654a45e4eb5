"""Prompts and rewards on one node: the environment worker, behind a time limit.

A verifier can loop for ever on one answer, and nothing inside its process can be trusted to stop it. So it runs in a
process of its own, one question at a time; when the time is up the process is killed, the answer scores 0 and is
counted, and a fresh process takes the next question.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any, Awaitable, Callable

from dynarl.wire import CallError

log = logging.getLogger(__name__)

# An answer at which the process died may not be to blame. One at which it died twice is.
ATTEMPTS = 2


@dataclass(frozen=True)
class Verdict:
    """reward: what the trainer sees; correct: whether the final answer is right; timed_out: the verifier came to no
    verdict.
    """

    reward: float
    correct: bool
    timed_out: bool = False


NO_VERDICT = Verdict(0.0, False, timed_out=True)


class Seat:
    """One environment worker: `call(method, timeout_s=, **args)` reaches it; `restart()` replaces it by a fresh one.

    Questions go one at a time, and a process is replaced between two of them, never beside one. Say `process_died` when
    it ends by itself, before its open calls fail; then the next question is asked of a new one.
    """

    def __init__(self, call: Callable[..., Awaitable[Any]], restart: Callable[[], Awaitable[None]], timeout_s: float):
        self._call, self._restart, self._timeout_s = call, restart, timeout_s
        self._turn = asyncio.Lock()
        self._gone = False

    def process_died(self) -> None:
        self._gone = True

    async def revive(self) -> None:
        """Replace a process that died, without waiting for the next question."""
        async with self._turn:
            await self._be_ready()

    async def _be_ready(self) -> None:
        if self._gone:
            await self._replace()

    async def _replace(self) -> None:
        """Raises CallError when the new process does not come up; it is tried again before the next question."""
        self._gone = False  # before the restart: the new process may die as well
        try:
            await self._restart()
        except RuntimeError as error:
            self._gone = True
            raise CallError(f"no new process: {error}") from None
        except BaseException:
            self._gone = True
            raise

    async def _end(self) -> None:
        """Replace a process that hangs."""
        with contextlib.suppress(CallError):
            await self._replace()


class Verifier(Seat):
    """The seat that writes prompts and gives verdicts."""

    def __init__(self, call: Callable[..., Awaitable[Any]], restart: Callable[[], Awaitable[None]], timeout_s: float):
        super().__init__(call, restart, timeout_s)
        self._prompts: dict[tuple[str, int], bytes] = {}

    async def prompts(self, split: str, indices: list[int]) -> dict[int, bytes]:
        """Token ids (int32 bytes) of these prompts, asked for once each."""
        known = {index: self._prompts[split, index] for index in indices if (split, index) in self._prompts}
        if missing := sorted(set(indices) - set(known)):
            async with self._turn:
                await self._be_ready()
                answers = await self._call("prompts", split=split, indices=missing)
            known |= {answer["index"]: answer["prompt"] for answer in answers}
            self._prompts |= {(split, index): known[index] for index in missing}
        return known

    async def score(self, sample: str, split: str, index: int, response: bytes) -> Verdict:
        """The verdict on one answer; reward 0 when the verifier comes to none in time, fails, or dies of it twice."""
        async with self._turn:
            for _ in range(ATTEMPTS):
                try:
                    await self._be_ready()
                    answer = await self._call(
                        "score", timeout_s=self._timeout_s, sample=sample, split=split, index=index, response=response)
                    return Verdict(float(answer["reward"]), bool(answer["correct"]))
                except TimeoutError:
                    await self._end()
                    return NO_VERDICT
                except CallError as error:
                    log.warning("no verdict on %s: %s", sample, error)
                    if not self._gone:
                        return NO_VERDICT
            return NO_VERDICT

    async def demonstrations(self, start: int, count: int) -> list[dict]:
        async with self._turn:
            await self._be_ready()
            return await self._call("demonstrations", start=start, count=count)

    def forget_prompts(self) -> None:
        self._prompts.clear()
