"""Answers with tool calls at one node: the model's turn ends, a tool has its turn, the engine goes on behind that.

That a call is open is seen from the tokens alone: the answer so far ends with the token that hands over. So an answer
can be given back at any time, before the call, during it or after it, and whoever goes on with it knows what to do.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from dynarl import wire
from dynarl.agent.gate import Gate
from dynarl.agent.tools import Tools
from dynarl.wire import ToolCall, Trajectory

if TYPE_CHECKING:
    from dynarl.agent.agent import Agent
    from dynarl.agent.work import Work

log = logging.getLogger(__name__)


class Turns:
    """`entry` is everywhere an entry of `work.requests`. most_calls: of one answer."""

    def __init__(self, agent: Agent, work: Work, gate: Gate, tools: Tools, most_calls: int):
        self._agent, self._work, self._gate, self.tools, self._most_calls = agent, work, gate, tools, most_calls
        self._call_end = wire.pack_ids([tools.call_end])

    def asks_for_tool(self, answer: Trajectory) -> bool:
        return answer.response[-4:] == self._call_end

    def may_call(self, entry: dict[str, Any]) -> bool:
        """Whether the answer so far ends in a tool call that it may make. One that may not be made cuts the answer."""
        answer: Trajectory = entry["answer"]
        return (self.asks_for_tool(answer) and answer.tool_calls < self._most_calls
                and answer.num_response_tokens < entry["max_response_tokens"])

    async def use_tool(
        self, entry: dict[str, Any], holder: str | None = None, holders: dict[str, str] | None = None
    ) -> None:
        """Make the call that an answer ends in, or find what came of it, and have the engine go on behind that.

        holder: node where the answer was before; the call may be in flight there.
        """
        entry["at_tool"] = True
        answer: Trajectory = entry["answer"]
        # From here on a rollout worker that dies costs no turn that is complete.
        self._work.store.put(msgspec.structs.replace(answer, finish="abort"))
        key = (answer.sample, answer.tool_calls, answer.last_turn())
        there = None
        if holder not in (None, self._agent.node):
            there = functools.partial(self._call_made_at, holders[holder], *key)
        call = await self.tools.result(*key, answer.session, there)
        if self._work.requests.get(answer.sample) is not entry:
            return  # given back meanwhile; whoever goes on with it asks here
        entry["answer"] = answer.answered(call, entry["max_response_tokens"])
        self._work.store.put(msgspec.structs.replace(entry["answer"], finish="abort"))  # what is sampled is added to it
        await self._gate.opened()  # what stands in `requests` when it closes is given back, if all goes well
        if self._work.requests.get(answer.sample) is not entry:
            return
        try:
            async with self._gate.passing("a turn"):
                entry["at_tool"] = False
                await self._agent.call_worker(entry["worker"], "submit", requests=[self._work.for_engine(entry)])
        except wire.CallError as error:
            # Its worker has died, and it is gone from `requests`.
            log.info("%s does not go on here after its tool call: %s", answer.sample, error)

    async def _call_made_at(self, address: str, sample: str, number: int, turn: bytes) -> ToolCall | None:
        # No time limit: the tool has one, and a node that is lost costs the whole step.
        answer = await self._work.peer(address).call("", "tool_call", sample=sample, number=number, turn=turn)
        return answer and msgspec.convert(answer, ToolCall)
