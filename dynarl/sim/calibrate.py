"""The constants of a simulated cluster from the trace of a real run, each with its error; and that run as a scenario.

Fitted by least squares, never below zero, with standard errors (`controller.trace` says what a trace has):

    decode     seconds = fixed * steps + per_request * tokens + prefill_token * prefilled      of one engine, by load
    stages     node-seconds = fixed + per_token * tokens                                       of one group
    phases     medians of the phases of moves, of the optimizer step, of new weights to all nodes

Times are seen from the controller, messages included, so messages take no time of their own here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from dynarl import rundir
from dynarl.config import load
from dynarl.config.schema import Config, Split
from dynarl.controller.nodes import assign_homes
from dynarl.controller.trace import Line
from dynarl.errors import ConfigError, DynarlError
from dynarl.lines import LineReader
from dynarl.perf.rollout import StepModel
from dynarl.scheduler.allocations import shares
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
POLICIES = ("static", "colocated", "threshold", "adaptive")


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
    phases: seconds by name."""

    step: StepModel
    stages: Mapping[str, tuple[float, float]]
    phases: Mapping[str, float]
    kv_tokens: int
    constants: Sequence[Constant]

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
            verify_s=0.0,
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


def fit(lines: Sequence[Line]) -> Calibration:
    """Constants from these lines of a trace. Raises NoTrace where they lack something that every job has."""
    constants: list[Constant] = []
    step = _decode(lines, constants)
    stages = {role: _stage(lines, role, constants) for role in ("inference", "training")}
    phases = _phases(lines, constants)
    return Calibration(step, stages, phases, max(line.kv_tokens for line in lines), constants)


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


def _phases(lines: Sequence[Line], constants: list[Constant]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {"step": [], "sync": []}
    for line in lines:
        seconds["step"] += line.step_s
        seconds["sync"].append(line.sync_s)
    for name in ("prepare", "vote", "drain", "transfer", "commit"):
        seconds[name] = [1e-3 * each[f"{name}_ms"] for line in lines for each in line.switches if f"{name}_ms" in each]
    # Groups that were finished first are simulated as such: what is left is the time of a node that had none.
    seconds["drain"] = sorted(seconds["drain"])[: len(seconds["drain"]) // 4 + 1]
    found = {}
    for name, values in seconds.items():
        found[name] = statistics.median(values) if values else 0.0
        if values:
            constants.append(Constant(f"phase/{name}", found[name], "s", _median_error(values)))
    return found


def _median_error(values: Sequence[float]) -> float | None:
    """Standard error of a median, from the spread of the middle half (normal: sigma = IQR / 1.349)."""
    if len(values) < 4:
        return None
    low, _, high = statistics.quantiles(values, n=4)
    return 1.2533 * (high - low) / 1.349 / len(values) ** 0.5


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


# --- a recorded run as a scenario


class Recorded:
    """Iterations of a run again, one after another, under any policy and with any number of nodes; see `simulate`."""

    policies = POLICIES
    throughput_unit = "tokens/s"

    def __init__(self, name: str, config: Config, lines: Sequence[Line], calibration: Calibration):
        self.name, self._config, self._lines, self.calibration = name, config, lines, calibration
        self.split, self.num_nodes = config.split, config.cluster.nodes
        self.iterations = self.measured = len(lines)
        split = f"{self.split.rollout} rollout, {self.split.inference} inference, {self.split.training} training"
        self.about = f"{len(lines)} recorded iterations on {self.num_nodes} nodes: {split}"

    def world(self, policy: str) -> World:
        config = msgspec.structs.replace(self._config, policy=msgspec.structs.replace(self._config.policy, name=policy))
        names = [f"n{index + 1}" for index in range(self.num_nodes)]
        return self.calibration.world(config, assign_homes(config, names), self._draw)

    def slowed(self, role: str, factor: float) -> Recorded:
        """The same where work of this role takes `factor` times as long."""
        known = self.calibration
        if role == "rollout":
            off = replace(known, step=known.step.scaled(factor))
        else:
            fixed_s, per_token_s = known.stages[role]
            off = replace(known, stages={**known.stages, role: (fixed_s * factor, per_token_s * factor)})
        return Recorded(self.name, self._config, self._lines, off)

    def _draw(self, iteration: int, seed: int) -> list[SimRequest]:
        return renamed(requests(self._lines[iteration - 1]), iteration)


def renamed(answers: Iterable[SimRequest], iteration: int) -> list[SimRequest]:
    """As samples of another iteration."""
    return [each._replace(sample=f"{iteration}:{each.sample.partition(':')[2]}") for each in answers]


def recorded(run: Path, num_nodes: int | None = None, split: Split | None = None) -> Recorded:
    """A run as a scenario, with another split where one is given, else with its own, scaled to `num_nodes`. Raises
    NoTrace, ConfigError.
    """
    config = load.from_text(rundir.config(run).read_text()).config
    lines = [line for line in read(run) if line.answers]
    split = split or scaled(config.split, num_nodes or config.cluster.nodes)
    total = split.rollout + split.inference + split.training
    if num_nodes not in (None, total):
        raise ConfigError(f"a split of {total} nodes does not go with {num_nodes} nodes")
    cluster = msgspec.structs.replace(config.cluster, nodes=total)
    return Recorded(run.name, msgspec.structs.replace(config, cluster=cluster, split=split), lines, fit(lines))


def scaled(split: Split, num_nodes: int) -> Split:
    """The same parts of `num_nodes` nodes, by largest remainders; none loses its last node as long as there are enough.

    >>> scaled(Split(rollout=2, inference=1, training=1), 6)
    Split(rollout=3, inference=1, training=2)
    >>> scaled(Split(rollout=5, inference=1, training=2), 16)
    Split(rollout=10, inference=2, training=4)
    """
    roles = ("training", "rollout", "inference")
    return Split(**dict(zip(roles, shares(num_nodes, [getattr(split, role) for role in roles]), strict=True)))
