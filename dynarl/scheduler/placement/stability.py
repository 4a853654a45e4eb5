"""How sure a plan is: does it stay the best where the costs are not quite what they are thought to be?

Every stage's cost is multiplied by a factor of its own, drawn evenly from 1 - error to 1 + error, many times over. The
plans that were weighed are compared again under each draw, with their sizes as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dynarl.scheduler.placement.flow import Flow
from dynarl.scheduler.placement.plan import Execution, Node
from dynarl.scheduler.placement.stage import Stage

DRAWS, ERROR, SEED = 64, 0.10, 1
CLOSE = 0.02


class Stability(NamedTuple):
    """best, close: share of draws in which the plan stays the fastest of those weighed (to a thousandth), or within CLOSE
    of it; loss: by how much it is slower than the fastest, in the worst draw; error, draws: how it was tried.
    """

    best: float
    close: float
    loss: float
    error: float
    draws: int


def stability(
    flow: Flow,
    stages: Sequence[Stage],
    items: int,
    plans: Sequence[Node],
    sync_s: Mapping[int, float] | None = None,
    *,
    error: float = ERROR,
    draws: int = DRAWS,
    seed: int = SEED,
) -> Stability:
    """Of the first of `plans` among all of them."""
    factors = np.random.Generator(np.random.PCG64(seed)).uniform(1 - error, 1 + error, (draws, len(stages)))
    execution = Execution(flow, stages, items, sync_s or {})
    seconds = np.empty((draws, len(plans)))
    for draw in range(draws):
        execution.factors = dict(enumerate(factors[draw]))
        for number, plan in enumerate(plans):
            seconds[draw, number] = execution.run(plan)
    fastest = seconds.min(axis=1)
    lost = seconds[:, 0] / fastest - 1
    return Stability(float((lost <= 1e-3).mean()), float((lost <= CLOSE).mean()), float(lost.max()), error, draws)
