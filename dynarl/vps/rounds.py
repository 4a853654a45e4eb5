"""Which pairs of ranks exchange in which round: a closed formula, the same for every exchange and on every rank.

A round is a matching: each rank has at most one partner in it, and the two send to each other at the same time. Write the
number of ranks as n = m * 2**k with m odd, and the position of a rank as i = a * 2**k + x. In round r = c * 2**k + u

    a * 2**k + x   meets   ((c - a) mod m) * 2**k + (x xor u)

which is its own inverse, so every round is a matching; two positions meet in the one round c = a + b mod m, u = x xor y, so n
rounds make every pair meet exactly once, for every n. For powers of two this is the hypercube's order (m = 1), for odd n
the tournament's (k = 0). In between it keeps what is good about the former: ranks whose distance is a power of two, as the
members of tensor- and data-parallel groups are, meet all at once and not one pair after the other.

No barrier is needed between rounds. All ranks go through them in the same order and skip those in which they have nothing to
exchange, which both sides know. Of the ranks that wait, take one that waits in the earliest round: its partner cannot be past
that round without it and cannot be stuck before it, so it is there too, and both go on. Hence nothing ever waits for ever.

>>> [partner(r, 0, 6) for r in range(num_rounds(6))]
[0, 1, 2, 3, 4, 5]
>>> round_of(2, 5, 6)
1
>>> sorted((i, partner(1, i, 6)) for i in range(6))
[(0, 1), (1, 0), (2, 5), (3, 4), (4, 3), (5, 2)]
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

# What a message costs beside its bytes: posting, matching, a hop. For estimates only.
LATENCY_S = 20e-6


def num_rounds(n: int) -> int:
    """Rounds in which all pairs of `n` ranks meet; in one of them some rank meets itself, that is, rests."""
    return n


def partner(r: int, i: int, n: int) -> int:
    """Whom position `i` of `n` meets in round `r`; itself: it rests."""
    block = n & -n
    c, u = divmod(r, block)
    a, x = divmod(i, block)
    return (c - a) % (n // block) * block + (x ^ u)


def round_of(i, j, n: int):
    """The round in which positions `i` and `j` of `n` meet: integers, or arrays of them."""
    block = n & -n
    return (i // block + j // block) % (n // block) * block + (i % block ^ j % block)


def simulate(
    round_: np.ndarray,
    sender: np.ndarray,
    receiver: np.ndarray,
    nbytes: np.ndarray,
    bytes_per_s: float | Mapping[int, float],
    latency_s: float = LATENCY_S,
) -> float:
    """Seconds until the last message has arrived, when each rank goes through its rounds as fast as its partners allow.

    One entry per message, at most one for each (round, sender, receiver). The two directions of a pair run at the same time,
    each at the rate of the slower rank's link; packing is taken to overlap the wire.
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
    longest = np.zeros(len(keys), np.int64)
    np.maximum.at(longest, inverse, nbytes)
    pair_round, a, b = keys // (ranks * ranks), keys // ranks % ranks, keys % ranks
    cost = latency_s + longest / np.minimum(rate[a], rate[b])
    clock = np.zeros(ranks)
    starts = np.concatenate([[0], np.nonzero(np.diff(pair_round))[0] + 1, [len(keys)]]).tolist()
    for lo, hi in zip(starts, starts[1:]):
        one, other = a[lo:hi], b[lo:hi]
        clock[one] = clock[other] = np.maximum(clock[one], clock[other]) + cost[lo:hi]
    return float(clock.max())
