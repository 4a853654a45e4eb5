"""What is known of a job at one position in its journal.

A `Graph` holds the facts. `fold.py` makes it from journal records, `edges.py` reads vertices and hyperedges off it,
`queries.py` answers questions about it, `check.py` names the rules it breaks.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dynarl.hypergraph import workflow
from dynarl.hypergraph.samples import SampleCount
from dynarl.hypergraph.workflow import Workflow


class Move(NamedTuple):
    """One node that changes role."""

    node: str
    source: str
    target: str


@dataclass
class Epoch:
    """One proposed change of roles and what became of it. `state`: proposed, committed or cancelled."""

    number: int
    moves: list[Move]
    proposed_t: float | None = None
    state: str = "proposed"
    ended_t: float | None = None
    iteration: int | None = None
    reason: str | None = None
    pause_ms: float | None = None
    phases: dict[str, float] = field(default_factory=dict)


@dataclass
class Iteration:
    number: int
    version: int | None = None
    started_t: float | None = None
    ended_t: float | None = None
    num_steps: int = 0
    finished: bool = False
    into_training: bool = False
    # Component: seconds from the start of the iteration to the end of the last thing that it did, as far as steps say.
    stages: dict[str, float] = field(default_factory=dict)


@dataclass
class Recut:
    """A change of the trainer's layout at the start of an iteration. `state`: committed or cancelled."""

    iteration: int
    layout: str
    state: str
    t: float
    reason: str | None = None
    pause_ms: float | None = None
    num_bytes: int | None = None
    phases: dict[str, float] = field(default_factory=dict)


@dataclass
class Worker:
    """One role process. `state`: up or died."""

    node: str
    role: str
    device: int
    attempt: int = 1
    state: str = "up"


@dataclass
class Graph:
    """The job after the journal record number `version`. Times are unix seconds.

    nodes: of the allocation; step_nodes: those of the running step; homes, roles, ranks: home, active role and MPI rank
    of each node whose agent is up; ready: the step has loaded its models; ready_t: when the first step had; spans: for
    each node the (time, role) of every change, role None while it has none; staged: newest version of the weights on
    each node; in_transit: the version that is on its way to them; next_layout: that the trainer is changing to;
    decision: the last one of the scheduler; last_number: the highest that an epoch or a decision had, from which later
    starts of the controller count on; faults: rules found broken by the records. newest_only: of `spans` and `epochs`
    only the last one is kept, for a writer that lives as long as the job.
    """

    newest_only: bool = False
    version: int = 0
    run: str | None = None
    job_id: str | None = None
    attempt: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    planned_iterations: int | None = None
    nodes: list[str] = field(default_factory=list)
    step_nodes: list[str] = field(default_factory=list)
    started_t: float | None = None
    ready_t: float | None = None
    ready: bool = False
    last_t: float | None = None
    ended: dict[str, Any] | None = None

    epoch: int = 0
    homes: dict[str, str] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    spans: dict[str, list[tuple[float, str | None]]] = field(default_factory=dict)
    workers: dict[tuple[str, str, int], Worker] = field(default_factory=dict)
    epochs: list[Epoch] = field(default_factory=list)

    iterations: dict[int, Iteration] = field(default_factory=dict)
    samples: SampleCount = field(default_factory=SampleCount)
    recuts: list[Recut] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    warm_start: dict[str, Any] | None = None
    deaths: list[dict[str, Any]] = field(default_factory=list)
    resumes: list[dict[str, Any]] = field(default_factory=list)
    must_rewind: bool = False
    staged: dict[str, int] = field(default_factory=dict)
    in_transit: int | None = None
    next_layout: str | None = None
    decision: dict[str, Any] | None = None
    last_number: int = 0

    faults: list[str] = field(default_factory=list)
    unknown_events: Counter[str] = field(default_factory=Counter)

    # Facts of the job

    def setting(self, section: str, key: str, default: Any = None) -> Any:
        """A value of the job's configuration as the journal has it."""
        return (self.config.get(section) or {}).get(key, default)

    @property
    def workflow(self) -> Workflow:
        """The declaration that the job follows; one that is not known here was noted as a fault."""
        name = self.setting("algorithm", "workflow", workflow.DEFAULT)
        return workflow.declared(name if name in workflow.names() else workflow.DEFAULT)

    @property
    def layout(self) -> str:
        """Degrees of the trainer's layout, as `tp=2,pp=1`."""
        committed = [recut.layout for recut in self.recuts if recut.state == "committed"]
        if committed:
            return committed[-1]
        return f"tp={self.setting('training', 'tp', 1)},pp={self.setting('training', 'pp', 1)}"

    @property
    def replica_size(self) -> int:
        """Devices that train one lease together: tp x pp, times ep where experts are spread over replicas."""
        return math.prod(int(size) for size in re.findall(r"\b[tpe]p\s*=\s*(\d+)", self.layout))

    @property
    def devices_per_node(self) -> int:
        return self.setting("cluster", "devices_per_node", 1)

    @property
    def num_iterations(self) -> int | None:
        """Iterations the job is to run, None if unknown."""
        return self.setting("run", "iterations") if self.planned_iterations is None else self.planned_iterations

    @property
    def minibatches(self) -> int:
        return self.setting("algorithm", "minibatches", 1)

    @property
    def iteration(self) -> int | None:
        """The iteration started last."""
        return next(reversed(self.iterations), None)

    @property
    def num_finished(self) -> int:
        return sum(iteration.finished for iteration in self.iterations.values())

    @property
    def weights_version(self) -> int | None:
        """Version of the weights that the running iteration uses."""
        return self.iterations[self.iteration].version if self.iterations else None

    def with_role(self, role: str) -> list[str]:
        """Nodes whose active role is `role`."""
        return [node for node, active in self.roles.items() if active == role]

    @property
    def owners(self) -> list[str]:
        """Nodes that hold optimizer state: those whose home is training."""
        return [node for node, home in self.homes.items() if home == "training"]

    # Moves

    @property
    def committed(self) -> list[Epoch]:
        """Epochs in which at least one node moved."""
        return [epoch for epoch in self.epochs if epoch.state == "committed" and epoch.moves]

    @property
    def cancelled(self) -> list[Epoch]:
        return [epoch for epoch in self.epochs if epoch.state == "cancelled"]

    @property
    def median_pause_ms(self) -> float | None:
        pauses = [epoch.pause_ms for epoch in self.committed if epoch.pause_ms is not None]
        return statistics.median(pauses) if pauses else None

    def median_phases_ms(self) -> dict[str, float]:
        """Median over committed moves of each phase, keys as in the journal (`drain_ms`, ...)."""
        names = dict.fromkeys(name for epoch in self.committed for name in epoch.phases)
        return {n: statistics.median(e.phases[n] for e in self.committed if n in e.phases) for n in names}

    @property
    def into_training_iterations(self) -> int:
        """Finished iterations in which at least one node moved into training."""
        return sum(iteration.into_training and iteration.finished for iteration in self.iterations.values())
