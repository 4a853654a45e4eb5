"""A job on simulated hardware, with the production controller: `simulate` a scenario, or `run` a world.

The controller's own `Rounds` runs its iterations, with its `Epochs`, `Trainer`, `Workers`, router, monitor and policy,
on an event loop of simulated time and a fleet of simulated nodes. Policies see what they would see of a real cluster,
but in the mode `oracle`, where the lengths of answers are known to them before they are written.

Same world, policy and seed: same event log, whose hash is part of the result. Every run is held against the books of
its samples at the end of each iteration.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from dynarl.config import degrees
from dynarl.controller.epochs import Epochs
from dynarl.controller.overhead import Overhead
from dynarl.controller.rounds import Rounds
from dynarl.controller.telemetry import Monitor
from dynarl.controller.training import Trainer
from dynarl.controller.workers import Workers
from dynarl.hypergraph.check import check
from dynarl.hypergraph.journal import SimulatedJournal
from dynarl.scheduler.policy import capabilities
from dynarl.sim.books import ConservationError, EventLog
from dynarl.sim.fleet import SimFleet
from dynarl.sim.loop import VirtualLoop
from dynarl.sim.oracle import OracleRouter, TrueLengths
from dynarl.sim.weights import SimStaging
from dynarl.sim.workload import SimRequest
from dynarl.sim.world import World

# Figures further apart than so many reports say nothing about a decode step.
REPORTS_APART = 4.0
# Names that the message of a stuck simulation has of each kind.
SHOWN = 5


@dataclass
class Iteration:
    """What one iteration came to. tokens: of prompts and responses; timeline: numbers of GPUs, seconds from its start;
    metrics: what a job writes for it."""

    number: int
    start_s: float
    makespan_s: float
    tokens: int
    samples: int
    timeline: list[dict[str, float]]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Run:
    """A simulated job. num_events: of its log; num_timers: of the loop; traces: lines of its `controller.trace`."""

    iterations: list[Iteration]
    events_sha256: str
    num_events: int
    num_timers: int
    traces: list[bytes]


class _Writer:
    """Keeps what a job would write as metrics."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.traces: list[bytes] = []

    def log(self, iteration: int, data: dict[str, float]) -> None:
        self.rows[iteration] = data

    def trace(self, line: bytes) -> None:
        self.traces.append(line)


class Scenario(Protocol):
    """A world for each policy. iterations: of the job; the last `measured` of them count."""

    iterations: int
    measured: int
    throughput_unit: str  # "tokens/s" or "requests/s"

    def world(self, policy: str) -> World: ...


def simulate(
    scenario: Scenario,
    policy: str,
    seed: int,
    *,
    oracle: bool = False,
    progress: Callable[[int, int], None] = lambda done, of: None,
    sink: Callable[[bytes], None] | None = None,
) -> dict[str, Any]:
    """What comes of a scenario under a policy; plain data for JSON. makespan_s and throughput are means over the
    measured iterations, the timeline is that of the last one. Raises what `run` raises."""
    world, iterations = scenario.world(policy), scenario.iterations
    done = run(world, seed, iterations=iterations, oracle=oracle, progress=progress, sink=sink)
    counted = done.iterations[-scenario.measured :]
    requests = scenario.throughput_unit == "requests/s"
    seconds = sum(iteration.makespan_s for iteration in counted)
    return {
        "policy": f"{policy}, oracle" if oracle else policy,
        "seed": seed,
        "makespan_s": seconds / len(counted),
        "throughput": sum(i.samples if requests else i.tokens for i in counted) / seconds,
        "throughput_unit": scenario.throughput_unit,
        "timeline": counted[-1].timeline,
        "iterations_s": [iteration.makespan_s for iteration in done.iterations],
        "metrics": counted[-1].metrics,
        "num_events": done.num_events,
        "events_sha256": done.events_sha256,
    }


def run(
    world: World,
    seed: int,
    *,
    iterations: int = 1,
    oracle: bool = False,
    progress: Callable[[int, int], None] = lambda done, of: None,
    sink: Callable[[bytes], None] | None = None,
) -> Run:
    """Run the iterations of a job one after another, on what the earlier ones taught. progress: is told (answers that
    are finished, of how many); sink: gets the lines of the event log, journal records among them.

    Raises StuckError, ConservationError, and what ends a real job.
    """
    with _less_collection(), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop: VirtualLoop = runner.get_loop()
        return runner.run(_Simulation(world, seed, loop, oracle, progress, sink).run(iterations))


@contextmanager
def _less_collection() -> Iterator[None]:
    """What a simulation makes lives long, and hardly any of it is in circles: looked through at the usual rate by the
    garbage collector it would take a sixth of the time."""
    usual = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


