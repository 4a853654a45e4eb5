"""The environment worker: prompts, verdicts and demonstrations of the job's task, as token ids.

It is a process of its own because a verifier may hang: the agent gives each `score` a time limit and kills this
process when it is over. Nothing is lost then, for all state follows from the arguments of `open`.
"""

from __future__ import annotations

from typing import Any

from dynarl import wire
from dynarl.roles.worker import Worker, main
from dynarl.tasks import tokenizer
from dynarl.tasks.base import Task, open_task
from dynarl.tasks.tokenizer import Codec


class EnvironmentWorker(Worker):
    """Answers are immediate; there is no background work."""

    role = "environment"
    _task: Task | None = None
    _codec: Codec | None = None

    def do_open(self, task: dict[str, Any], seed: int, tokenizer_dir: str | None = None) -> dict[str, int]:
        """Open the task (fields of `config.schema.Task`). Without a tokenizer directory, use the task's own vocabulary.

        Raises ValueError on an unknown task or unknown arguments, FileNotFoundError on a bad tokenizer directory.
        """
        self._task = open_task(task["name"], task.get("args", {}), seed)
        self._codec = tokenizer.load(tokenizer_dir) if tokenizer_dir else tokenizer.build(self._task.symbols())
        self._task.question("train", 0)  # imports the generator now, and not under the time limit of the first verdict
        return {"vocab_size": self._codec.vocab_size, "eos_id": self._codec.eos_id}

    def do_prompts(self, split: str, indices: list[int]) -> list[dict[str, Any]]:
        task, codec = self._opened()
        texts = [task.question(split, index) for index in indices]
        return [
            {"index": index, "prompt": wire.pack_ids(codec.encode(text)), "text": text}
            for index, text in zip(indices, texts, strict=True)
        ]

    def do_score(self, sample: str, split: str, index: int, response: bytes) -> dict[str, Any]:
        """Verdict on the response alone: it never sees the prompt. `text` is the response as a person reads it."""
        task, codec = self._opened()
        text = codec.decode(wire.unpack_ids(response))
        score = task.verify(split, index, text)
        return {"sample": sample, "reward": score.reward, "correct": score.correct, "text": text}

    def do_demonstrations(self, start: int, count: int) -> list[dict[str, bytes]]:
        """Demonstrations start .. start + count - 1; a response ends in the end-of-sequence token."""
        task, codec = self._opened()
        pairs = [task.demonstration(index) for index in range(start, start + count)]
        return [
            {"prompt": wire.pack_ids(codec.encode(question)), "response": wire.pack_ids([*codec.encode(response), codec.eos_id])}
            for question, response in pairs
        ]

    def do_save_tokenizer(self, dir: str) -> None:
        """Write the task's tokenizer as a Hugging Face directory."""
        _, codec = self._opened()
        codec.save(dir)

    def _opened(self) -> tuple[Task, Codec]:
        if self._task is None or self._codec is None:
            raise RuntimeError("no task is open: call `open` first")
        return self._task, self._codec


if __name__ == "__main__":
    main(EnvironmentWorker)
