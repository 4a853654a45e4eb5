"""Iterations of a trace again, as the simulator has them; and the constants that only show there: what verdicts take.

A node gives its verdicts one after another, on the processors on which it decodes. Nobody measures one alone: what a trace
has is when the controller heard of each answer. So `verdict_s` is that with which answers come as late in the mean as they
did, and `verify_s` what the first one is late besides.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from dynarl.config.schema import Config, Policy
from dynarl.controller.nodes import assign_homes
from dynarl.controller.trace import Line
from dynarl.sim.calibrate import Calibration, Constant, fit, named, renamed, requests, warm
from dynarl.sim.run import run

# The search for `verdict_s`: from this on twice as much until answers come late enough, then so many halvings.
FIRST_S, HALVINGS = 0.008, 5
# A node that gives fewer verdicts a second does nothing else.
MOST_S = 1.0


def calibrated(config: Config, lines: Sequence[Line], on: Sequence[Line] | None = None) -> Calibration:
    """Constants from the lines `on` (default all), but what changes of roles and verdicts take from all lines: static
    splits never move a node, and a node with few answers at a time tells little of verdicts. Raises NoTrace."""
    counted = warm(lines)
    return with_verdicts(config, counted, fit(counted if on is None else on, counted))


def replay(config: Config, same: Sequence[Line], calibration: Calibration) -> list[Line]:
    """These iterations, all of one candidate or policy, one after another."""
    policy = policy_of(config, same[0])
    roles = same[0].roles
    homes = roles if policy.name == "static" else assign_homes(config, sorted(roles))

    def draw(iteration: int, seed: int):
        return renamed(requests(same[iteration - 1]), iteration)

    world = calibration.world(msgspec.structs.replace(config, policy=policy), dict(homes), draw)
    return [msgspec.json.decode(line, type=Line) for line in run(world, 1, iterations=len(same)).traces]


def policy_of(config: Config, line: Line) -> Policy:
    """As it ran: a bench's own candidates lend the trainer's nodes, and say in what order requests wait."""
    if not line.candidate:
        return config.policy
    lends = line.policy in ("threshold", "adaptive")
    return msgspec.structs.replace(config.policy, name=line.policy, lend_owners=lends)


def with_verdicts(config: Config, lines: Sequence[Line], calibration: Calibration) -> Calibration:
    """The same with what verdicts take, by the newest iteration of each candidate or policy in these lines."""
    newest = [same[-1] for same in named([line for line in lines if line.answers]).values()]
    if not newest:
        return calibration
    first_s, mean_s = _answers_s(newest)

    def again(verify_s: float, verdict_s: float) -> tuple[float, float]:
        changed = replace(calibration, verify_s=verify_s, verdict_s=verdict_s)
        return _answers_s([replay(config, [line], changed)[0] for line in newest])

    # A first answer waits for no other's verdict: it is as late as both constants together.
    late_s = max(first_s - again(0.0, 0.0)[0], 0.0)

    def is_early(verdict_s: float) -> bool:
        return again(max(late_s - verdict_s, 0.0), verdict_s)[1] < mean_s

    low_s, high_s = 0.0, FIRST_S
    while is_early(high_s) and high_s < MOST_S:
        low_s, high_s = high_s, 2 * high_s
    for _ in range(HALVINGS):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if is_early(middle_s) else (low_s, middle_s)
    verify_s = max(late_s - low_s, 0.0)
    found = [Constant("rollout/verify", verify_s, "s", None), Constant("rollout/verdict", low_s, "s", None)]
    return replace(calibration, verify_s=verify_s, verdict_s=low_s, constants=[*calibration.constants, *found])


def _answers_s(lines: Sequence[Line]) -> tuple[float, float]:
    """Seconds from the start of an iteration to its first answer, median, and to an answer, mean over all."""
    first_s = statistics.median(min(answer[-1] for answer in line.answers) for line in lines)
    return first_s, statistics.fmean(answer[-1] for line in lines for answer in line.answers)
