"""From journal records to the hypergraph: one small function per event, everything else follows.

A run that goes back to a checkpoint forgets what it did after it: `resumed` does so for a later start of the controller
and for a restore inside one. A start without `resumed` begins at nothing again. Events that are not known here (of a
newer version) are counted and otherwise ignored; so are unknown fields. A record with a field of a wrong type is left
out, and noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dynarl.hypergraph import workflow
from dynarl.hypergraph.fields import wrong_in
from dynarl.hypergraph.graph import Epoch, Graph, Iteration, Move, Recut, Worker

MAX_FAULTS = 100

Record = dict[str, Any]


def fold(records: Iterable[Record], graph: Graph | None = None) -> Graph:
    """The graph after these records; with `graph`, that graph taken further (it is changed and returned)."""
    graph = Graph() if graph is None else graph
    for record in records:
        apply(graph, record)
    return graph


def apply(graph: Graph, record: Record) -> None:
    """Take in one record. What is wrong with it is noted in `graph.faults`."""
    graph.version = record["seq"]
    graph.last_t = record["t"]
    if wrong := wrong_in(record):
        return _fault(graph, f"{record['type']} was left out: {wrong}")
    handler = _HANDLERS.get(record["type"])
    if handler is None:
        graph.unknown_events[record["type"]] += 1
        return
    try:
        handler(graph, record)
    except KeyError as error:
        _fault(graph, f"{record['type']} has no field {error}")
    except (TypeError, ValueError, AttributeError) as error:  # written by another version
        _fault(graph, f"{record['type']} is not as it should be: {error}")


def _fault(graph: Graph, text: str) -> None:
    if len(graph.faults) < MAX_FAULTS:
        graph.faults.append(f"record {graph.version}: {text}")


# Starts and ends


def _run_started(graph: Graph, r: Record) -> None:
    _leave_roles(graph, r["t"], list(graph.roles))
    graph.run = r["run"]
    if isinstance(r.get("config"), dict):
        graph.config = r["config"]
    graph.job_id = str(r["job_id"]) if r.get("job_id") is not None else None
    graph.nodes = list(r.get("nodes") or [])
    graph.planned_iterations = r.get("iterations")
    graph.started_t = graph.started_t or r["t"]
    graph.ended, graph.ready = None, False
    graph.decision = graph.in_transit = graph.next_layout = None
    graph.must_rewind = graph.attempt > 0
    graph.attempt = r.get("attempt") or graph.attempt + 1
    if (name := graph.setting("algorithm", "workflow", workflow.DEFAULT)) not in workflow.names():
        _fault(graph, f"the workflow {name!r} is not known here; the graph is that of {workflow.DEFAULT}")


def _step_launched(graph: Graph, r: Record) -> None:
    """All agents of a new step are up (their records come before this one); nodes that are not in it are gone."""
    graph.step_nodes = list(r.get("nodes") or graph.homes)
    _leave_roles(graph, r["t"], [node for node in graph.roles if node not in graph.step_nodes])
    graph.epoch, graph.ready = 0, False
    graph.staged, graph.in_transit, graph.next_layout = {}, None, None


def _leave_roles(graph: Graph, t: float, nodes: list[str]) -> None:
    for node in nodes:
        graph.spans[node].append((t, None))
        del graph.roles[node], graph.homes[node]
        graph.ranks.pop(node, None)
        _forget_workers(graph, node)


def _forget_workers(graph: Graph, node: str) -> None:
    graph.workers = {key: worker for key, worker in graph.workers.items() if worker.node != node}


def _run_ended(graph: Graph, r: Record) -> None:
    graph.ended = {"state": r["state"], "reason": r.get("reason"), "exit_code": r.get("exit_code"), "t": r["t"]}
    for node in graph.roles:
        graph.spans[node].append((r["t"], None))


def _resumed(graph: Graph, r: Record) -> None:
    _rewind(graph, r["iteration"])
    graph.decision = graph.in_transit = graph.next_layout = None
    graph.resumes.append({"t": r["t"], "iteration": r["iteration"], "checkpoint": r.get("checkpoint")})


def _rewind(graph: Graph, iteration: int | None) -> None:
    """Forget what came after `iteration`, all of it if None."""

    def kept(number: int | None) -> bool:
        return iteration is not None and (number or 0) <= iteration

    graph.must_rewind = False
    graph.samples.rewind(iteration)
    graph.iterations = {number: each for number, each in graph.iterations.items() if kept(number)}
    graph.evaluations = [each for each in graph.evaluations if kept(each["iteration"])]
    graph.checkpoints = [each for each in graph.checkpoints if kept(each["iteration"])]
    graph.recuts = [each for each in graph.recuts if kept(each.iteration)]
    if iteration is None:
        graph.warm_start = None


def _begin_anew_unless_resumed(graph: Graph) -> None:
    if graph.must_rewind:
        _rewind(graph, None)


# Agents and workers


def _agent_up(graph: Graph, r: Record) -> None:
    if r["node"] in graph.homes:  # an agent that comes again
        _forget_workers(graph, r["node"])
    graph.homes[r["node"]] = r["home"]
    if "rank" in r:
        graph.ranks[r["node"]] = r["rank"]
    if r["node"] not in graph.nodes:
        graph.nodes.append(r["node"])
    _set_role(graph, r["node"], r["home"], r["t"])


def _set_role(graph: Graph, node: str, role: str, t: float) -> None:
    if role not in graph.workflow.roles:
        _fault(graph, f"node {node} got {role!r}, which is not one of {', '.join(graph.workflow.roles)}")
    if graph.roles.get(node) != role:
        spans = graph.spans.setdefault(node, [])
        if graph.newest_only:
            spans.clear()
        spans.append((t, role))
    graph.roles[node] = role


def _worker_up(graph: Graph, r: Record) -> None:
    key = (r["node"], r["role"], r["device"])
    graph.workers[key] = Worker(*key, attempt=r.get("attempt", 1))


def _worker_died(graph: Graph, r: Record) -> None:
    key = (r["node"], r["role"], r["device"])
    graph.workers[key] = Worker(*key, attempt=r.get("attempt", 1), state="died")
    graph.deaths.append({name: r.get(name) for name in ("t", "node", "role", "device", "status", "tail")})


# Epochs


def _moves(r: Record) -> list[Move]:
    return [Move(m["node"], m["source"], m["target"]) for m in r.get("moves") or []]


def _add_epoch(graph: Graph, epoch: Epoch) -> None:
    if graph.newest_only:
        graph.epochs.clear()
    graph.epochs.append(epoch)


def _epoch_proposed(graph: Graph, r: Record) -> None:
    _add_epoch(graph, Epoch(r["epoch"], _moves(r), r["t"], iteration=graph.iteration, reason=r.get("reason")))
    graph.last_number = max(graph.last_number, r["epoch"])


def _settle(graph: Graph, r: Record, state: str) -> Epoch:
    """The proposal that this record ends."""
    epoch = graph.epochs[-1] if graph.epochs else None
    if epoch is None or epoch.number != r["epoch"] or epoch.state != "proposed":
        _fault(graph, f"epoch {r['epoch']} {state} without having been proposed")
        epoch = Epoch(r["epoch"], _moves(r), iteration=graph.iteration)
        _add_epoch(graph, epoch)
    epoch.state, epoch.ended_t = state, r["t"]
    return epoch


def _epoch_committed(graph: Graph, r: Record) -> None:
    moves = _moves(r)
    # Without moves everybody is at home, at the start of a step and after a fault; nothing was proposed or voted on.
    if not moves:
        graph.homes |= r["roles"]
    else:
        _carried_out(graph, r, _settle(graph, r, "committed"), moves)
        _check_moves(graph, moves, r["roles"])
    graph.ready, graph.ready_t = True, graph.ready_t or r["t"]
    if r.get("live_requests") and "rollout" not in r["roles"].values():
        _fault(graph, f"epoch {r['epoch']} took the last rollout node while {r['live_requests']} requests were live")
    graph.epoch = r["epoch"]
    for node, role in r["roles"].items():
        _set_role(graph, node, role, r["t"])


def _role_switched(graph: Graph, r: Record) -> None:
    """A node has changed its role by itself: an epoch of its own, which nobody proposed and nobody voted on."""
    moves = _moves(r)
    epoch = Epoch(r["epoch"], moves, r["t"], "committed", r["t"], graph.iteration)
    _add_epoch(graph, epoch)
    _carried_out(graph, r, epoch, moves)
    _check_moves(graph, moves, {move.node: move.target for move in moves})
    graph.epoch, graph.last_number = r["epoch"], max(graph.last_number, r["epoch"])
    for move in moves:
        _set_role(graph, move.node, move.target, r["t"])


def _carried_out(graph: Graph, r: Record, epoch: Epoch, moves: list[Move]) -> None:
    epoch.moves, epoch.pause_ms, epoch.phases = moves, r.get("pause_ms"), dict(r.get("phases") or {})
    if epoch.number <= graph.epoch:
        _fault(graph, f"epoch {epoch.number} committed after epoch {graph.epoch}")
    if graph.iterations and any(move.target == "training" for move in moves):
        graph.iterations[graph.iteration].into_training = True


def _check_moves(graph: Graph, moves: list[Move], roles: dict[str, str]) -> None:
    targets: dict[str, str] = {}
    for move in moves:
        before = graph.roles.get(move.node)
        if move.node in targets and targets[move.node] != move.target:
            _fault(graph, f"node {move.node} moved to {targets[move.node]} and {move.target} at once")
        if before is not None and before != move.source:
            _fault(graph, f"node {move.node} left {move.source}, but its role was {before}")
        if roles.get(move.node) != move.target:
            _fault(graph, f"node {move.node} moved to {move.target}, but the new map says {roles.get(move.node)}")
        targets[move.node] = move.target
    for node, role in roles.items():
        if node not in targets and graph.roles.get(node, role) != role:
            _fault(graph, f"node {node} changed from {graph.roles[node]} to {role} without a move")


def _epoch_cancelled(graph: Graph, r: Record) -> None:
    _settle(graph, r, "cancelled").reason = r.get("reason")


# Learning


def _iteration_started(graph: Graph, r: Record) -> None:
    _begin_anew_unless_resumed(graph)
    earlier = graph.iterations.get(graph.iteration)
    if earlier is not None and earlier.num_steps and not earlier.finished:
        earlier.finished = True
        graph.samples.finish(earlier.number)
    number = r["iteration"]
    if number in graph.iterations:
        _fault(graph, f"iteration {number} started again without going back to a checkpoint")
    else:
        graph.iterations[number] = Iteration(number, r.get("version"), r["t"])
    graph.samples.start(number, r.get("samples") or [])


def _step_committed(graph: Graph, r: Record) -> None:
    number = r["iteration"]
    if number not in graph.iterations:
        _fault(graph, f"a step of iteration {number}, which was not started")
    if graph.roles and not graph.with_role("training"):
        _fault(graph, f"a step of iteration {number} while no node had the role training")
    iteration = graph.iterations.setdefault(number, Iteration(number))
    iteration.num_steps += 1
    iteration.ended_t = r["t"]
    iteration.stages |= r.get("stages") or {}
    iteration.finished = iteration.finished or iteration.num_steps >= graph.minibatches
    graph.samples.step(number, r.get("samples") or [], iteration.finished)


def _warm_start_done(graph: Graph, r: Record) -> None:
    _begin_anew_unless_resumed(graph)
    graph.warm_start = {"t": r["t"], "steps": r.get("steps"), "loss": r.get("loss")}


def _evaluated(graph: Graph, r: Record) -> None:
    _begin_anew_unless_resumed(graph)
    names = ("t", "when", "iteration", "accuracy", "size", "timeouts")
    graph.evaluations.append({name: r.get(name) for name in names})


def _checkpoint_saved(graph: Graph, r: Record) -> None:
    graph.checkpoints.append({"t": r["t"], "iteration": r["iteration"], "path": r.get("path")})


# Weights and decisions


def _weights_staging(graph: Graph, r: Record) -> None:
    graph.in_transit = r["version"]


def _weights_staged(graph: Graph, r: Record) -> None:
    graph.in_transit = None
    graph.staged |= dict.fromkeys(r["nodes"], r["version"])


def _decision(graph: Graph, r: Record) -> None:
    # Only the last one: a long run makes very many, and `dynarl explain` reads them from the journal.
    graph.decision = {"number": r["number"], "iteration": r["iteration"], "t": r["t"], "seen": r.get("seen") or {}}
    graph.last_number = max(graph.last_number, r["number"])


# The trainer's layout


def _layout_committed(graph: Graph, r: Record) -> None:
    graph.homes.update(r.get("home") or {})
    graph.next_layout = None
    graph.recuts.append(
        Recut(
            r["iteration"], r["layout"], "committed", r["t"],
            pause_ms=r.get("pause_ms"), num_bytes=r.get("bytes"), phases=r.get("phases") or {},
        )
    )


def _replanned(graph: Graph, r: Record) -> None:
    graph.homes.update(r.get("home") or {})


def _layout_proposed(graph: Graph, r: Record) -> None:
    graph.next_layout = r["layout"]


def _layout_cancelled(graph: Graph, r: Record) -> None:
    graph.next_layout = None
    graph.recuts.append(Recut(r["iteration"], r["layout"], "cancelled", r["t"], reason=r.get("reason")))


_HANDLERS: dict[str, Callable[[Graph, Record], None]] = {
    "run_started": _run_started,
    "step_launched": _step_launched,
    "run_ended": _run_ended,
    "resumed": _resumed,
    "agent_up": _agent_up,
    "worker_up": _worker_up,
    "worker_died": _worker_died,
    "epoch_proposed": _epoch_proposed,
    "epoch_committed": _epoch_committed,
    "epoch_cancelled": _epoch_cancelled,
    "role_switched": _role_switched,
    "iteration_started": _iteration_started,
    "step_committed": _step_committed,
    "warm_start_done": _warm_start_done,
    "evaluated": _evaluated,
    "checkpoint_saved": _checkpoint_saved,
    "weights_staging": _weights_staging,
    "weights_staged": _weights_staged,
    "decision": _decision,
    "layout_proposed": _layout_proposed,
    "layout_committed": _layout_committed,
    "layout_cancelled": _layout_cancelled,
    "replanned": _replanned,
    # For the story of the run only: `dynarl explain` tells it.
    **dict.fromkeys(
        ("decision_outcome", "epoch_refused", "worker_rebooted", "checkpoint_failed", "step_lost"),
        lambda graph, r: None,
    ),
}
