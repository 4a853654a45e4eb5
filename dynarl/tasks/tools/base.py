"""What a tool is: something that a model may call in the middle of an answer, with text, and that answers with text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class ToolError(Exception):
    """The call was wrong; its text goes to the model."""


class Tool(ABC):
    """One tool. A call may take as long as `task.tool_timeout_s`; then its process is ended."""

    @abstractmethod
    def call(self, arguments: str, session: dict[str, Any]) -> str:
        """Answer one call. Raises ToolError, whose text the model sees, for arguments that cannot be answered.

        session: what this answer's former calls left, plain values under names that the tools choose. It travels with
        the answer from node to node; nothing else that a tool keeps does.
        """

    def check(self) -> None:
        """Find out before the first call whether the tool can work on this node. Raises ValueError with what to do."""


def run(tools: dict[str, Tool], name: str, arguments: str, session: dict[str, Any]) -> str:
    """The answer of a tool as text for the model, whatever goes wrong.

    >>> run({}, "clock", "", {})
    'error: there is no tool clock'
    """
    if name not in tools:
        return f"error: there is no tool {name}"
    try:
        return tools[name].call(arguments, session)
    except ToolError as error:
        return f"error: {error}"
    except Exception as error:  # a tool's fault must not end the job
        return f"error: {type(error).__name__}"
