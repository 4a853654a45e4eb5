"""Does the order of policies hold where the cluster is not quite what the model of it says?

One role after the other is made slower and faster by `ERROR`, and all policies are simulated again on each such cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

ERROR = 0.10
ROLES = ("rollout", "inference", "training")
# Makespans that differ by less are in no order.
SAME = 0.005


class Variable(Protocol):
    """A scenario or a recorded run."""

    def slowed(self, role: str, factor: float) -> Variable:
        """The same where work of this role takes `factor` times as long."""


def variants(scenario: Variable) -> Iterator[tuple[str, Variable]]:
    """(what is off, the scenario where it is)"""
    for role in ROLES:
        for name, factor in (("slower", 1 + ERROR), ("faster", 1 / (1 + ERROR))):
            yield f"{role} {ERROR:.0%} {name}", scenario.slowed(role, factor)


def stability(as_modelled: Mapping[str, float], off: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """as_modelled: policy -> makespan in seconds; off: what is off -> the same there.

    >>> found = stability({"static": 9.0, "dynarl": 5.0}, {"rollout 10% slower": {"static": 9.5, "dynarl": 5.5}})
    >>> found["order"], found["variants"][0]["same_order"]
    (['dynarl', 'static'], True)
    """
    order = sorted(as_modelled, key=as_modelled.__getitem__)
    pairs = [(a, b) for i, a in enumerate(order) for b in order[i + 1 :] if as_modelled[b] > as_modelled[a] * (1 + SAME)]
    told = [
        {
            "off": name,
            "makespan_s": dict(found),
            "same_order": not any(found[a] > found[b] * (1 + SAME) for a, b in pairs),
        }
        for name, found in off.items()
    ]
    return {"error": ERROR, "order": order, "variants": told}
