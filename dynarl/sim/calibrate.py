"""The constants of a simulated cluster from the trace of a real run, each with its error.

Fitted by least squares, never below zero, with standard errors (`controller.trace` says what a trace has):

    decode     seconds = fixed * steps + per_request * tokens + prefill_token * prefilled      of one engine, by load
    stages     node-seconds = fixed + per_token * tokens                                       of one group
    phases     means of the phases of moves, of the optimizer step, of new weights to all nodes
    at_work    orders of a change of roles: how much longer where nodes have work than where all are idle
    verdicts   seconds of a node on an answer, so that answers come as late as they did (`replayed`)

Means, not medians: an iteration is a sum of such times, and now and then one of them is long. Times are seen from the
controller, messages included, so messages take no time of their own here.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from dynarl import rundir
from dynarl.config.schema import Config
from dynarl.controller.trace import Line
from dynarl.errors import DynarlError
from dynarl.lines import LineReader
from dynarl.perf.rollout import StepModel
from dynarl.sim.workload import NS_PER_S, SimRequest, Turn
from dynarl.sim.world import Times, World

# An engine that never said what it holds is taken to hold everything.
UNBOUNDED_TOKENS = 1 << 40
# Rollout workers of a real job report so often.
FIGURES_S = 0.25
# Where fewer tokens are prefilled, as a share of those that are decoded, their time is lost in that of the others. A token
# is then taken to be prefilled as fast as a further request is decoded.
TELLING = 0.2
# Fits of the decode step, each with the weights that the one before tells.
REWEIGHTED = 3
# Orders of a change of roles, by the phases that they take. The second vote is like the first.
ORDERS = {"prepare": ("prepare",), "vote": ("vote", "verify"), "commit": ("commit",)}


@dataclass(frozen=True)
class Constant:
    """A fitted value; error: its standard error, None where one measurement alone speaks for it."""

    name: str
    value: float
    unit: str
    error: float | None


class NoTrace(DynarlError):
    """The run has no trace, or one that cannot be read, or nothing in it to fit to."""


def read(run: Path) -> list[Line]:
    """The lines of a run's trace, oldest first. Raises NoTrace."""
    lines, decoder = [], msgspec.json.Decoder(Line)
    for path in (rundir.older_trace(run), rundir.trace(run)):
        for number, line in enumerate(LineReader(path), 1):
            try:
                lines.append(decoder.decode(line))
            except msgspec.ValidationError as error:
                shown = line.decode(errors="replace").strip()
                shown = repr(shown if len(shown) <= 80 else shown[:77] + "...")
                raise NoTrace(f"{path}:{number}: {error}, in {shown}: no iteration that dynarl has written") from None
            except (msgspec.DecodeError, UnicodeDecodeError):  # cut short by a crash
                continue
    if not lines:
        raise NoTrace(f"{rundir.trace(run)} has no iteration: run the job for at least one, with a dynarl that writes traces")
    return lines


@dataclass(frozen=True)
class Calibration:
    """The constants of one cluster and model. step: of a rollout engine; stages: role -> (fixed_s, per_token_s);
    phases: seconds by name; at_work, verify_s, verdict_s: see `sim.world.Times`."""

    step: StepModel
    stages: Mapping[str, tuple[float, float]]
    phases: Mapping[str, float]
    kv_tokens: int
    constants: Sequence[Constant]
    at_work: float = 1.0
    verify_s: float = 0.0
    verdict_s: float = 0.0

    def times(self) -> Times:
        def group(role: str) -> Callable[[Sequence[tuple[int, int]]], float]:
            fixed_s, per_token_s = self.stages[role]
            return lambda sizes: fixed_s + per_token_s * sum(response for _, response in sizes)

        phase = self.phases
        return Times(
            inference=group("inference"),
            training=group("training"),
            optimizer=lambda num_devices: phase["step"],
            transfer=lambda source, target: phase["transfer"],
            prepare_s=phase["prepare"],
            vote_s=phase["vote"],
            drain_s=phase["drain"],
            commit_s=phase["commit"],
            message_s=0.0,
            verify_s=self.verify_s,
            verdict_s=self.verdict_s,
            at_work=self.at_work,
        )

    def world(self, config: Config, homes: dict[str, str], draw: Callable[[int, int], Sequence[SimRequest]]) -> World:
        """A cluster with these constants; a device is a GPU."""
        return World(
            config=config, homes=homes, gpus_per_device=1, engines_per_device=1, step=self.step,
            kv_capacity_tokens=self.kv_tokens or UNBOUNDED_TOKENS, draw=draw, times=self.times(),
            network=_Measured(self.phases["sync"]), weight_bytes=1, figures_s=FIGURES_S, decision_s=0.0,
        )  # fmt: skip



