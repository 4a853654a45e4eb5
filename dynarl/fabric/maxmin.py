"""How messages share links: max-min fair rates, and the time that a set of messages takes.

A rate is max-min fair when it can only grow by taking from a message that has no more. Equivalently, every message
crosses a full link on which nobody is faster. Progressive filling finds it: a link offers its free capacity in equal
shares to the messages that it has; those of the link with the least offer get it, their links lose it, and so on.

Here a round settles all links at once whose offer is the least along every message that they carry. Nothing can lower
such an offer: other links of these messages offer as much or more, and an offer only rises while others are served at
less. So rounds count the longest chain of dependent bottlenecks, not the bottlenecks; a round costs one pass over the
hops that are left.

>>> import numpy as np
>>> routes = np.array([[0, -1], [0, 1], [1, -1], [1, -1]])
>>> max_min_rates(routes, np.array([10.0, 9.0])).tolist()
[7.0, 3.0, 3.0, 3.0]
"""

from __future__ import annotations

import numpy as np

# Offers that differ by less, relatively, are one: rates are exact up to this.
TOLERANCE = 1e-12
# Of many messages that end at different times, this share is retired before rates are computed anew. Below twice its
# inverse every end counts: the time is exact.
RETIRED = 1 / 16


def max_min_rates(routes: np.ndarray, capacity: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Rates [messages], in the unit of `capacity` [links].

    `routes` [messages, hops] are links, padded with negative numbers. A message of weight w stands for w equal ones:
    the rate is that of one of them. Without a link it is infinite; over a link without capacity, 0.
    """
    rates = np.full(len(routes), np.inf)
    weights = np.ones(len(routes)) if weights is None else weights.astype(float)
    message, hop = np.nonzero(routes >= 0)
    link = routes[message, hop]
    # Links that are used, numbered without gaps.
    is_used = np.zeros(len(capacity), dtype=bool)
    is_used[link] = True
    used = np.nonzero(is_used)[0]
    number = np.empty(len(capacity), dtype=np.int64)
    number[used] = np.arange(len(used))
    link, free = number[link], capacity[used].astype(float)
    while len(message):
        crowd = np.bincount(link, weights[message], len(used))
        offer = np.full(len(used), np.inf)
        np.divide(free, crowd, out=offer, where=crowd > 0)
        limit = np.full(len(routes), np.inf)
        np.minimum.at(limit, message, offer[link])
        least = np.full(len(used), np.inf)
        np.minimum.at(least, link, limit[message])
        settled = np.zeros(len(routes), dtype=bool)
        settled[message[(offer <= least * (1 + TOLERANCE))[link]]] = True
        rates[settled] = limit[settled]
        gone = settled[message]
        free -= np.bincount(link[gone], (weights * rates)[message[gone]], len(used))
        np.maximum(free, 0.0, out=free)
        message, link = message[~gone], link[~gone]
    return rates


def drain_seconds(routes: np.ndarray, nbytes: np.ndarray, capacity_bytes_per_s: np.ndarray) -> float:
    """Seconds until the last byte of messages that start together is sent, rates anew whenever some have ended.

    Of many messages, the first to end keep their rate until RETIRED of them have: that bounds the work, never shortens
    what a link needs for its bytes, and is exact below 32 messages. Infinite where a link has no capacity.
    """
    left, elapsed_s = np.asarray(nbytes, dtype=float), 0.0
    going = (left > 0) & (routes >= 0).any(axis=1)
    routes, left = routes[going], left[going]
    while len(left):
        rates = max_min_rates(routes, capacity_bytes_per_s)
        if not rates.all():
            return np.inf
        ends_s = left / rates
        k = max(1, int(len(left) * RETIRED))
        step_s = np.partition(ends_s, k - 1)[k - 1]
        going = ends_s > step_s * (1 + 1e3 * TOLERANCE)
        elapsed_s += float(step_s) if going.any() else float(ends_s.max())
        routes, left = routes[going], (left - rates * step_s)[going]
    return elapsed_s
