"""Keys and values of running requests, one row per request, rows 0..n-1 in use.

Rows are kept dense: when a request leaves, the last row moves into its place. A step over n requests then works on plain
slices [:n], and a batch of 3 costs a batch of 3. Rows grow together, so memory follows the longest request so far.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dynarl.roles.rollout.decoder import Attend, DecoderConfig

FIRST_LENGTH = 128  # tokens per row at first; doubled whenever a request outgrows it


class KVCache:
    """data: [layers, rows, 2K, length, D], the first K of 2K heads are keys. Absent (None) while released."""

    def __init__(self, config: DecoderConfig, rows: int, device: torch.device):
        self.config = config
        self.rows = rows
        self.device = device
        self.data: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.data is None else self.data.shape[3]

    def reserve(self, length: int, used_rows: int) -> None:
        """Make room for `length` tokens per row; keeps the first `used_rows` rows."""
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
            data[:, :used_rows, :, : self.length] = self.data[:, :used_rows]
        self.data = data

    def release(self) -> None:
        self.data = None

    def move(self, source: int, target: int, length: int) -> None:
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

    def prefill_attention(self, count: int, length: int, first_row: int, source: torch.Tensor) -> Attend:
        """Causal attention inside `count` sequences padded to `length` on the right.

        Fills the rows from `first_row` on; row first_row + i gets sequence source[i]. Padding is finite and lies behind
        every token of its row, so it is overwritten before it is ever attended to.
        """
        heads, size = self.config.kv_heads, self.config.head_size

        def attend(layer: int, q_NHD: torch.Tensor, kv_NKD: torch.Tensor) -> torch.Tensor:
            q = q_NHD.reshape(count, length, -1, size).transpose(1, 2)
            kv = kv_NKD.reshape(count, length, 2 * heads, size).transpose(1, 2)
            self.data[layer, first_row : first_row + len(source), :, :length] = kv[source]
            k, v = kv[:, :heads], kv[:, heads:]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(count * length, -1)

        return attend
