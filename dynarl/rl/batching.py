"""Pack samples of different lengths into micro-batches of bounded size. Plain Python: no torch.

A micro-batch is padded to its longest sample and costs len(batch) * longest tokens. Invariants, all tested:

1. every sample is in exactly one micro-batch;
2. samples keep their order: the micro-batches joined are range(n);
3. the padded size of a micro-batch is at most the cap, unless it holds a single sample longer than the cap;
4. no micro-batch is empty;
5. the same lengths and cap give the same cut;
6. no other cut that keeps the order costs less (padded tokens + OVERHEAD_TOKENS per micro-batch).
"""

from __future__ import annotations

from typing import Sequence

# A forward and backward pass costs its tokens plus a fixed part, given here in tokens so that the two can be added.
# Measured on one CPU core with 2 layers of width 128: 4.5 ms + 43 us per token.
OVERHEAD_TOKENS = 100


def pack(lengths: Sequence[int], cap_tokens: int) -> list[range]:
    """Cut samples 0..n-1 of the given lengths (tokens) into micro-batches of at most `cap_tokens` padded tokens.

    >>> pack([10, 10, 500, 500], cap_tokens=1000)
    [range(0, 2), range(2, 4)]

    Sort by length beforehand where the order is free: it is what keeps padding small.
    """
    best = [0.0] + [float("inf")] * len(lengths)  # best[i]: least cost of the first i samples
    cut = [0] * (len(lengths) + 1)  # where the last micro-batch of that cut begins
    for end in range(1, len(lengths) + 1):
        longest = 0
        for start in range(end - 1, -1, -1):
            longest = max(longest, lengths[start])
            padded = longest * (end - start)
            if padded > cap_tokens and end - start > 1:
                break
            cost = best[start] + padded + OVERHEAD_TOKENS
            if cost < best[end]:
                best[end], cut[end] = cost, start
    batches, end = [], len(lengths)
    while end:
        batches.append(range(cut[end], end))
        end = cut[end]
    return batches[::-1]
