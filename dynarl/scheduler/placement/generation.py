"""Cost of rollout on any number of devices: how long the batch takes, and when which share of the groups is complete.

All requests of an engine run at once as far as its KV memory and `max_running` allow; the rest queue. While some queue,
the engine is full and works at its best pace (the knee: more engines then help in proportion). After that the batch
melts away, answer by answer, and the last ones set the end however many engines there are:

    seconds = queued * mean / running * step(running) + integral over length of step(batch * survival)

Forms of a step, of KV memory: dynarl/perf/rollout.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dynarl.errors import ConfigError
from dynarl.perf.device import Device
from dynarl.perf.model import ModelCost
from dynarl.perf.rollout import StepModel, kv_capacity_tokens
from dynarl.scheduler.placement.lengths import LEVELS, Lengths
from dynarl.scheduler.placement.stage import Layout

# Points of the curve that a pace is read from.
CURVE = 64
DEGREES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Engine:
    """Rollout instances of one size. slots: requests that one decodes together, alone on its devices and shared."""

    tp: int
    step: StepModel
    slots: tuple[int, int]


@dataclass(frozen=True)
class Generation:
    """A stage of rollout; items are groups. kv_fraction: of a device's memory that an engine may use.

    residue_bytes: what other roles leave on a device while they sleep, where it is shared; max_running: alone and
    shared; tool_workers: calls that a node's CPUs run at a time.
    """

    device: Device
    model: ModelCost
    lengths: Lengths
    group_size: int
    max_running: tuple[int, int] = (256, 256)
    kv_fraction: float = 0.85
    residue_bytes: float = 0.0
    degrees: tuple[int, ...] = DEGREES
    tool_workers: int = 64
    engines: list[Engine] = field(init=False)
    faults: list[str] = field(init=False)

    def __post_init__(self) -> None:
        engines, faults = [], []
        for tp in self.degrees:
            if tp > self.device.devices_per_node:
                continue
            try:
                step = StepModel.of(self.device, self.model, tp)
                slots = self._slots(tp, False), self._slots(tp, True)
            except ConfigError as error:
                faults.append(str(error))
                continue
            if slots[0]:
                engines.append(Engine(tp, step, slots))
            else:
                kv = kv_capacity_tokens(self.device, self.model, tp, self.kv_fraction)
                faults.append(f"tp={tp}: KV memory for {kv} tokens < one sequence of {self.lengths.longest}")
        object.__setattr__(self, "engines", engines)
        object.__setattr__(self, "faults", faults)

    def _slots(self, tp: int, shared: bool) -> int:
        """Requests that fit at once; 0 where not even one of the longest does."""
        residue_bytes = self.residue_bytes if shared else 0.0
        fraction = self.kv_fraction - residue_bytes / self.device.memory_bytes
        try:
            tokens = kv_capacity_tokens(self.device, self.model, tp, fraction)
        except ConfigError:
            if residue_bytes:
                return 0
            raise
        return (
            min(self.max_running[shared], int(tokens / self.lengths.mean_context))
            if tokens >= self.lengths.longest
            else 0
        )

    def sizes(self, num_devices: int) -> np.ndarray:
        return np.empty(0, np.int64)

    def seconds(self, devices: np.ndarray, items: float, shared: bool) -> np.ndarray:
        return self._curves(np.asarray(devices), items, shared)[:, :, -1].min(axis=0, initial=np.inf)

    def release(self, devices: np.ndarray, items: float, shared: bool, points: int) -> np.ndarray:
        curves = self._curves(np.asarray(devices), items, shared)
        if not len(curves):
            return np.full((len(devices), points), np.inf)
        best = curves[curves[:, :, -1].argmin(axis=0), np.arange(len(devices))]
        at = np.arange(1, points + 1) / points * CURVE
        low = np.minimum(at.astype(int), CURVE - 1)
        with np.errstate(invalid="ignore"):
            return np.where(
                np.isfinite(best[:, -1:]), best[:, low] + (best[:, low + 1] - best[:, low]) * (at - low), np.inf
            )

    def _curves(self, devices: np.ndarray, items: float, shared: bool) -> np.ndarray:
        """[engines, D, CURVE + 1]: seconds until each share of the groups is complete."""
        found = [self._curve(engine, devices // engine.tp, items * self.group_size, shared) for engine in self.engines]
        return np.array(found).reshape(len(found), len(devices), CURVE + 1)

    def _curve(self, engine: Engine, instances: np.ndarray, requests: float, shared: bool) -> np.ndarray:
        slots, tokens, mean = engine.slots[shared], self.lengths.tokens, self.lengths.mean
        if not slots:
            return np.full((len(instances), CURVE + 1), np.inf)
        # No more instances at work than there are requests.
        batch = requests / np.minimum(np.maximum(instances, 1), max(1.0, requests))
        running = np.minimum(batch, slots)
        queued = batch - running
        # Those that run when the queue is empty are on average half done, the more so the longer it lasted.
        worn = np.minimum(1.0, queued / slots)[:, None]
        residual = 1 - np.concatenate([[0.0], np.cumsum((LEVELS[1:] + LEVELS[:-1]) / 2 * np.diff(tokens))]) / mean
        survival = (1 - worn) * LEVELS + worn * np.maximum(residual, 0.0)
        # The last request of all: whoever is left when less than one is expected to be.
        last = survival * (running * np.maximum(instances, 1))[:, None] >= 0.5
        alive = np.maximum(running[:, None] * (survival[:, 1:] + survival[:, :-1]) / 2, 1.0)
        context = self.lengths.prompt + (tokens[1:] + tokens[:-1]) / 2 * (1 + self.lengths.tool_share)
        step = self._step(engine.step, alive, context)
        melting = np.concatenate(
            [np.zeros((len(batch), 1)), np.cumsum(step * np.diff(tokens) * last[:, :-1], axis=1)], axis=1
        )
        full_step = self._step(engine.step, running[:, None], np.array([self.lengths.mean_context]))[:, 0]
        draining = queued * mean / running * full_step
        prefill = self._prefill(engine.step, batch)
        # Share of groups complete at each level of length: their longest answer is.
        complete = (1 - LEVELS) ** self.lengths.group_size_effective(self.group_size)
        complete[-1] = 1.0
        share = np.arange(CURVE + 1) / CURVE
        early = (queued / batch)[:, None]
        left = np.clip((share - early) / (1 - early), 0.0, 1.0)
        # The first group is complete when its longest answer is, however many wait.
        typical = np.interp(0.5, complete, tokens)
        first = np.minimum(full_step * typical, draining)[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            progress = np.where(early > 0, np.minimum(share / early, 1.0), 0.0)
        curve = first + (draining[:, None] - first) * progress + _read(melting, complete, left)
        curve += prefill[:, None] * (0.5 + 0.5 * share)
        curve = np.maximum(curve, self._tool_s(engine, instances, requests)[:, None] * share)
        return np.where(instances[:, None] > 0, curve, np.inf)

    def _step(self, step: StepModel, batch: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Seconds for one token of each of `batch` requests [D, L] at a context [L]; with the time at tools."""
        waiting_s = (self.lengths.turns - 1) * self.lengths.tool_s / self.lengths.mean
        seconds = _step(step, batch, context)
        if not waiting_s:
            return seconds
        # Requests at a tool are not in the batch: their share is waiting / (waiting + step), in two rounds.
        for _ in range(2):
            seconds = _step(step, batch * seconds / (seconds + waiting_s), context)
        return seconds + waiting_s

    def _prefill(self, step: StepModel, batch: np.ndarray) -> np.ndarray:
        """Prompts once for a group, and what tools say for each request."""
        prompts = batch / self.group_size * self.lengths.prompt
        results = batch * (self.lengths.turns - 1) * self.lengths.tool_tokens
        pairs = prompts * self.lengths.prompt / 2 + results * self.lengths.mean_context
        return (prompts + results) * (step.compute_s + step.prefill_token_s) + pairs * step.prefill_pair_s

    def _tool_s(self, engine: Engine, instances: np.ndarray, requests: float) -> np.ndarray:
        """Seconds that the nodes' CPUs need for all calls."""
        calls_s = requests * (self.lengths.turns - 1) * self.lengths.tool_s
        nodes = np.maximum(instances * engine.tp / self.device.devices_per_node, 1 / self.device.devices_per_node)
        return calls_s / (self.tool_workers * nodes)

    def load_s(self, devices: np.ndarray) -> np.ndarray:
        """Weights in; KV memory is only given back."""
        tp = min((engine.tp for engine in self.engines), default=1)
        return np.full(len(devices), self.model.weight_bytes / tp / self.device.host_bytes_per_s)

    def layout(self, devices: int, items: float, shared: bool) -> Layout:
        ends = self._curves(np.array([devices]), items, shared)[:, 0, -1]
        engine = self.engines[int(ends.argmin())]
        instances = devices // engine.tp
        text = f"tp={engine.tp} x {instances}, {engine.slots[shared]} at a time each"
        weights = self.model.weight_bytes / engine.tp
        kv = self.kv_fraction * self.device.memory_bytes - weights - (self.residue_bytes if shared else 0.0)
        memory = {"weights": weights, "KV": kv} | ({"asleep": self.residue_bytes} if shared else {})
        return Layout(instances * engine.tp, text, {"tp": engine.tp, "dp": instances}, memory)

    def why_not(self, devices: int) -> str:
        fitting = [engine.tp for engine in self.engines if engine.tp <= devices]
        if self.engines and not fitting:
            return f"an instance needs {min(e.tp for e in self.engines)} devices, there are {devices}"
        return "; ".join(self.faults) or f"KV memory is short on {devices} devices"


def _step(step: StepModel, batch: np.ndarray, context: np.ndarray) -> np.ndarray:
    touched = 1 - (1 - step.expert_share) ** batch if step.expert_share else 0.0
    work = np.maximum(step.read_s + step.expert_read_s * touched, step.compute_s * batch)
    return step.fixed_s + work + step.per_request_s * batch + step.per_kv_token_s * batch * context


def _read(melting: np.ndarray, complete: np.ndarray, share: np.ndarray) -> np.ndarray:
    """`melting` [D, L] where `complete` [L] reaches `share` [D, P]: [D, P]."""
    high = np.clip(np.searchsorted(complete, share), 1, len(complete) - 1)
    low = high - 1
    width = np.maximum(complete[high] - complete[low], 1e-12)
    weight = np.clip((share - complete[low]) / width, 0.0, 1.0)
    rows = np.arange(len(melting))[:, None]
    return melting[rows, low] + (melting[rows, high] - melting[rows, low]) * weight