class _Simulation:
    def __init__(
        self,
        world: World,
        seed: int,
        loop: VirtualLoop,
        oracle: bool,
        progress: Callable[[int, int], None],
        sink: Callable[[bytes], None] | None,
    ):
        self.world, self.seed, self.loop, self.progress = world, seed, loop, progress
        self.oracle = oracle
        loop.explain = self._explain
        self.log = EventLog(lambda: loop.now_ns, sink)
        self.journal = SimulatedJournal(loop.time, self.log.line)

    async def run(self, iterations: int) -> Run:
        world, config, loop = self.world, self.world.config, self.loop
        decisions = itertools.count()
        monitor = Monitor(
            config,
            self.journal,
            clock=loop.time,
            stopwatch=lambda: next(decisions) * world.decision_s,
            figures_gap_s=REPORTS_APART * world.figures_s,
        )
        monitor.overhead = Overhead(loop.time)  # decisions take no simulated time of the controller
        self.fleet = SimFleet(world, loop, self.log)
        self.fleet.progress = self.progress
        if self.oracle:
            monitor.lengths = TrueLengths(config.algorithm.max_response_tokens, self.fleet)
        rounds = self.rounds = Rounds(config, world.homes, self.fleet, self.journal, _Writer(), monitor)
        rounds.lease_numbers = itertools.count(1)  # not those of the process: runs must not differ by what ran before
        if self.oracle:
            rounds.router = OracleRouter(config, monitor.lengths, monitor.figures_gap_s, self.fleet)
        rounds.may = capabilities(config.policy, world.homes)
        rounds.trainer = Trainer(config, self.fleet, world.homes, degrees.first(config.training))
        rounds.workers = Workers(rounds)
        self._introduce()
        rounds.epochs = Epochs(
            self.fleet, self.journal, world.homes, config.policy.vote_timeout_s, 0, config.failure.give_back_s
        )
        rounds.staging = SimStaging(rounds, self.fleet)
        rounds.settle()
        await rounds.trainer.join()
        await rounds.epochs.go_home()
        done = [await self._iterate(number) for number in range(1, iterations + 1)]
        return Run(done, self.log.sha256, self.log.num_events, loop.num_timers, rounds.writer.traces)

    def _introduce(self) -> None:
        """On record as the start of a real job has it, so that changes of roles are held against the rules."""
        world, append = self.world, self.journal.append
        append("run_started", run="simulated", config=msgspec.to_builtins(world.config), nodes=list(world.homes))
        for node, agent in self.fleet.agents.items():
            append("agent_up", node=node, rank=agent.rank, home=agent.home)
            for role in sorted(self.rounds.may[node]):
                for device in range(world.config.cluster.devices_per_node):
                    append("worker_up", node=node, role=role, device=device)
        append("step_launched", nodes=sorted(world.homes))

    async def _iterate(self, number: int) -> Iteration:
        rounds, fleet = self.rounds, self.fleet
        requests: Sequence[SimRequest] = self.world.draw(number, self.seed)
        fleet.begin(number, requests, any("inference" in may for may in rounds.may.values()))
        began_s = self.loop.time()
        await self._unless_faulty(rounds.iterate(number, samples=[request.sample for request in requests]))
        fleet.close()
        tokens, metrics = sum(request.total_tokens for request in requests), rounds.writer.rows[number]
        broken = check(self.journal.graph)
        if metrics["perf/total_num_tokens"] != tokens:
            broken.append(f"the controller counted {metrics['perf/total_num_tokens']} tokens, there are {tokens}")
        if broken:
            raise ConservationError("; ".join(broken))
        seconds = self.loop.time() - began_s
        intervals = fleet.timeline.intervals(self.loop.now_ns)
        return Iteration(number, began_s, seconds, tokens, len(requests), intervals, metrics)

    async def _unless_faulty(self, work: Any) -> None:
        """Until the work is done, or a fault ends the job."""
        body = asyncio.ensure_future(work)
        fault = asyncio.ensure_future(self.rounds.workers.faults.get())
        await asyncio.wait({body, fault}, return_when=asyncio.FIRST_COMPLETED)
        if not body.done():
            body.cancel()
            raise fault.result()
        fault.cancel()
        body.result()

    # --- when it cannot go on

    def _explain(self) -> str:
        """What waits for what."""
        rounds, fleet = self.rounds, self.fleet
        found = []
        if (stage := rounds.stage) is not None:
            ledger, states = stage.ledger, Counter(group.state for group in stage.ledger.groups.values())
            found += [f"{number} groups {state}" for state, number in sorted(states.items())]
            waiting = _some(ledger.waiting(SHOWN), ledger.num_waiting)
            found += [f"{ledger.num_waiting} requests wait for a node: {waiting}"]
            running = [f"{sample} on {node}" for sample, node in ledger.running.items()]
            found += [f"{len(running)} run: {_some(running, len(running))}"]
            leases = [f"{lease} ({role} on {', '.join(r.nodes)})" for lease, (role, r) in stage.leases.at.items()]
            found += [f"{len(leases)} leases are out: {_some(leases, len(leases))}"]
        for epoch in self.journal.graph.epochs:
            if epoch.state == "proposed":
                moves = [f"{move.node} to {move.target}" for move in epoch.moves]
                found += [f"epoch {epoch.number} is open: {_some(moves, len(moves))}"]
        found += [f"{node} has no {role} worker" for node, role in sorted(rounds.workers.down)]
        roles = Counter(rounds.epochs.roles.values())
        found += ["roles: " + ", ".join(f"{number} {role}" for role, number in sorted(roles.items()))]
        at_tool = sum(len(node.rollout.at_tool) for node in fleet.nodes.values())
        seats = [seat for node in fleet.nodes.values() for seat in node.rollout.seats]
        engines = sum(seat.engine.running + seat.engine.waiting for seat in seats)
        return "; ".join([*found, f"{engines} requests are in engines, {at_tool} at tools"])


def _some(names: Sequence[str], number: int) -> str:
    """
    >>> _some(["a", "b"], 2), _some([], 0)
    ('a, b', 'none')
    """
    return ", ".join(names[:SHOWN]) + (" ..." if number > SHOWN else "") or "none"
