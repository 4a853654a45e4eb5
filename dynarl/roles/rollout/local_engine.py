"""The in-process engine: continuous batching in one Python loop, for every day and for CPUs.

A step is either a prefill (of what waits and fits, in the order of `dataflow.priority`) or one decode step of all
running requests. Requests with equal tokens so far, as the members of a group have, are prefilled once; and of a
prefix that the cache still has only the rest is.
"""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch

from dynarl import wire
from dynarl.dataflow.priority import Desk, Ticket
from dynarl.roles.rollout.decoder import Decoder, read_config
from dynarl.roles.rollout.engine import ABORT, LENGTH, STOP, Engine, Figures, Output, Part, Request
from dynarl.roles.rollout.engine import check_request, split_done, stream_key, thinned
from dynarl.roles.rollout.kv_cache import Kept, KVCache
from dynarl.roles.rollout.sampling import sample_tokens, uniforms

# Padded tokens of one prefill: bounds its memory, and how long running requests wait for it.
PREFILL_TOKENS = 8192
# Rows of the cache beyond those in use at most, as a share of them: for prefixes that may be needed again.
KEPT_SHARE = 4


@dataclass
class Running:
    """A request and what was sampled for it so far. versions: of the first and the last token sampled here, or None.

    told: tokens of the response that somebody else has too.
    """

    request: Request
    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    key: int
    ticket: Ticket
    start_version: int | None = None
    version: int | None = None
    tokens: list[int] = field(init=False)
    told: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.prompt + self.response
        self.told = len(self.response)

    def part(self) -> Part:
        """What came since `told`."""
        start, self.told = self.told, len(self.response)
        ids, logprobs = wire.pack_ids(self.response[start:]), wire.pack_floats(self.logprobs[start:])
        return Part(self.request.sample, start, ids, logprobs, self.version)

    def output(self, finish: str, current: int) -> Output:
        start = current if self.start_version is None else self.start_version
        last = current if self.version is None else self.version
        return Output(self.request.sample, wire.pack_ids(self.response), wire.pack_floats(self.logprobs), finish, last, start)


