"""In which order the parts of a model move, so that memory stays bounded: from sizes alone, the same on every rank.

A chunk is what moves at a time: its source is released before the next one's destination is needed. For the live bytes
of every rank to stay near the larger of its two states, each chunk must take about the same share of everybody's
source and of everybody's destination. In the order of the layers it does not: when the pipeline changes, a rank may
receive all it needs before it gives anything away, and its peak is up to the sum of both.

So the model is laid out as one line of bytes, tensor after tensor, and cut into units of equal size (small tensors
share one, big ones are cut by rows). Unit u belongs to chunk floor(C * frac(u * golden ratio)). Whatever is contiguous
on the line (a pipeline stage, the rows of a tensor) or periodic (experts, interleaved stages) then has its share in
every chunk, up to a number of units that grows with the logarithm of their count (three-distance theorem; the golden
ratio is the number for which this holds best). No layout enters, so that no rank needs to know more than its own part,
and no search is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynarl.vps.box import Pieces
from dynarl.vps.overlap import cut, expand

GOLDEN = (5**0.5 - 1) / 2
# Bytes of the budget for each byte that arrives on a rank with a chunk: itself, while its source is still there, and
# the messages of two rounds in staging, in and out. Those are small where there are many peers; where there is only
# one, it is that peer's round in every step, so that the two in flight are bounded by the arrivals of two chunks,
# twice. One more is for chunks that are not quite equal.
SHARES_IN_BUDGET = 6
UNITS_IN_SHARE = 8
MAX_CHUNKS = 1 << 14
MAX_UNITS = 1 << 20


@dataclass(frozen=True, eq=False)
class Chunks:
    """How tensors are cut by rows, and which chunk each part belongs to."""

    count: int
    cut_tensor: np.ndarray  # int64 [K]: row `cut_row` of tensor `cut_tensor` begins a new part; sorted
    cut_row: np.ndarray
    first_part: np.ndarray  # int64 [T + 1]
    chunk: np.ndarray  # int64, by part
    turn: np.ndarray  # float64 in [0, 1), by part: evenly spread within each chunk

    def cut(self, pieces: Pieces) -> Pieces:
        """The pieces, none of which reaches over two parts any more."""
        return cut(pieces, 0, self.cut_tensor, self.cut_row)

    def part(self, tensor: np.ndarray, row: np.ndarray) -> np.ndarray:
        """The parts that boxes lie in, by their tensor and first row."""
        if not len(self.cut_tensor) or not len(tensor):
            return self.first_part[tensor]
        base = int(max(self.cut_row.max(), row.max())) + 1
        cuts = self.cut_tensor * base + self.cut_row
        # Cuts before this row, over all tensors; parts are numbered the same way, with one more for each tensor before.
        return np.searchsorted(cuts, tensor.astype(np.int64) * base + row, side="right") + tensor

    def of(self, pieces: Pieces) -> np.ndarray:
        """The chunk of each piece."""
        return self.chunk[self.part(pieces.tensor, pieces.lo[:, 0])]


def golden(numbers: np.ndarray) -> np.ndarray:
    """Numbers 0, 1, 2, ... spread evenly over [0, 1), as are any of them in a row."""
    return numbers * GOLDEN % 1.0


def divide(rows: np.ndarray, nbytes: np.ndarray, budget: int, largest_dst: int, part_on_a_rank: float) -> Chunks:
    """Chunks of tensors with `rows` [T] rows and `nbytes` [T] bytes of all kinds together.

    `largest_dst`: bytes of the largest destination; `part_on_a_rank`: which part of a tensor that it touches a rank
    holds, at most. Raises ValueError where the budget is too small to be kept.
    """
    share = budget / SHARES_IN_BUDGET
    count = max(1, -(-largest_dst // max(int(share), 1)))
    if count > MAX_CHUNKS:
        least = -(-largest_dst * SHARES_IN_BUDGET // MAX_CHUNKS)
        raise ValueError(f"a budget of {budget} bytes would need {count} chunks; {least} bytes are the least here")
    total = int(nbytes.sum())
    unit = max(share / UNITS_IN_SHARE / max(part_on_a_rank, 1e-9), total / MAX_UNITS, 1.0)
    unit = min(unit, max(total / (count * UNITS_IN_SHARE), 1.0))
    parts = np.ones(len(rows), np.int64)
    if count > 1:
        parts = np.clip(np.ceil(nbytes / unit).astype(np.int64), 1, np.maximum(rows, 1))
    tensor, nth = expand(parts)
    middle = (np.cumsum(nbytes) - nbytes)[tensor] + (nth + 0.5) * (nbytes / parts)[tensor]
    number = middle // unit
    in_chunk = golden(number) * count
    first = np.searchsorted(number, number)  # parts that share a unit take different turns
    turn = (in_chunk + golden(np.arange(len(number)) - first)) % 1.0
    cut_tensor, nth = expand(parts - 1)
    return Chunks(
        count=count,
        cut_tensor=cut_tensor,
        cut_row=rows[cut_tensor] * (nth + 1) // parts[cut_tensor],
        first_part=np.concatenate([[0], np.cumsum(parts)]),
        chunk=in_chunk.astype(np.int64),
        turn=turn,
    )
