"""Keys and values of running requests, one row per request, rows 0..n-1 in use.

Rows are kept dense: when a request leaves, the last row moves into its place. A step over n requests then works on
plain slices [:n], and a batch of 3 costs a batch of 3. Rows grow together, so memory follows the longest request.

What a leaving request had goes to a row behind those in use and is kept there until the row is needed; the least
recently used goes first. A request that comes back, with more tokens or after it was given up, and a fellow with the
same prompt need no prefill for the tokens that they share with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from dynarl.roles.rollout.decoder import Attend, DecoderConfig

FIRST_LENGTH = 128  # tokens per row at first; doubled whenever a request outgrows it


@dataclass(frozen=True)
class Kept:
    """Whose a row behind those in use was; `tokens` (all of that request's but the last) have a place in it."""

    sample: str
    prompt: bytes
    tokens: list[int]


class KVCache:
    """data: [layers, rows, 2K, length, D], the first K of 2K heads are keys. Absent (None) while released.

    rows: at least one more than are ever in use. kept: row -> what it holds, least recently used first.
    """

    def __init__(self, config: DecoderConfig, rows: int, device: torch.device):
        self.config = config
        self.rows = rows
        self.device = device
        self.data: torch.Tensor | None = None
        self.kept: dict[int, Kept] = {}

    @property
    def length(self) -> int:
        return 0 if self.data is None else self.data.shape[3]

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens per row."""
        if length <= self.length:
            return
        config = self.config
        room = max(FIRST_LENGTH, self.length)
        while room < length:
            room *= 2
        room = min(room, config.max_position)
        # Zeros, not garbage: masked positions are multiplied by probability 0, and 0 * nan is nan.
        data = torch.zeros(
            config.layers, self.rows, 2 * config.kv_heads, room, config.head_size, dtype=config.dtype, device=self.device
        )
        if self.data is not None:
            data[:, :, :, : self.length] = self.data
        self.data = data

    def release(self) -> None:
        self.data = None
        self.kept.clear()

    def leave(self, row: int, last: int, last_length: int, kept: Kept) -> None:
        """The request in `row` goes: keep what it had, and move the last row in use, `last`, into its place."""
        self.kept = {r: k for r, k in self.kept.items() if k.sample != kept.sample}
        place = last
        if row != last:
            place = next((r for r in range(last + 1, self.rows) if r not in self.kept), None) or next(iter(self.kept))
            self._copy(row, place, len(kept.tokens))
            self._copy(last, row, last_length)
        self.kept.pop(place, None)
        self.kept[place] = kept

    def claim(self, row: int, source: int | None, length: int) -> None:
        """Take `row`, the first behind those in use, for a request whose first `length` tokens are in row `source`."""
        if source != row and row in self.kept:
            free = next((r for r in range(row + 1, self.rows) if r not in self.kept), None)
            place = next(r for r in self.kept if r != source) if free is None else free
            if place != row:
                self._copy(row, place, len(self.kept[row].tokens))
                self.kept.pop(place, None)
                self.kept[place] = self.kept[row]
        self.kept.pop(row, None)
        if source is None or source == row:
            return
        self._copy(source, row, length)
        if source in self.kept:
            kept = self.kept.pop(source)
            if length < len(kept.tokens):  # else the request itself is back
                self.kept[source] = kept

    def _copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` over row `target`."""
        self.data[:, target, :, :length] = self.data[:, source, :, :length]

    def decode_attention(self, positions_N: torch.Tensor, used: int) -> Attend:
        """Attention of one new token per row, at `positions_N`; `used` is the largest position plus one."""
        n, heads, size = positions_N.shape[0], self.config.kv_heads, self.config.head_size
        data, length = self.data, self.length
        rows = torch.arange(n * 2 * heads, device=self.device).view(n, 2 * heads)
        target = (rows * length + positions_N[:, None]).view(-1)
        hidden = torch.arange(used, device=self.device) > positions_N[:, None]
        mask = torch.zeros(n, 1, 1, used, dtype=data.dtype, device=self.device).masked_fill_(hidden[:, None, None], -torch.inf)

        def attend(layer: int, q_NHD: torch.Tensor, kv_NKD: torch.Tensor) -> torch.Tensor:
            data[layer].view(-1, size).index_copy_(0, target, kv_NKD.reshape(-1, size))
            k, v = data[layer, :n, :heads, :used], data[layer, :n, heads:, :used]
            # The query heads that share a key head are passed as if they were a sequence: no copy of the keys per head.
            out = F.scaled_dot_product_attention(q_NHD.reshape(n, heads, -1, size), k, v, attn_mask=mask)
            return out.reshape(n, -1)

        return attend

    def prefill_attention(self, starts: list[int], lengths: list[int], rows: list[list[int]]) -> Attend:
        """Causal attention of new tokens: `lengths[s]` of sequence s, padded to the longest, from position
        `starts[s]` on.

        They are written to all of `rows[s]`, the first of which holds the tokens before `starts[s]` already. Padding
        is not written, and what a row holds behind its tokens is finite and masked.
        """
        heads, size, count, width = self.config.kv_heads, self.config.head_size, len(starts), max(lengths)
        written = [(s, row) for s, mine in enumerate(rows) for row in mine]
        place = np.concatenate([np.full(lengths[s], row) for s, row in written])
        position = np.concatenate([np.arange(starts[s], starts[s] + lengths[s]) for s, _ in written])
        of = np.concatenate([np.arange(s * width, s * width + lengths[s]) for s, _ in written])
        place, position, of = (torch.from_numpy(index).to(self.device) for index in (place, position, of))
        first = torch.tensor([mine[0] for mine in rows], device=self.device)
        data, used, mask = self.data, max(map(sum, zip(starts, lengths))), None
        if any(starts):
            last_seen = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
            hidden = torch.arange(used, device=self.device) > last_seen[:, :, None]
            mask = torch.zeros(count, 1, width, used, dtype=data.dtype, device=self.device)
            mask.masked_fill_(hidden[:, None], -torch.inf)

        def attend(layer: int, q_NHD: torch.Tensor, kv_NKD: torch.Tensor) -> torch.Tensor:
            data[layer][place, :, position] = kv_NKD[of]
            q = q_NHD.reshape(count, width, -1, size).transpose(1, 2)
            if mask is None:
                kv = kv_NKD.reshape(count, width, 2 * heads, size).transpose(1, 2)
            else:
                kv = data[layer][first, :, :used]
            out = F.scaled_dot_product_attention(
                q, kv[:, :heads], kv[:, heads:], attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
            return out.transpose(1, 2).reshape(count * width, -1)

        return attend