class LocalEngine(Engine):
    """max_running: requests decoded together; more wait."""

    def __init__(self, model_dir: str, version: int, max_running: int = 32, device: str = "cpu"):
        config = read_config(model_dir)
        self._config = config
        self._decoder = Decoder(config, device)
        self._max_running = max_running
        self._cache = KVCache(config, max_running + max(1, max_running // KEPT_SHARE), self._decoder.device)
        self._waiting: list[Running] = []
        self._desk = Desk()
        self._rows: list[Running] = []  # row i of the cache belongs to _rows[i]
        self._done: list[Output] = []
        self._asleep = False
        self._tokens = self._prefilled = self._reused = 0
        # One entry per row: its last token (not in the cache yet) and that token's position, and what sampling needs.
        self._last = np.zeros(max_running, np.int64)
        self._position = np.zeros(max_running, np.int64)
        self._key = np.zeros(max_running, np.uint64)
        self._temperature = np.zeros(max_running, np.float32)
        self._columns = (self._last, self._position, self._key, self._temperature)
        self.load(model_dir, version)

    def load(self, model_dir: str, version: int) -> None:
        if read_config(model_dir) != self._config:
            raise ValueError(f"{model_dir} holds a model of another shape than the one this engine was made for")
        self._decoder.load(model_dir)
        self.version = version
        # Running requests go through a prefill again: their keys and values are those of the old weights.
        self._waiting = self._rows + self._waiting
        self._rows = []
        self._cache.kept.clear()

    def submit(self, requests: list[Request]) -> None:
        if self._asleep:
            raise RuntimeError("the engine sleeps: wake it first")
        config = self._config
        known = {running.request.sample for running in (*self._rows, *self._waiting)}
        for request in requests:
            check_request(request, known, config.vocab_size, config.max_position)
            known.add(request.sample)
        for request in requests:
            running = Running(
                request,
                wire.unpack_ids(request.prompt),
                wire.unpack_ids(request.response),
                wire.unpack_floats(request.logprobs),
                stream_key(request.seed, request.sample),
                self._desk.ticket(request.tool_calls, time.monotonic(), request.order),
            )
            finish = self._finish(running)
            if finish is None:
                self._waiting.append(running)
            else:
                self._done.append(running.output(finish, self.version))

    def busy(self) -> bool:
        return bool(self._rows or self._waiting or self._done)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        done, self._done = self._done, []
        if self._waiting and len(self._rows) < self._max_running:
            first_row = len(self._rows)
            logits = self._prefill()
        elif self._rows:
            first_row = 0
            logits = self._decode()
        else:
            return done
        self._sample(logits, first_row)
        # Backwards: a leaving row is replaced by the last one, which has been looked at already.
        for row in range(len(self._rows) - 1, first_row - 1, -1):
            finish = self._finish(self._rows[row])
            if finish is not None:
                done.append(self._remove(row).output(finish, self.version))
        return done

    @torch.inference_mode()
    def abort(self, samples: list[str] | None = None) -> list[Output]:
        wanted = None if samples is None else set(samples)
        out, self._done = split_done(self._done, wanted)
        for row in range(len(self._rows) - 1, -1, -1):
            if wanted is None or self._rows[row].request.sample in wanted:
                out.append(self._remove(row).output(ABORT, self.version))
        kept: list[Running] = []
        for running in self._waiting:
            if wanted is None or running.request.sample in wanted:
                out.append(running.output(ABORT, self.version))
            else:
                kept.append(running)
        self._waiting = kept
        return out

    def parts(self) -> list[Part]:
        return [running.part() for running in self._rows if len(running.response) > running.told]

    def figures(self) -> Figures:
        used = int(self._position[: len(self._rows)].sum())
        total = self._max_running * self._config.max_position
        requests = (*self._rows, *self._waiting)
        lengths = thinned([len(running.response) - running.request.masked_tokens for running in requests])
        return Figures(
            len(self._rows), len(self._waiting), self._tokens, used, total, self._prefilled, self._reused, lengths
        )

    def sleep(self) -> None:
        if self.busy():
            raise RuntimeError(f"the engine has {len(self._rows)} running and {len(self._waiting)} waiting requests: abort them first")
        self._asleep = True
        self._cache.release()
        if self._decoder.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            # glibc keeps freed blocks that it had not mapped one by one; the next role needs them.
            ctypes.CDLL(None).malloc_trim(0)

    def wake(self) -> None:
        self._asleep = False

    def _finish(self, running: Running) -> str | None:
        """How this answer has ended, None if it goes on."""
        if running.response and (running.response[-1] in self._config.eos or running.response[-1] in running.request.stop_ids):
            return STOP
        if len(running.response) >= running.request.max_response_tokens or len(running.tokens) >= self._config.max_position:
            return LENGTH
        return None

    def _admit(self) -> list[int]:
        """Take waiting requests into rows, as far as rows and the size of one prefill allow.

        Returns for each how many of its tokens its row holds already.
        """
        now, holders = time.monotonic(), defaultdict(list)
        for row, other in enumerate(self._rows):
            holders[other.request.prompt].append((row, other.tokens))
        known = [self._cached(running, holders)[1] for running in self._waiting]
        starts: list[int] = []
        longest = 0
        while self._waiting and len(self._rows) < self._max_running:
            index = self._desk.draw([running.ticket for running in self._waiting], known, now)
            running = self._waiting[index]
            source, start = self._cached(running, holders)
            longest = max(longest, len(running.tokens) - start)
            if starts and longest * (len(starts) + 1) > PREFILL_TOKENS:
                break
            del self._waiting[index], known[index]
            row = len(self._rows)
            self._cache.claim(row, source, start)
            self._rows.append(running)
            self._key[row] = running.key
            self._temperature[row] = running.request.temperature
            self._position[row] = len(running.tokens) - 1
            starts.append(start)
        return starts

    def _cached(self, running: Running, holders: dict[bytes, list[tuple[int, list[int]]]]) -> tuple[int | None, int]:
        """(row, tokens) with the longest prefix of this request, (None, 0) where there is none.

        holders: rows in use and their tokens, by prompt. Only rows of the same prompt are looked at.
        """
        best: tuple[int | None, int] = None, 0
        prompt = running.request.prompt
        kept = [(row, k.tokens) for row, k in self._cache.kept.items() if k.prompt == prompt]
        for row, tokens in holders.get(prompt, []) + kept:
            length = _common(tokens, running.tokens, len(running.prompt))
            # Of a row in use the last token has no place yet; and one token must go through the model for its logits.
            length = min(length, len(tokens) - (row < len(self._rows)), len(running.tokens) - 1)
            if length > best[1]:
                best = row, length
        return best

    def _prefill(self) -> torch.Tensor:
        """Logits [admitted, vocabulary] of the next token of each request that was taken in."""
        first_row = len(self._rows)
        held = self._admit()
        number: dict[tuple[int, ...], int] = {}  # of each distinct sequence
        source = [number.setdefault(tuple(running.tokens), len(number)) for running in self._rows[first_row:]]
        rows: list[list[int]] = [[] for _ in number]
        for index, sequence in enumerate(source):
            rows[sequence].append(first_row + index)
        starts = [min(held[row - first_row] for row in mine) for mine in rows]
        lengths = [len(sequence) - start for sequence, start in zip(number, starts)]
        count, width = len(number), max(lengths)
        tokens, positions = np.zeros((count, width), np.int64), np.zeros((count, width), np.int64)
        for index, (sequence, start) in enumerate(zip(number, starts)):
            tokens[index, : lengths[index]] = sequence[start:]
            positions[index, : lengths[index]] = np.arange(start, len(sequence))
        self._prefilled += sum(lengths)
        self._reused += sum(starts)
        self._cache.reserve(max(map(len, number)))
        device = self._decoder.device
        attend = self._cache.prefill_attention(starts, lengths, rows)
        hidden = self._decoder.forward(
            torch.from_numpy(tokens).view(-1).to(device), torch.from_numpy(positions).view(-1).to(device), attend
        )
        last = torch.tensor([index * width + length - 1 for index, length in enumerate(lengths)], device=device)
        return self._decoder.logits(hidden[last])[torch.tensor(source, device=device)]

    def _decode(self) -> torch.Tensor:
        """Logits [running, vocabulary] after feeding each row its last token."""
        n = len(self._rows)
        used = int(self._position[:n].max()) + 1
        self._cache.reserve(used)
        tokens, positions = self._device(self._last, n), self._device(self._position, n)
        hidden = self._decoder.forward(tokens, positions, self._cache.decode_attention(positions, used))
        return self._decoder.logits(hidden)

    def _sample(self, logits: torch.Tensor, first_row: int) -> None:
        """Draw the next token of the rows from `first_row` on and note it."""
        n = len(self._rows)
        rows = slice(first_row, n)
        drawn = torch.from_numpy(uniforms(self._key[rows], self._position[rows])).to(logits.device)
        temperature = torch.from_numpy(self._temperature[rows]).to(logits.device)
        ids, logprobs = sample_tokens(logits, temperature, drawn)
        ids = ids.cpu()
        self._last[rows] = ids.numpy()
        self._position[rows] += 1
        for running, token, logprob in zip(self._rows[rows], ids.tolist(), logprobs.tolist()):
            running.response.append(token)
            running.tokens.append(token)
            running.logprobs.append(logprob)
            running.version = self.version
            if running.start_version is None:
                running.start_version = self.version
        self._tokens += n - first_row

    def _remove(self, row: int) -> Running:
        """Take a request out; the last row takes its place."""
        last = len(self._rows) - 1
        leaving = self._rows[row]
        request = leaving.request
        kept = Kept(request.sample, request.prompt, leaving.tokens[:-1])
        self._cache.leave(row, last, int(self._position[last]), kept)
        if row != last:
            self._rows[row] = self._rows[last]
            for column in self._columns:
                column[row] = column[last]
        self._rows.pop()
        return leaving

    def _device(self, column: np.ndarray, n: int) -> torch.Tensor:
        return torch.from_numpy(column[:n]).to(self._decoder.device)


def _common(a: list[int], b: list[int], least: int) -> int:
    """Length of the longest common prefix; the first `least` items are known to be equal."""
    most = min(len(a), len(b))
    if a[least:most] == b[least:most]:
        return most
    return next(index for index in range(least, most) if a[index] != b[index])
