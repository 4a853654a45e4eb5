"""What the scheduler would do if it knew how long every answer gets: an upper bound, no policy for a real cluster."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynarl.config.schema import Config
from dynarl.controller.router import Router
from dynarl.scheduler.survival import Lengths, Survival, fit
from dynarl.sim.fleet import SimFleet


class TrueLengths(Lengths):
    """The lengths that the answers of the running iteration will have, instead of an estimate from finished ones."""

    def __init__(self, max_tokens: int, fleet: SimFleet):
        super().__init__(max_tokens)
        self._fleet = fleet

    def survival(self, running: Sequence[int]) -> Survival:
        lengths = [request.response_tokens for request in self._fleet.requests.values()]
        return fit(lengths, (), self.max_tokens, tail_at_risk=0.0)


class OracleRouter(Router):
    """Routes requests by the tokens that each really has to go."""

    def __init__(self, config: Config, lengths: Lengths, figures_gap_s: float, fleet: SimFleet):
        super().__init__(config, lengths, figures_gap_s)
        self._fleet = fleet

    def _expected(self, samples: list[str], tokens: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        return np.array([self._expected_of(sample, so_far) for sample, so_far in zip(samples, tokens.tolist())])

    def _expected_of(self, sample: str, tokens: float) -> float:
        return max(1.0, self._fleet.requests[sample].response_tokens - tokens)
