"""Which pairs of ranks exchange in which round: a closed formula, the same for every exchange and on every rank.

A round is a matching: each rank has at most one partner in it, and the two send to each other at the same time. Write
the number of ranks as n = m * 2**k with m odd, and the position of a rank as i = a * 2**k + x. In round
r = c * 2**k + u

    a * 2**k + x   meets   ((c - a) mod m) * 2**k + (x xor u)

which is its own inverse, so every round is a matching; two positions meet in the one round c = a + b mod m, u = x xor
y, so n rounds make every pair meet exactly once, for every n. For powers of two this is the hypercube's order (m = 1),
for odd n the tournament's (k = 0). In between it keeps what is good about the former: ranks whose distance is a power
of two, as the members of tensor- and data-parallel groups are, meet all at once and not one pair after the other. The
rounds come in an order that follows neither r nor the distance (golden ratio), or waits would add up along such
groups.

No barrier is needed between rounds. All ranks go through them in the same order and skip those in which they have
nothing to exchange, which both sides know. Of the ranks that wait, take one that waits in the earliest round: its
partner cannot be past that round without it and cannot be stuck before it, so it is there too, and both go on. Hence
nothing ever waits for ever.

>>> [partner(r, 0, 6) for r in range(num_rounds(6))]
[0, 5, 2, 4, 1, 3]
>>> round_of(2, 5, 6)
4
>>> sorted((i, partner(1, i, 6)) for i in range(6))
[(0, 5), (1, 4), (2, 3), (3, 2), (4, 1), (5, 0)]
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from dynarl.vps.chunks import golden

# What a message costs beside its bytes: posting, matching, a hop. For estimates only.
LATENCY_S = 20e-6


def num_rounds(n: int) -> int:
    """Rounds in which all pairs of `n` ranks meet; in one of them some rank meets itself, that is, rests."""
    return n


def partner(r: int, i: int, n: int) -> int:
    """Whom position `i` of `n` meets in round `r`; itself: it rests."""
    block = n & -n
    c, u = divmod(int(_formula(n)[r]), block)
    a, x = divmod(i, block)
    return (c - a) % (n // block) * block + (x ^ u)


def round_of(i, j, n: int):
    """The round in which positions `i` and `j` of `n` meet: integers, or arrays of them."""
    block = n & -n
    place = _place(n)[(i // block + j // block) % (n // block) * block + (i % block ^ j % block)]
    return place if isinstance(place, np.ndarray) else int(place)


@lru_cache(maxsize=64)
def _formula(n: int) -> np.ndarray:
    """r of the formula, by round."""
    return np.argsort(golden(np.arange(n)), kind="stable")


@lru_cache(maxsize=64)
def _place(n: int) -> np.ndarray:
    """The round, by r of the formula."""
    return np.argsort(_formula(n))


def simulate(
    round_: np.ndarray,
    sender: np.ndarray,
    receiver: np.ndarray,
    nbytes: np.ndarray,
    bytes_per_s: float | Mapping[int, float],
    latency_s: float = LATENCY_S,
) -> float:
    """Seconds until the last message has arrived, when each rank goes through its rounds as fast as its partners allow.

    One entry per message, at most one for each (round, sender, receiver). A rank has two of its rounds in flight,
    sends one message at a time and receives one at a time, at the rate of the slower of the two links; packing
    overlaps the wire.
    """
    if not len(round_):
        return 0.0
    ranks = int(max(sender.max(), receiver.max())) + 1
    if isinstance(bytes_per_s, Mapping):
        rate = np.full(ranks, np.inf)
        for rank, value in bytes_per_s.items():
            if 0 <= rank < ranks:
                rate[rank] = value
    else:
        rate = np.full(ranks, float(bytes_per_s))
    a, b = np.minimum(sender, receiver).astype(np.int64), np.maximum(sender, receiver).astype(np.int64)
    key = (round_.astype(np.int64) * ranks + a) * ranks + b
    keys, inverse = np.unique(key, return_inverse=True)
    up, down = np.zeros((2, len(keys)))
    seconds = latency_s + nbytes / np.minimum(rate[sender], rate[receiver])
    np.maximum.at(up, inverse, np.where(sender == a, seconds, 0.0))
    np.maximum.at(down, inverse, np.where(sender == a, 0.0, seconds))
    pair_round, a, b = keys // (ranks * ranks), keys // ranks % ranks, keys % ranks
    # By rank: when its two ports are free, and when its last two rounds were over.
    sending, receiving, last, before = np.zeros((4, ranks))
    starts = np.concatenate([[0], np.nonzero(np.diff(pair_round))[0] + 1, [len(keys)]]).tolist()
    for lo, hi in zip(starts, starts[1:]):
        x, y = a[lo:hi], b[lo:hi]
        posted = np.maximum(before[x], before[y])
        for one, other, cost in ((x, y, up[lo:hi]), (y, x, down[lo:hi])):
            busy = cost > 0
            one, other = one[busy], other[busy]
            end = np.maximum(np.maximum(sending[one], receiving[other]), posted[busy]) + cost[busy]
            sending[one] = receiving[other] = end
        both = np.concatenate([x, y])
        before[both] = last[both]
        last[both] = np.maximum(last[both], np.maximum(sending[both], receiving[both]))
    return float(max(sending.max(), receiving.max()))
