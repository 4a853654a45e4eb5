"""Why who did what: decisions, changes of roles and of layout, and recoveries of a run, with what came of each.

`entries` reads the journal once. A decision of the scheduler (record `decision`) is joined with the epochs that carried
it out and with how its forecast did (`decision_outcome`). A change of roles that no decision asked for, as all are
under the policies without a forecast, is an entry of its own and has the reason that its epoch gives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dynarl.report.units import duration, iso_time
from dynarl.slurm import hostlist

Record = dict[str, Any]

STAY = "stay"


@dataclass(eq=False)
class Entry:
    """One line of the story.

    kind: decision, roles, layout, plan or recovery; label: `7` for decision 7, `e103` for epoch 103, empty for what has
    no number; t: unix seconds; at_s: since the run started; record: what it is made from; epochs: that carried it out, each
    with its `state` and what it took; came: what came of it where no epoch says so.
    """

    kind: str
    label: str
    t: float
    at_s: float
    iteration: int | None
    what: str
    reason: str
    record: Record
    epochs: list[Record] = field(default_factory=list)
    outcome: Record | None = None
    came: str = ""

    @property
    def chosen(self) -> Record:
        """The candidate that a decision took: {moves, finish_s, cost_s, gain_s}."""
        candidates = self.record.get("candidates") or []
        index = self.record.get("chosen", 0)
        return candidates[index] if self.kind == "decision" and 0 <= index < len(candidates) else {}

    @property
    def stays(self) -> bool:
        return self.kind == "decision" and self.what == STAY

    def result(self) -> str:
        """What came of it, in a line."""
        parts = [_ended(epoch) for epoch in self.epochs] + ([self.came] if self.came else [])
        if self.kind == "decision" and not self.stays and not parts:
            parts = ["not carried out"]
        if self.outcome and (text := compared(self.outcome, "finish")):
            parts.append(text)
        return "; ".join(parts)

    def as_json(self) -> dict[str, Any]:
        told = {k: v for k, v in self.record.items() if k not in ("seq", "t", "type", "owner", "crc")}
        return {
            "kind": self.kind, "label": self.label or None, "time": iso_time(self.t), "at_s": round(self.at_s, 3),
            "iteration": self.iteration, "what": self.what, "reason": self.reason or None,
            "gain_s": self.chosen.get("gain_s"), "result": self.result() or None,
            "epochs": self.epochs, "outcome": self.outcome, "record": told,
        }


def moves_text(moves: dict[str, str]) -> str:
    """
    >>> moves_text({"n2": "training", "n1": "training", "n3": "inference"}), moves_text({})
    ('n[1-2] to training, n3 to inference', 'stay')
    """
    nodes: dict[str, list[str]] = {}
    for node, role in moves.items():
        nodes.setdefault(role, []).append(node)
    for each in nodes.values():
        each.sort(key=lambda node: (len(node), node))
    return ", ".join(f"{hostlist.fold(each)} to {role}" for role, each in nodes.items()) or STAY


def split_text(replanned: Record) -> str:
    """What a plan made while the job ran changes about the split.

    >>> before, after = {"rollout": 1, "training": 3}, {"rollout": 3, "training": 1}
    >>> split_text({"split": before, "proposed": after, "state": "committed"})
    'rollout on 3 nodes (was 1), training on 1 (was 3)'
    >>> split_text({"split": {"rollout": 1}, "state": "kept"})
    'the split stays'
    """
    if replanned["state"] != "committed":
        return "the split stays"
    before, after = replanned["split"], replanned["proposed"]
    parts = [f"{role} on {after[role]} (was {before[role]})" for role in after if after[role] != before[role]]
    return ", ".join(parts).replace(" (", " nodes (", 1)


def off_text(replanned: Record) -> str:
    """
    >>> off_text({"off": {"training": -0.98}, "window": 3})
    'over 3 iterations: training took 98 % less than planned'
    >>> off_text({"off": {}, "window": 3})
    'what 3 iterations took'
    """
    off, window = replanned["off"], f"{replanned['window']} iterations"
    parts = [
        f"{stage} took {100 * abs(share):.0f} % {'more' if share > 0 else 'less'}" for stage, share in off.items()
    ]
    return f"over {window}: {', '.join(parts)} than planned" if parts else f"what {window} took"


def compared(outcome: Record, name: str) -> str:
    """What was predicted against what came, for `finish` or `cost`; empty if one of them is not known.

    >>> compared({"predicted_finish_s": 10.0, "actual_finish_s": 12.5}, "finish")
    'finish 12.50 s, predicted 10.00 s (+25 %)'
    """
    predicted, actual = outcome.get(f"predicted_{name}_s"), outcome.get(f"actual_{name}_s")
    if predicted is None or actual is None:
        return ""
    share = f" ({100 * (actual - predicted) / predicted:+.0f} %)" if predicted else ""
    return f"{name} {actual:.2f} s, predicted {predicted:.2f} s{share}"


def _ended(epoch: Record) -> str:
    if epoch["state"] == "committed":
        return f"done, paused {epoch.get('pause_ms') or 0:.0f} ms"
    if epoch["state"] == "proposed":
        return "under way"
    return f"{epoch['state']}: {epoch.get('reason')}"


def entries(records: Iterable[Record]) -> list[Entry]:
    """All entries of a run in the order of the journal."""
    story = _Story()
    for record in records:
        if handler := getattr(story, f"on_{record['type']}", None):
            with contextlib.suppress(KeyError):  # a record of another version; `dynarl status` names what it lacks
                handler(record)
    return story.entries


class _Story:
    """`on_TYPE` takes in one record of that type."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._started_t: float | None = None
        self._iteration: int | None = None
        self._attempts = self._steps = 0
        self._ended = ""
        self._lost: str | None = None
        self._decision: Entry | None = None  # the last one that moves somebody
        self._decisions: dict[int, Entry] = {}
        self._epoch: Record | None = None
        self._deaths: dict[tuple[str, str, int], Entry] = {}

    def _add(self, kind: str, record: Record, what: str, reason: str | None = "", label: str = "") -> Entry:
        start = self._started_t if self._started_t is not None else record["t"]
        iteration = record.get("iteration", self._iteration)
        entry = Entry(kind, label, record["t"], record["t"] - start, iteration, what, reason or "", record)
        self.entries.append(entry)
        return entry

    def on_run_started(self, r: Record) -> None:
        self._attempts += 1
        self._steps = 0
        self._lost = None
        self._started_t = r["t"] if self._started_t is None else self._started_t
        if self._attempts > 1:
            self._add("recovery", r, f"start {r.get('attempt') or self._attempts} of the controller", self._ended)
        self._ended = "the one before left without a word"

    def on_run_ended(self, r: Record) -> None:
        self._ended = "the one before: " + r["state"] + (f", {r['reason']}" if r.get("reason") else "")

    def on_step_launched(self, r: Record) -> None:
        self._steps += 1
        if self._steps > 1:
            nodes = hostlist.fold(list(r.get("nodes") or []))
            self._add("recovery", r, f"the step was started again on {nodes}", self._lost)

    def on_step_lost(self, r: Record) -> None:
        self._lost = r.get("reason")

    def on_iteration_started(self, r: Record) -> None:
        self._iteration = r["iteration"]

    # Decisions and changes of roles

    def on_decision(self, r: Record) -> None:
        entry = self._add("decision", r, STAY, r.get("reason"), str(r["number"]))
        entry.what = moves_text(entry.chosen.get("moves") or {})
        self._decisions[r["number"]] = entry
        if not entry.stays:
            self._decision = entry

    def on_decision_outcome(self, r: Record) -> None:
        if entry := self._decisions.get(r["number"]):
            entry.outcome = {name: value for name, value in r.items() if name.startswith(("predicted_", "actual_"))}

    def _change(self, r: Record, state: str, reason: str | None) -> Record:
        """An epoch begins, or was refused: part of the last decision, if that wanted these moves, else an entry."""
        moves = {move["node"]: move["target"] for move in r.get("moves") or []}
        epoch = {"epoch": r.get("epoch"), "state": state, "moves": moves}
        wanted = self._decision.chosen["moves"].items() if self._decision else ()
        if self._decision is None or not moves.items() <= wanted or self._decision.iteration != self._iteration:
            label = f"e{r['epoch']}" if "epoch" in r else ""
            self._add("roles", r, moves_text(moves), reason, label).epochs.append(epoch)
        else:
            self._decision.epochs.append(epoch)
        return epoch

    def on_epoch_proposed(self, r: Record) -> None:
        self._epoch = self._change(r, "proposed", r.get("reason"))

    def on_epoch_refused(self, r: Record) -> None:
        self._change(r, "refused", r.get("reason"))["reason"] = "; ".join(r["broken"])

    def on_epoch_committed(self, r: Record) -> None:
        if self._epoch and self._epoch["epoch"] == r["epoch"]:
            told = {name: r.get(name) for name in ("pause_ms", "phases", "given_up", "live_requests")}
            self._epoch |= {"state": "committed", **told}

    def on_role_switched(self, r: Record) -> None:
        epoch = self._change(r, "committed", "its devices were free for this role")
        epoch |= {name: r.get(name) for name in ("pause_ms", "phases")}

    def on_epoch_cancelled(self, r: Record) -> None:
        if self._epoch and self._epoch["epoch"] == r["epoch"]:
            rolled_back = bool(r.get("rolled_back"))
            state = "rolled back" if rolled_back else "cancelled"
            self._epoch |= {"state": state, "reason": r.get("reason"), "rolled_back": rolled_back}

    # The trainer's layout

    def on_layout_committed(self, r: Record) -> None:
        self._add("layout", r, f"trainer to {r['layout']}").came = f"done, paused {r.get('pause_ms') or 0:.0f} ms"

    def on_layout_cancelled(self, r: Record) -> None:
        self._add("layout", r, f"trainer to {r['layout']}").came = f"cancelled: {r.get('reason')}"

    def on_replanned(self, r: Record) -> None:
        entry = self._add("plan", r, f"planned again: {split_text(r)}", off_text(r))
        saves = f"an iteration is to take {r['then_s']:.2f} s, not {r['now_s']:.2f} s" if "then_s" in r else ""
        if r["state"] == "committed":
            entry.came = f"done within {r.get('cost_s') or 0:.1f} s; {saves}"
        else:
            entry.came = f"{r['state']}: {r.get('reason')}"

    # What broke

    def _died(self, r: Record, what: str, reason: str | None) -> None:
        place = r["node"], r["role"], r["device"]
        entry = self._add("recovery", r, f"{r['role']} worker {r['device']} on {r['node']} {what}", reason)
        entry.came = "not back yet"
        self._deaths[place] = entry

    def on_worker_died(self, r: Record) -> None:
        if (r["node"], r["role"], r["device"]) not in self._deaths:  # else it was killed, and its entry is there
            self._died(r, "died", r.get("status"))

    def on_worker_rebooted(self, r: Record) -> None:
        self._died(r, "was ended by its agent", r.get("reason"))

    def on_worker_up(self, r: Record) -> None:
        if entry := self._deaths.pop((r["node"], r["role"], r["device"]), None):
            entry.came = f"a new one is up after {duration(r['t'] - entry.t)}"

    def on_resumed(self, r: Record) -> None:
        origin = f"checkpoint {r['checkpoint'].rpartition('/')[2]}" if r.get("checkpoint") else "the beginning"
        entry = self._add("recovery", r, f"the trainer went back to {origin}")
        entry.iteration = self._iteration
        if self._iteration is not None and self._iteration > r["iteration"]:
            entry.came = f"goes on with iteration {r['iteration'] + 1}"
        self._iteration = r["iteration"] or None

    def on_checkpoint_failed(self, r: Record) -> None:
        self._add("recovery", r, "a checkpoint could not be written", r.get("reason"))
