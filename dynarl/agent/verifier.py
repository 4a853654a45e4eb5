"""Prompts and rewards on one node: the environment worker, behind a time limit.

A verifier can loop for ever on one answer, and nothing inside its process can be trusted to stop it. So it runs in a
process of its own; when the time is up the process is killed, the answer scores 0 and is counted, and a fresh process
takes the next question.

Answers that wait are asked about together: on a node whose CPU is busy decoding, every question costs some turns of
the processor, however short the verdict. The time limit is one answer's all the same: when a batch takes longer, or the
process dies of it, its answers are asked about one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Any, Awaitable, Callable

from dynarl.wire import CallError

log = logging.getLogger(__name__)

# An answer at which the process died may not be to blame. One at which it died twice is.
ATTEMPTS = 2
# Answers in a batch at most. A batch that takes more than this part of one answer's time limit makes the next smaller.
MOST_TOGETHER = 64
LONG = 0.25


@dataclass(frozen=True)
class Verdict:
    """reward: what the trainer sees; correct: whether the final answer is right; timed_out: the verifier came to no
    verdict.
    """

    reward: float
    correct: bool
    timed_out: bool = False


NO_VERDICT = Verdict(0.0, False, timed_out=True)


@dataclass(eq=False)
class _Answer:
    question: dict[str, Any]  # arguments of `EnvironmentWorker.do_score`
    verdict: Verdict | None = None


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
        self._unjudged: list[_Answer] = []
        self._together = 1

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
        answer = _Answer({"sample": sample, "split": split, "index": index, "response": response})
        self._unjudged.append(answer)
        try:
            async with self._turn:  # turns come in the order of `_unjudged`
                while answer.verdict is None:  # before it may still be one whose asker has just gone away
                    await self._judge_first()
        finally:
            self._unjudged.remove(answer)
        return answer.verdict

    async def _judge_first(self) -> None:
        """Verdicts on the answers that have waited longest: up to twice as many as ever went quickly together."""
        batch = [answer for answer in self._unjudged if answer.verdict is None][: self._together]
        started = time.monotonic()
        if len(batch) > 1:
            await self._ask(batch)
        for answer in batch:
            for _ in range(ATTEMPTS):
                if answer.verdict is None:
                    await self._ask([answer])
            answer.verdict = answer.verdict or NO_VERDICT
        if time.monotonic() - started >= LONG * self._timeout_s:
            self._together = max(1, len(batch) // 2)
        elif len(batch) == self._together:  # fewer say nothing of so many
            self._together = min(2 * self._together, MOST_TOGETHER)

    async def _ask(self, batch: list[_Answer]) -> None:
        """Ask for verdicts. An answer that may not be to blame for what went wrong gets none yet."""
        try:
            await self._be_ready()
            answers = [answer.question for answer in batch]
            judged = await self._call("score", timeout_s=self._timeout_s, answers=answers)
        except TimeoutError:
            await self._end()
            if len(batch) == 1:
                batch[0].verdict = NO_VERDICT
        except CallError as error:
            log.warning("no verdict on %s: %s", ", ".join(answer.question["sample"] for answer in batch), error)
            if len(batch) == 1 and not self._gone:
                batch[0].verdict = NO_VERDICT
        else:
            for answer, given in zip(batch, judged, strict=True):
                answer.verdict = self._verdict(given)

    @staticmethod
    def _verdict(given: dict[str, Any]) -> Verdict:
        if "error" in given:
            log.warning("no verdict on %s: %s", given["sample"], given["error"])
            return NO_VERDICT
        return Verdict(float(given["reward"]), bool(given["correct"]))

    async def demonstrations(self, start: int, count: int) -> list[dict]:
        async with self._turn:
            await self._be_ready()
            return await self._call("demonstrations", start=start, count=count)

    def forget_prompts(self) -> None:
        self._prompts.clear()