class _Measured:
    """New weights take what they took; everything else is in the other constants."""

    def __init__(self, sync_s: float):
        self._sync_s = sync_s

    def seconds(self, op: str, group: Sequence[int], num_bytes: int) -> float:
        return self._sync_s if op == "broadcast" else 0.0


def fit(lines: Sequence[Line], moving: Sequence[Line] | None = None) -> Calibration:
    """Constants from these lines of a trace, but for verdicts. moving: the lines from which changes of roles are taken,
    which some policies never make; default `lines`. Raises NoTrace where they lack something that every job has."""
    constants: list[Constant] = []
    step = _decode(lines, constants)
    stages = {role: _stage(lines, role, constants) for role in ("inference", "training")}
    phases = {
        "step": _mean("phase/step", [s for line in lines for s in line.step_s], constants),
        "sync": _mean("phase/sync", [line.sync_s for line in lines], constants),
    }
    moves, at_work = _moves(lines if moving is None else moving, constants)
    return Calibration(step, stages, phases | moves, max(line.kv_tokens for line in lines), constants, at_work)


def named(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Lines of a trace by candidate or policy."""
    found: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        found[line.candidate or line.policy].append(line)
    return found


def warm(lines: Sequence[Line]) -> list[Line]:
    """Without those in which a benchmark does something for the first time, which it does not count: it begins with each
    policy that moves nodes."""
    seen: set[str] = set()
    found = []
    for line in lines:
        if not line.candidate or line.policy == "static" or line.policy in seen:
            found.append(line)
        seen.add(line.policy)
    return found


def requests(line: Line) -> list[SimRequest]:
    """The answers of an iteration as they were. What tools wrote and how long they took is shared evenly by the calls."""
    found = []
    for sample, prompt, tokens, masked, calls, tool_s, _ in line.answers:
        written = tokens - masked
        shares, results = _even(written, calls + 1), _even(masked, calls)
        tool_ns = round(tool_s * NS_PER_S / calls) if calls else 0
        turns = [Turn(share, tool_ns, result) for share, result in zip(shares, results)] + [Turn(shares[-1])]
        found.append(SimRequest(sample, prompt, tuple(turns)))
    # In the order in which the controller has them: group by group.
    return sorted(found, key=lambda request: tuple(map(int, request.sample.split(":"))))


def renamed(answers: Iterable[SimRequest], iteration: int) -> list[SimRequest]:
    """As samples of another iteration."""
    return [each._replace(sample=f"{iteration}:{each.sample.partition(':')[2]}") for each in answers]


def _even(total: int, parts: int) -> list[int]:
    """
    >>> _even(7, 3), _even(5, 0)
    ([3, 2, 2], [])
    """
    return [total // parts + (index < total % parts) for index in range(parts)]


# --- fits


def _decode(lines: Sequence[Line], constants: list[Constant]) -> StepModel:
    rows = np.array([row[1:] for line in lines for row in line.decode], float).reshape(-1, 4)
    rows = rows[rows[:, 3] > 0]
    if not len(rows):
        raise NoTrace("no engine reported its load while it decoded: the iterations were too short to fit a step time to")
    prefills = rows[:, 2].sum() >= TELLING * rows[:, 1].sum()
    features = rows[:, : 3 if prefills else 2]
    # Sums of many intervals: their variance grows with the time that they should have taken. Weights by the time that they
    # did take would favour those that chance made short.
    expected_s = rows[:, 0]
    for _ in range(REWEIGHTED):
        weight = 1.0 / np.sqrt(expected_s)
        values, errors = _least_squares(features * weight[:, None], rows[:, 3] * weight)
        expected_s = np.maximum(features @ values, 1e-9)
    for name, value, error in zip(("fixed", "per_request", "prefill_token"), values, errors):
        constants.append(Constant(f"decode/{name}", value, "s", error))
    fixed_s, per_request_s, *prefill_s = values
    return StepModel(max(fixed_s, 1e-9), per_request_s, 0.0, prefill_token_s=prefill_s[0] if prefills else per_request_s)


def _stage(lines: Sequence[Line], role: str, constants: list[Constant]) -> tuple[float, float]:
    leases = np.array([[tokens, s] for line in lines for name, tokens, s in line.leases if name == role], float)
    if not len(leases):
        return 0.0, 0.0  # a job without this stage
    features = np.stack([np.ones(len(leases)), leases[:, 0]], axis=1)
    (fixed_s, per_token_s), errors = _least_squares(features, leases[:, 1])
    constants.append(Constant(f"{role}/fixed", fixed_s, "s", errors[0]))
    constants.append(Constant(f"{role}/per_token", per_token_s, "s", errors[1]))
    return fixed_s, per_token_s


def _moves(lines: Sequence[Line], constants: list[Constant]) -> tuple[dict[str, float], float]:
    """Phases of a change of roles between nodes without work, and how many times as long orders take on nodes that have
    some. Only where all nodes change at once is it certain that none has."""
    idle, working = (
        [each for line in lines if (line.policy == "colocated") == at_once for each in line.switches]
        for at_once in (True, False)
    )
    found = {}
    for name, phases in ORDERS.items():
        found[name] = _mean(f"phase/{name}", _phase_s(idle or working, phases), constants)
    found["transfer"] = _mean("phase/transfer", _phase_s(idle + working, ("transfer",)), constants)
    # Groups that were finished first are simulated as such: what is left is the time of a node that had none.
    drains = sorted(_phase_s(idle + working, ("drain",)))
    found["drain"] = _mean("phase/drain", drains[: len(drains) // 4 + 1], constants)
    orders = [phase for phases in ORDERS.values() for phase in phases]
    slow, fast = (_phase_s(switches, orders) for switches in (working, idle))
    if not slow or not fast:
        return found, 1.0
    at_work = max(1.0, statistics.fmean(slow) / max(statistics.fmean(fast), 1e-9))
    constants.append(Constant("phase/at_work", at_work, "", None))
    return found, at_work


def _phase_s(switches: Sequence[Mapping[str, float]], phases: Iterable[str]) -> list[float]:
    return [1e-3 * each[f"{phase}_ms"] for phase in phases for each in switches if f"{phase}_ms" in each]


def _mean(name: str, values: Sequence[float], constants: list[Constant]) -> float:
    """0 where there are none."""
    if not values:
        return 0.0
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    constants.append(Constant(name, mean := statistics.fmean(values), "s", error))
    return mean


def _least_squares(features: np.ndarray, target: np.ndarray) -> tuple[list[float], list[float | None]]:
    """Coefficients, none below zero, and their standard errors: what would be negative is left out, the worst first."""
    used = [index for index in range(features.shape[1]) if features[:, index].any()]
    while True:
        part = features[:, used]
        values = np.linalg.lstsq(part, target, rcond=None)[0]
        if not len(used) or values.min() >= 0:
            break
        scale = values * np.abs(part).mean(axis=0)
        del used[int(scale.argmin())]
    freedom = len(target) - len(used)
    errors: list[float | None] = [None] * features.shape[1]
    if freedom > 0:
        variance = float(((part @ values - target) ** 2).sum()) / freedom
        spread = np.sqrt(np.maximum(np.diag(np.linalg.pinv(part.T @ part)) * variance, 0.0))
        for index, error in zip(used, spread):
            errors[index] = float(error)
    found = [0.0] * features.shape[1]
    for index, value in zip(used, values):
        found[index] = float(value)
    return found, errors
