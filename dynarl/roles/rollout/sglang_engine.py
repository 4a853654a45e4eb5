"""SGLang behind the engine interface, over its HTTP interface (0.5.23).

The server batches by itself. One thread per request in flight waits for its answer and puts it in a queue, which
`step` empties. More requests than the server can decode wait here, where taking them out again costs nothing and
where `dataflow.priority` orders them: the server gets few more than it decodes, so its own order
(--enable-priority-scheduling) would add nothing. Prefixes are kept by the server, which says afterwards how much of
one it had; so the order here goes by tool calls and age.

What SGLang returns for an aborted request is a partial answer; going on with it is a new request whose input is
prompt plus partial answer. Its seeded draw hashes (seed, position in the sequence), so the answer continues as it
would have: on CPU always, on GPUs where rollout.args asks for --enable-deterministic-inference, which costs speed
there.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dynarl import wire
from dynarl.dataflow.priority import Desk, Ticket
from dynarl.roles.rollout.engine import ABORT, LENGTH, Engine, Figures, Output, Request
from dynarl.roles.rollout.engine import check_request, split_done, stream_key
from dynarl.roles.rollout.sglang_process import SGLangProcess

# How long `step` waits for an answer: calls to the worker wait as long, an idle wait costs 100 wake-ups per second.
STEP_WAIT_S = 0.01
# In flight beyond what the server decodes at once, as a share of it: a freed place is filled without a round trip.
SPARE = 4
# An abort that overtakes its request on the way to the server is lost, so it is repeated until the answer is there.
ABORT_REPEAT_S = 0.1
ABORT_TIMEOUT_S = 60.0
# KV memory of a server on CPU, in tokens.
CPU_KV_TOKENS = 65_536
# Written by the libraries, and no part of what the model is.
VOLATILE_KEYS = {"_name_or_path", "transformers_version"}


@dataclass
class Pending:
    """A request and what was sampled for it so far. versions: of the first and the last token sampled here, or None."""

    request: Request
    response: bytes
    logprobs: bytes
    ticket: Ticket
    start_version: int | None = None
    version: int | None = None

    def output(self, finish: str, current: int) -> Output:
        start = current if self.start_version is None else self.start_version
        last = current if self.version is None else self.version
        return Output(self.request.sample, self.response, self.logprobs, finish, last, start)


class SGLangEngine(Engine):
    """device: "cpu" or "cuda"; args: further arguments of the server, which may override those given here."""

    def __init__(self, model_dir: str, version: int, max_running: int, device: str, args: tuple[str, ...], start_timeout_s: float):
        self._config = model_config(model_dir)
        self._positions = self._config["max_position_embeddings"]
        arguments = [*server_args(model_dir, self._config, max_running, device), *args]
        self._server = SGLangProcess(arguments, device, start_timeout_s)
        # What the server has imported is a million objects; its garbage collector would walk them in the midst of decoding,
        # and in every sleep (0.3 to 1 s of a move on a CPU).
        self._server.call("POST", "/freeze_gc")
        self.version = version
        self._in_flight_limit = max_running + max(2, max_running // SPARE)
        self._pool = ThreadPoolExecutor(self._in_flight_limit)
        self._answers: queue.SimpleQueue[tuple[str, dict[str, Any] | Exception]] = queue.SimpleQueue()
        self._waiting: list[Pending] = []
        self._desk = Desk()
        self._flying: dict[str, Pending] = {}
        self._done: list[Output] = []
        self._asleep = False
        self._tokens = self._prompt_tokens = self._reused = 0
        self._numbers = itertools.count()

    def load(self, model_dir: str, version: int) -> None:
        if model_config(model_dir) != self._config:
            raise ValueError(f"{model_dir} holds another model than the one this engine was made for")
        interrupted = self._land(list(self._flying))
        answer = self._server.call(
            "POST", "/update_weights_from_disk", {"model_path": model_dir, "weight_version": str(version), "flush_cache": True}
        )
        if not answer["success"]:
            raise ValueError(f"SGLang did not take the weights of {model_dir}: {answer['message']}")
        self.version = version
        self._waiting = interrupted + self._waiting

    def submit(self, requests: list[Request]) -> None:
        if self._asleep:
            raise RuntimeError("the engine sleeps: wake it first")
        known = {pending.request.sample for pending in (*self._flying.values(), *self._waiting)}
        for request in requests:
            check_request(request, known, self._config["vocab_size"], self._positions)
            known.add(request.sample)
        for request in requests:
            ticket = self._desk.ticket(request.tool_calls, time.monotonic(), request.order)
            pending = Pending(request, request.response, request.logprobs, ticket)
            if self._room(pending) > 0:
                self._waiting.append(pending)
            else:
                self._done.append(pending.output(LENGTH, self.version))

    def busy(self) -> bool:
        return bool(self._flying or self._waiting or self._done)

    def step(self) -> list[Output]:
        self._launch()
        if self._flying and not self._done:
            if dropped := self._collect(STEP_WAIT_S):
                raise RuntimeError(f"SGLang gave up {[pending.request.sample for pending in dropped]}, which nobody aborted")
            self._launch()
        done, self._done = self._done, []
        return done

    def abort(self, samples: list[str] | None = None) -> list[Output]:
        wanted = None if samples is None else set(samples)

        def is_wanted(pending: Pending) -> bool:
            return wanted is None or pending.request.sample in wanted

        out = [pending.output(ABORT, self.version) for pending in self._waiting if is_wanted(pending)]
        self._waiting = [pending for pending in self._waiting if not is_wanted(pending)]
        landed = self._land([rid for rid, pending in self._flying.items() if is_wanted(pending)])
        out += [pending.output(ABORT, self.version) for pending in landed]
        # Finished before the abort reached them.
        ended, self._done = split_done(self._done, wanted)
        return out + ended

    def figures(self) -> Figures:
        (load,) = self._server.call("GET", "/v1/loads")["loads"]
        queued = min(load["num_waiting_reqs"], len(self._flying))
        return Figures(
            len(self._flying) - queued,
            len(self._waiting) + queued,
            self._tokens,
            load["num_used_tokens"],
            load["max_total_num_tokens"],
            self._prompt_tokens - self._reused,
            self._reused,
        )

    def sleep(self) -> None:
        if self.busy():
            raise RuntimeError(f"the engine has {len(self._flying)} running and {len(self._waiting)} waiting requests: abort them first")
        if not self._asleep:
            self._server.call("POST", "/release_memory_occupation", {"tags": ["kv_cache"]})
        self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._server.call("POST", "/resume_memory_occupation", {"tags": ["kv_cache"]})
        self._asleep = False

    def close(self) -> None:
        self._server.close()
        self._pool.shutdown(cancel_futures=True)

    def _room(self, pending: Pending) -> int:
        """Tokens that this answer may still get."""
        answered = len(pending.response) // 4
        used = len(pending.request.prompt) // 4 + answered
        return min(pending.request.max_response_tokens - answered, self._positions - used)

    def _launch(self) -> None:
        while self._waiting and len(self._flying) < self._in_flight_limit:
            tickets = [pending.ticket for pending in self._waiting]
            pending = self._waiting.pop(self._desk.draw(tickets, [0] * len(tickets), time.monotonic()))
            # SGLang aborts every request whose id begins with the given one: the dot ends the number.
            rid = f"{pending.request.sample}-{next(self._numbers)}."
            self._flying[rid] = pending
            self._pool.submit(self._generate, rid, self._body(rid, pending))

    def _body(self, rid: str, pending: Pending) -> dict[str, Any]:
        request = pending.request
        return {
            "rid": rid,
            "input_ids": wire.unpack_ids(request.prompt + pending.response),
            "return_logprob": True,
            "sampling_params": {
                "temperature": request.temperature,
                "max_new_tokens": self._room(pending),
                "sampling_seed": stream_key(request.seed, request.sample),
                "stop_token_ids": request.stop_ids,
            },
        }

    def _generate(self, rid: str, body: dict[str, Any]) -> None:
        try:
            self._answers.put((rid, self._server.call("POST", "/generate", body, timeout_s=None)))
        except Exception as error:  # raised again in the worker's thread
            self._answers.put((rid, error))

    def _collect(self, wait_s: float) -> list[Pending]:
        """Take the answers that are there, waiting for the first. Finished ones go to _done; aborted ones are returned."""
        aborted = []
        try:
            answers = [self._answers.get(timeout=wait_s)]
            while not self._answers.empty():
                answers.append(self._answers.get())
        except queue.Empty:
            return aborted
        for rid, answer in answers:
            if isinstance(answer, Exception):
                raise RuntimeError(f"SGLang failed on {rid} (server status: {self._server.status()})") from answer
            pending = self._flying.pop(rid)
            finish = self._extend(pending, answer)
            if finish == ABORT:
                aborted.append(pending)
            else:
                self._done.append(pending.output(finish, self.version))
        return aborted

    def _extend(self, pending: Pending, answer: dict[str, Any]) -> str:
        """Append what SGLang sampled; how it ended."""
        ids = answer["output_ids"]
        meta = answer["meta_info"]
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or ()]
        self._prompt_tokens += meta.get("prompt_tokens", 0)
        self._reused += meta.get("cached_tokens", 0)
        if len(ids) != len(logprobs):
            raise RuntimeError(f"SGLang returned {len(ids)} tokens and {len(logprobs)} log-probabilities for {pending.request.sample}")
        if ids:
            pending.response += wire.pack_ids(ids)
            pending.logprobs += wire.pack_floats(logprobs)
            pending.version = self.version
            if pending.start_version is None:
                pending.start_version = self.version
            self._tokens += len(ids)
        return meta["finish_reason"]["type"]

    def _land(self, rids: list[str]) -> list[Pending]:
        """Abort these requests on the server. Returns those that had not finished by themselves."""
        landed: list[Pending] = []
        deadline = time.monotonic() + ABORT_TIMEOUT_S
        while left := [rid for rid in rids if rid in self._flying]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"SGLang did not return {len(left)} aborted requests within {ABORT_TIMEOUT_S:.0f} s: {left[:3]}")
            if len(left) == len(self._flying):
                self._server.call("POST", "/abort_request", {"abort_all": True})
            else:
                for rid in left:
                    self._server.call("POST", "/abort_request", {"rid": rid})
            until = time.monotonic() + ABORT_REPEAT_S
            while time.monotonic() < until and any(rid in self._flying for rid in left):
                landed += self._collect(STEP_WAIT_S)
        return landed


def model_config(model_dir: str) -> dict[str, Any]:
    """config.json without what changes from one save to the next."""
    with open(os.path.join(model_dir, "config.json")) as file:
        return {key: value for key, value in json.load(file).items() if key not in VOLATILE_KEYS}


def server_args(model_dir: str, config: dict[str, Any], max_running: int, device: str) -> list[str]:
    """Arguments of the server that do not come from the user."""
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    args = ["--model-path", model_dir, "--device", device, "--max-running-requests", str(max_running)]
    # "auto" would turn float32 weights into half precision; the trainer's numerics are those of the file.
    args += ["--dtype", dtype, "--context-length", str(config["max_position_embeddings"])]
    # Token ids in, token ids out. An idle server must leave the core to the role that took over.
    args += ["--skip-tokenizer-init", "--sleep-on-idle", "--skip-server-warmup", "--log-level", "warning"]
    if device == "cpu":
        tokens = min(max_running * config["max_position_embeddings"], CPU_KV_TOKENS)
        args += ["--attention-backend", "torch_native", "--disable-cuda-graph", "--max-total-tokens", str(tokens)]
        args += ["--mem-fraction-static", "0.1", "--enable-deterministic-inference"]
    else:
        args += ["--enable-memory-saver"]
    return args
