"""What `dynarl status` says, as data. Unknown values are None."""

from __future__ import annotations

from typing import Any

from dynarl import rundir
from dynarl.hypergraph.check import check
from dynarl.hypergraph.graph import Graph
from dynarl.report.run import RunView, State
from dynarl.report.units import iso_time


def summary(view: RunView, state: State, now: float) -> dict[str, Any]:
    """The JSON of `dynarl status`. Scripts rely on the names: only add."""
    graph = view.graph
    tally = graph.samples.tally()
    attempts = rundir.attempts(view.run)
    end_t = graph.ended["t"] if graph.ended else now if state.name == "running" else graph.last_t
    return {
        "run": view.run.name,
        "state": state.name,
        "reason": state.reason,
        "exit_code": graph.ended["exit_code"] if graph.ended else None,
        "job_id": graph.job_id or next(reversed(rundir.job_ids(view.run)), None),
        "attempt": graph.attempt or None,
        "started": iso_time(graph.started_t),
        "updated": iso_time(graph.last_t),
        "ended": iso_time(graph.ended["t"]) if graph.ended else None,
        "elapsed_s": round(end_t - graph.started_t, 1) if graph.started_t else None,
        "stage": stage(graph),
        "iterations": graph.num_finished,
        "iterations_total": graph.num_iterations,
        "s_per_iteration": s_per_iteration(graph),
        "nodes": len(graph.nodes) or graph.setting("cluster", "nodes"),
        "roles": {node: graph.roles.get(node) for node in graph.nodes},
        "epoch": graph.epoch,
        "eval": evaluation(graph),
        "moves": moves(graph),
        "trainer": {
            "layout": graph.layout,
            "changes": [vars(recut) for recut in graph.recuts],
        },
        "samples": {"trained": tally.trained, "lost": tally.lost, "doubled": tally.doubled},
        "workers": {"up": sum(w.state == "up" for w in graph.workers.values()), "deaths": graph.deaths},
        "checkpoint": graph.checkpoints[-1] if graph.checkpoints else None,
        "metrics": last_metrics(view),
        "problems": problems(view),
        "path": str(view.run),
        "logs": str(rundir.logs(view.run, attempts[-1])) if attempts else None,
    }


def evaluation(graph: Graph) -> dict[str, Any]:
    """Held-out accuracy (0 to 1) at the start and at the end, and the newest one."""
    by_when = {each["when"]: each for each in graph.evaluations}
    newest = graph.evaluations[-1] if graph.evaluations else {}
    return {
        "start": by_when.get("start", {}).get("accuracy"),
        "end": by_when.get("end", {}).get("accuracy"),
        "last": newest.get("accuracy"),
        "size": newest.get("size"),
        "timeouts": newest.get("timeouts"),
    }


def moves(graph: Graph) -> dict[str, Any]:
    """Changes of roles. `committed` counts changes, `nodes_moved` the nodes in them."""
    return {
        "committed": len(graph.committed),
        "cancelled": len(graph.cancelled),
        "nodes_moved": sum(len(epoch.moves) for epoch in graph.committed),
        "median_pause_ms": graph.median_pause_ms,
        "median_phases_ms": graph.median_phases_ms(),
        "into_training_iterations": graph.into_training_iterations,
    }


def last_metrics(view: RunView) -> dict[str, Any] | None:
    """The metrics of the newest step that has any."""
    if not view.metrics.steps:
        return None
    step = max(view.metrics.steps)
    return {"step": step, **view.metrics.steps[step]}


def problems(view: RunView) -> list[str]:
    """Sentences for a person; empty when all is well."""
    found = check(view.graph)
    if view.journal.torn:
        found.append(f"{view.journal.torn} damaged lines in the journal were skipped")
    if view.journal.stale:
        found.append(f"{view.journal.stale} records of a controller that had been replaced were skipped")
    return found


def s_per_iteration(graph: Graph, last: int = 5) -> float | None:
    """Mean seconds of the last finished iterations, with what lies between them."""
    done = [i for i in graph.iterations.values() if i.finished and i.started_t and i.ended_t][-last:]
    if not done:
        return None
    return round((done[-1].ended_t - done[0].started_t) / len(done), 3)


def stage(graph: Graph) -> str | None:
    """What the job is at, in a few words; None before and after it."""
    if not graph.attempt or graph.ended:
        return None
    if not graph.homes:
        return "starting agents"
    if not graph.ready:
        return "loading models"
    if graph.iterations and graph.iteration is not None:
        current = graph.iterations[graph.iteration]
        if not current.finished:
            return f"iteration {current.number}"
        if graph.num_iterations and graph.num_finished >= graph.num_iterations:
            return "final evaluation and checkpoint"
        return f"after iteration {current.number}"
    if graph.setting("warm_start", "steps") and graph.warm_start is None:
        return "warm start"
    return "first evaluation" if not graph.evaluations else "first iteration"


def by_role(graph: Graph) -> dict[str, list[str]]:
    """Nodes of each role as allocated, roles in their usual order; the nodes without one come last, under "-"."""
    found = {role: [node for node in graph.nodes if graph.roles.get(node) == role] for role in graph.workflow.roles}
    idle = [node for node in graph.nodes if node not in graph.roles]
    return {**found, **({"-": idle} if idle else {})}
