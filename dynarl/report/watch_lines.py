"""A run in lines of plain text, one per event: what `dynarl watch` writes where there is no terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from dynarl.hypergraph.journal import Record
from dynarl.report.explain import split_text
from dynarl.report.palette import ROLE_COLOURS
from dynarl.report.run import RunView, State
from dynarl.report.units import duration
from dynarl.slurm import hostlist

METRICS = [
    ("critic/rewards/mean", "reward {:.3f}"),
    ("response_length/mean", "response length {:.0f}"),
    ("perf/throughput", "{:.0f} tokens/s/device"),
    ("alloc/switch_count", "{:.0f} moves"),
    ("timing_s/step", "{:.1f}s"),
]


class Lines:
    """Turns what is new in a run into lines. `view` has to be the one whose `poll` gave the records."""

    def __init__(self, view: RunView):
        self._view = view
        self._reported_step = 0
        self._state: tuple[str, bool] | None = None

    def take(self, records: list[Record]) -> Iterator[str]:
        """Lines of these records and of the metrics that came with them, in order of time."""
        found = []
        for record in records:
            text = None
            with contextlib.suppress(KeyError):  # a record of another version
                if record["type"] == "resumed":
                    self._reported_step = record["iteration"]
                text = _TEXTS.get(record["type"], lambda r: None)(record)
            if text is not None:
                found.append((record["t"], text))
        started_t = self._view.graph.started_t
        if started_t is None:  # metrics may be seen before the journal, on a shared file system
            return
        found += self._iterations()
        for t, text in sorted(found, key=lambda entry: entry[0]):
            yield f"{duration(t - started_t):>7}  {text}"

    def _iterations(self) -> Iterator[tuple[float, str]]:
        total = self._view.graph.num_iterations
        for step, data in sorted(self._view.metrics.steps.items()):
            if step > self._reported_step and data.get("critic/rewards/mean") is not None:
                self._reported_step = step
                shown = ", ".join(form.format(data[key]) for key, form in METRICS if data.get(key) is not None)
                iteration = self._view.graph.iterations.get(step)
                ended_t = iteration.ended_t if iteration and iteration.ended_t else self._view.graph.last_t
                yield ended_t, f"iteration {step} of {total or '?'}: {shown}"

    def state(self, state: State) -> Iterator[str]:
        """A line when the state is a new one that the journal does not tell."""
        seen = (state.name, self._view.graph.ended is not None)
        if seen != self._state and self._view.graph.ended is None and state.reason:
            yield f"{state.name}: {state.reason}"
        self._state = seen


def _epoch_committed(r: Record) -> str | None:
    """The first map of roles; the moves after it are counted in the line of their iteration."""
    if r.get("moves"):
        return None
    groups = [(role, [node for node, active in r["roles"].items() if active == role]) for role in ROLE_COLOURS]
    return "models are loaded: " + "  ".join(f"{role} {hostlist.fold(nodes)}" for role, nodes in groups if nodes)


_TEXTS: dict[str, Callable[[Record], str | None]] = {
    "run_started": lambda r: (
        f"started: job {r.get('job_id')}, {len(r.get('nodes') or [])} nodes, attempt {r.get('attempt')}"
    ),
    "step_lost": lambda r: f"the step is lost: {r.get('reason')}",
    "step_launched": lambda r: f"agents are up on {len(r.get('nodes') or [])} nodes",
    "epoch_committed": _epoch_committed,
    "warm_start_done": lambda r: f"warm start done: {r.get('steps')} steps, loss {_number(r.get('loss'))}",
    "evaluated": lambda r: f"accuracy ({r['when']}): {_percent(r.get('accuracy'))} of {r.get('size')} held-out",
    "epoch_cancelled": lambda r: f"move cancelled: {r.get('reason')}",
    "epoch_refused": lambda r: f"move refused: {'; '.join(r['broken'])}",
    "worker_rebooted": lambda r: f"ended: {r['role']} worker {r['device']} on {r['node']}: {r['reason']}",
    "worker_died": lambda r: f"died: {r['role']} worker {r['device']} on {r['node']}: {r.get('status')}",
    "layout_committed": lambda r: f"trainer in layout {r['layout']}: paused {r.get('pause_ms') or 0:.0f} ms",
    "layout_cancelled": lambda r: f"trainer stays as it is, not {r['layout']}: {r.get('reason')}",
    "replanned": lambda r: f"planned again: {split_text(r)}" + (f": {r['reason']}" if r.get("reason") else ""),
    "checkpoint_saved": lambda r: f"checkpoint after iteration {r['iteration']}",
    "checkpoint_failed": lambda r: f"a checkpoint could not be written: {r.get('reason')}",
    "resumed": lambda r: f"goes on after iteration {r['iteration']}",
    "run_ended": lambda r: f"ended: {r['state']}" + (f" ({r['reason']})" if r.get("reason") else ""),
}


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"
