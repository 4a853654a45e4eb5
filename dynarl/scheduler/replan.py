"""When the stages of a job take something else than its plan says, and which split of the nodes suits what they take.

The law:
- Each iteration tells how long every stage worked, reckoned on the nodes that are its home. A plan is off when, in each
  of the last `window` iterations, one stage took more than `tolerance` more than planned, or less. One odd iteration
  changes nothing.
- The search that makes plans is asked again, with stages as they were measured (`placement`). Components stay side by
  side; how many nodes each has may change.
- The new split is worth it if what it saves until the end of the run is more than a change costs, and more than the
  forecast may be wrong by.

RLinf does so by a checkpoint and a new start (M2Flow, profiling at run time); here it happens between two iterations.
Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dynarl.scheduler.costs import StepTime
from dynarl.scheduler.placement.flow import Flow
from dynarl.scheduler.placement.plan import Alone, Execution, Node, SideBySide, leaves
from dynarl.scheduler.placement.search import chain, find_schedule
from dynarl.scheduler.placement.stage import Layout, evenly

# Least share of an iteration that a new split must save: forecasts from measured stages are about so far off.
LEAST_GAIN = 0.05


class Watch:
    """What was planned and what came. planned: seconds of each stage in an iteration, on its nodes; empty while there
    is no plan: then the first `window` iterations are the profile that the first one is made from.

    >>> watch = Watch({"rollout": 10.0, "training": 4.0}, tolerance=0.15, window=2)
    >>> for seconds in (4.1, 9.0, 8.0):
    ...     watch.note({"rollout": 10.5, "training": seconds})
    ...     print(watch.deviations())
    {}
    {}
    {'training': 1.125}
    """

    def __init__(self, planned: Mapping[str, float], tolerance: float, window: int):
        self.planned, self._tolerance = dict(planned), tolerance
        self._last: deque[dict[str, float]] = deque(maxlen=window)

    def note(self, seconds: Mapping[str, float]) -> None:
        """An iteration is over."""
        self._last.append(dict(seconds))

    def plan(self, planned: Mapping[str, float]) -> None:
        """Another plan counts from here on."""
        self.planned = dict(planned)
        self._last.clear()

    @property
    def is_full(self) -> bool:
        return len(self._last) == self._last.maxlen

    def measured(self) -> dict[str, float]:
        """Medians of the last iterations."""
        return {stage: float(np.median([each[stage] for each in self._last])) for stage in self._last[-1]}

    def deviations(self) -> dict[str, float]:
        """Stages that are off for good, and by how much: 0.2 is 20 % more than planned."""
        if not self.is_full:
            return {}
        found = {}
        for stage, planned in self.planned.items():
            if stage not in self._last[-1]:  # it has no nodes of its own
                continue
            shares = [each[stage] / planned - 1.0 if planned else float(each[stage] > 0) for each in self._last]
            if min(shares) > self._tolerance or max(shares) < -self._tolerance:
                found[stage] = float(np.median(shares))
        return found


class Seen(NamedTuple):
    """One iteration as the search needs it. seconds: of each stage on its nodes; nodes: of each stage; items: groups.

    requests, tokens, longest: of rollout; most: requests that a node decodes together; unit: nodes of a replica of the
    trainer; step_s: of the trainer's seconds, those of optimizer steps, which more nodes do not make fewer.
    """

    seconds: dict[str, float]
    nodes: dict[str, int]
    items: int
    requests: int
    tokens: int
    longest: int
    most: int
    unit: int = 1
    step_s: float = 0.0


class Spread:
    """A stage whose groups go to whichever of its nodes is free: n nodes are n times as fast, but for what is done once
    (`step_s`). A `Stage` of the search.
    """

    def __init__(self, name: str, seen: Seen):
        self._name, self._seen = name, seen
        training = name == "training"
        self._unit = seen.unit if training else 1
        self._once_s = min(seen.step_s, seen.seconds[name]) if training else 0.0

    def seconds(self, devices: np.ndarray, items: float, shared: bool) -> np.ndarray:
        share = items / self._seen.items
        replicas = np.asarray(devices) // self._unit
        work_s = (self._seen.seconds[self._name] - self._once_s) * (self._seen.nodes[self._name] // self._unit)
        with np.errstate(divide="ignore"):
            return share * (self._once_s + np.where(replicas > 0, work_s / np.maximum(replicas, 1), np.inf))

    def release(self, devices: np.ndarray, items: float, shared: bool, points: int) -> np.ndarray:
        return evenly(self.seconds(devices, items, shared), points)

    def sizes(self, num_devices: int) -> np.ndarray:
        return np.empty(0, np.int64)

    def load_s(self, devices: np.ndarray) -> np.ndarray:
        return np.zeros(len(devices))

    def layout(self, devices: int, items: float, shared: bool) -> Layout:
        return Layout(devices, f"{devices // self._unit} x {self._unit} nodes")

    def why_not(self, devices: int) -> str:
        return f"{self._name} needs {self._unit} nodes, there are {devices}"


class Rollout(Spread):
    """Nodes decode side by side, as many requests as they are given and hold, at the pace of that many (`StepTime`),
    and the longest answer takes its time on however many nodes. Scaled to what was seen.
    """

    def __init__(self, seen: Seen, step: StepTime):
        super().__init__("rollout", seen)
        self._step, self._scale = step, 1.0
        nodes = np.array([seen.nodes["rollout"]])
        self._scale = seen.seconds["rollout"] / float(self.seconds(nodes, seen.items, False)[0])

    def seconds(self, devices: np.ndarray, items: float, shared: bool) -> np.ndarray:
        seen, step, share = self._seen, self._step, items / self._seen.items
        running = np.clip(share * seen.requests / devices, 1.0, seen.most)
        pace_s = step.fixed_s + step.per_request_s * running
        decoding_s = share * seen.tokens / devices / running * pace_s
        return self._scale * np.maximum(decoding_s, seen.longest * step.seconds(1))


@dataclass(frozen=True)
class Proposal:
    """nodes, seconds: of each stage, as proposed; now_s, then_s: of an iteration, with the split that is and with this.
    """

    nodes: dict[str, int]
    seconds: dict[str, float]
    now_s: float
    then_s: float

    @property
    def gain_s(self) -> float:
        return self.now_s - self.then_s

    def pays(self, iterations_left: int, cost_s: float) -> bool:
        return self.gain_s > LEAST_GAIN * self.now_s and self.gain_s * iterations_left > cost_s


def propose(seen: Seen, step: StepTime, chunks: Mapping[str, int]) -> Proposal:
    """The split that suits what was seen best. chunks: groups that a stage is offered together, by its name; 1 where it
    is not named. Raises ConfigError where no split fits.
    """
    names = [name for name in ("rollout", "inference", "training") if seen.nodes.get(name)]
    edges = frozenset((i, i + 1) for i in range(len(names) - 1))
    flow = Flow(tuple((name,) for name in names), edges)
    stages = [Rollout(seen, step) if name == "rollout" else Spread(name, seen) for name in names]
    num_nodes = sum(seen.nodes[name] for name in names)
    best = find_schedule(flow, stages, num_nodes, seen.items, mode="spatial")[0].plan
    given = {names[leaf.stage]: leaf.devices for leaf in leaves(best)}
    # What the search leaves idle, since it brings nothing there, generates: answers are the longest wait.
    given["rollout"] += num_nodes - sum(given.values())

    # Pieces of the batch as the search knows them: each number of pieces divides the next.
    most = {name: -(-seen.items // chunks.get(name, 1)) for name in names}
    pieces = {name: max(each for each in chain(seen.items) if each <= most[name]) for name in names}

    def seconds(nodes: Mapping[str, int]) -> float:
        return Execution(flow, stages, seen.items).run(_side_by_side(names, nodes, pieces))

    now_s, then_s = seconds(seen.nodes), seconds(given)
    if then_s >= now_s:
        given, then_s = {name: seen.nodes[name] for name in names}, now_s
    each = {
        name: float(stage.seconds(np.array([given[name]]), seen.items, False)[0])
        for name, stage in zip(names, stages, strict=True)
    }
    return Proposal(given, each, now_s, then_s)


def _side_by_side(names: Iterable[str], nodes: Mapping[str, int], pieces: Mapping[str, int]) -> Node:
    """The stages one beside the other."""
    tree: Node | None = None
    for number, name in enumerate(names):
        stage = Alone(number, nodes[name])
        tree = stage if tree is None else SideBySide(tree, stage, tree.devices + nodes[name], pieces[name])
    return tree
