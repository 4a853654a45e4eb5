"""The environment worker: prompts, verdicts, demonstrations and tools of the job's task, as token ids.

It is a process of its own because a verifier may hang: the agent gives each `score` a time limit and kills this
process when it is over. Nothing is lost then, for all state follows from the arguments of `open`. The same holds for
tools, which run in further processes of this program, so that no verdict waits for a tool.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from dynarl import wire
from dynarl.roles.worker import Worker, main
from dynarl.tasks import tokenizer
from dynarl.tasks.base import Task, open_task
from dynarl.tasks.tokenizer import Codec
from dynarl.tasks.tools.base import Tool, run


class EnvironmentWorker(Worker):
    """Answers are immediate; there is no background work."""

    role = "environment"
    _task: Task | None = None
    _codec: Codec | None = None
    _tools: dict[str, Tool] = {}

    def do_open(self, task: dict[str, Any], seed: int, tokenizer_dir: str | None = None) -> dict[str, Any]:
        """Open the task (fields of `config.schema.Task`). Without a tokenizer directory, use the task's own vocabulary.

        In the answer, call_end is the token at which the model hands over to a tool (None: the task has none), and
        no_answer what the model gets from a tool that has to be ended.
        Raises ValueError on an unknown task, unknown arguments or a tool that cannot work here, FileNotFoundError on a
        bad tokenizer directory.
        """
        self._task = open_task(task["name"], task.get("args", {}), seed)
        self._codec = tokenizer.load(tokenizer_dir) if tokenizer_dir else tokenizer.build(self._task.symbols())
        self._task.question("train", 0)  # imports the generator now, and not under the time limit of the first verdict
        self._tools = self._task.tools()
        for tool in self._tools.values():
            tool.check()
        self._call_end = self._codec.token(self._task.call_end) if self._tools else None
        return {
            "vocab_size": self._codec.vocab_size, "eos_id": self._codec.eos_id, "call_end": self._call_end,
            "no_answer": wire.pack_ids(self._output_ids("error: no answer")) if self._tools else b""}

    def do_prompts(self, split: str, indices: list[int]) -> list[dict[str, Any]]:
        task, codec = self._opened()
        texts = [task.question(split, index) for index in indices]
        return [
            {"index": index, "prompt": wire.pack_ids(codec.encode(text)), "text": text}
            for index, text in zip(indices, texts, strict=True)
        ]

    def do_score(self, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Verdicts on answers ({sample, split, index, response}), {sample, reward, correct} or {sample, error} of each.

        A verifier sees the response alone, never the prompt.
        """
        task, codec = self._opened()
        return [_verdict(task, codec, **answer) for answer in answers]

    def do_call_tool(self, turn: bytes, session: bytes) -> dict[str, bytes]:
        """Make the tool call that a turn of the model ends with. `session`: what former calls of the answer left."""
        _, codec = self._opened()
        memory = msgspec.msgpack.decode(session) if session else {}
        output = self._run_tool(codec.decode(wire.unpack_ids(turn)), memory)
        return {"output": wire.pack_ids(output), "session": msgspec.msgpack.encode(memory) if memory else b""}

    def do_demonstrations(self, start: int, count: int) -> list[dict[str, bytes]]:
        """Demonstrations start .. start + count - 1 ({prompt, response, mask}); a response ends in the end-of-sequence
        token."""
        return [self._demonstration(index) for index in range(start, start + count)]

    def _demonstration(self, index: int) -> dict[str, bytes]:
        task, codec = self._opened()
        question, response = task.demonstration(index)
        *calls, last = [response] if isinstance(response, str) else response
        memory: dict[str, Any] = {}
        ids: list[int] = []
        mask: list[int] = []
        for text in calls:
            turn, output = codec.encode(text), self._run_tool(text, memory)
            ids += turn + output
            mask += [1] * len(turn) + [0] * len(output)
        end = [*codec.encode(last), codec.eos_id]
        return {"prompt": wire.pack_ids(codec.encode(question)), "response": wire.pack_ids(ids + end),
                "mask": bytes(mask + [1] * len(end)) if calls else b""}

    def _run_tool(self, turn: str, memory: dict[str, Any]) -> list[int]:
        task, _ = self._opened()
        return self._output_ids(run(self._tools, *task.parse_call(turn), memory))

    def _output_ids(self, text: str) -> list[int]:
        """What follows a call, as token ids. No text of a tool can end the answer or make a call of its own."""
        task, codec = self._opened()
        ids = codec.encode(text[: task.max_output_chars])
        content = [token for token in ids if token not in (codec.eos_id, self._call_end)]
        return [*codec.encode(task.output_begin), *content, *codec.encode(task.output_end)]

    def do_save_tokenizer(self, dir: str) -> None:
        """Write the task's tokenizer as a Hugging Face directory."""
        _, codec = self._opened()
        codec.save(dir)

    def _opened(self) -> tuple[Task, Codec]:
        if self._task is None or self._codec is None:
            raise RuntimeError("no task is open: call `open` first")
        return self._task, self._codec


def _verdict(task: Task, codec: Codec, sample: str, split: str, index: int, response: bytes) -> dict[str, Any]:
    try:
        score = task.verify(split, index, codec.decode(wire.unpack_ids(response)))
        reward, correct = float(score.reward), bool(score.correct)  # whatever a task gives, it can be sent
    except Exception as error:
        logging.exception("the verifier failed on %s", sample)
        return {"sample": sample, "error": f"{type(error).__name__}: {error}"}
    return {"sample": sample, "reward": reward, "correct": correct}


if __name__ == "__main__":
    main(EnvironmentWorker)
