"""The live view of a run: what `dynarl watch` draws on a terminal, from the hypergraph and the metrics alone."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text

from dynarl.hypergraph.graph import Epoch, Graph
from dynarl.report.palette import ROLE_LETTERS, STATE_STYLES, role_style
from dynarl.report.run import RunView, State
from dynarl.report.summary import by_role, problems, s_per_iteration, stage
from dynarl.report.timeline import timeline
from dynarl.report.timeline_text import render
from dynarl.report.units import duration
from dynarl.slurm import hostlist

WINDOW_S = 60.0
LABEL = 17
SHOWN_MOVES = 4
# Lines of the view besides the rows of nodes.
OTHER_LINES = 21

CURVES = [
    ("critic/rewards/mean", "reward", "{:.3f}"),
    ("response_length/mean", "response length", "{:.0f}"),
    ("perf/throughput", "tokens/s/device", "{:.0f}"),
    ("timing_s/step", "s per iteration", "{:.1f}"),
]


@dataclass(frozen=True)
class Screen:
    """What can be drawn on: size in characters; colour; fancy: symbols beyond ASCII."""

    width: int
    height: int
    colour: bool
    fancy: bool


def draw(view: RunView, state: State, now: float, screen: Screen) -> Text:
    """The whole view, at most `screen.height - 1` lines."""
    lines = [_head(view, state, now), *_progress(view, screen), Text()]
    if view.graph.roles:
        lines += [*_nodes(view, now, screen), Text()]
    if curves := _curves(view, screen):
        lines += [*curves, Text()]
    if moves := _moves(view, screen):
        lines += [*moves, Text()]
    lines += _trouble(view, state)
    lines.append(
        Text(f"results: {view.run}" if state.final else "Ctrl-C leaves this view; the job goes on.", style="dim")
    )
    for line in lines[:-1]:
        line.truncate(screen.width, overflow="ellipsis" if screen.fancy else "crop")
    return Text("\n").join(lines[: screen.height - 1])


def _head(view: RunView, state: State, now: float) -> Text:
    graph = view.graph
    text = Text.assemble((view.run.name, "bold"), "  ", (state.name, STATE_STYLES[state.name]))
    if (what := stage(graph)) and state.name == "running":
        text.append(f", {what}")
    end_t = graph.ended["t"] if graph.ended else now
    facts = [f"job {graph.job_id}"] if graph.job_id else []
    facts += [f"attempt {graph.attempt}"] if graph.attempt > 1 else []
    facts += [duration(end_t - graph.started_t)] if graph.started_t else []
    return text.append("  " + ", ".join(facts), style="dim")


def bar(done: float, total: float, width: int, fancy: bool) -> str:
    full = round(width * min(max(done / total, 0.0), 1.0)) if total else 0
    return ("█" * full + "░" * (width - full)) if fancy else ("#" * full + "." * (width - full))


def _progress(view: RunView, screen: Screen) -> list[Text]:
    graph, width = view.graph, max(10, min(40, screen.width - LABEL - 46))
    lines = []
    warm_steps = graph.setting("warm_start", "steps", 0)
    warm = view.metrics.steps.get(0, {})
    if warm_steps and graph.warm_start is None and warm.get("warm_start/step"):
        done = int(warm["warm_start/step"])
        text = f" {done} of {warm_steps}, loss {warm['warm_start/loss']:.3f}"
        lines.append(_labelled("warm start", bar(done, warm_steps, width, screen.fancy) + text))
    total = graph.num_iterations
    if total:
        each = s_per_iteration(graph)
        left = (
            f", {duration(each)} each, about {duration(each * (total - graph.num_finished))} left"
            if each and graph.num_finished < total
            else ""
        )
        lines.append(
            _labelled(
                "iterations",
                bar(graph.num_finished, total, width, screen.fancy) + f" {graph.num_finished} of {total}{left}",
            )
        )
    return lines


def _labelled(name: str, value: str | Text) -> Text:
    return Text.assemble((f"{name:<{LABEL}}", "dim"), value)


def _nodes(view: RunView, now: float, screen: Screen) -> list[Text]:
    """Counts per role, and the last minute of each node as far as there is room."""
    graph = view.graph
    counts = _counts(graph, screen, names=True)
    if LABEL + len(counts) > screen.width:
        counts = _counts(graph, screen, names=False)
    end_t = graph.ended["t"] if graph.ended else now
    found = timeline(graph, end_t, since_t=end_t - WINDOW_S)
    window_s = (max(0.0, found.end_s - WINDOW_S), found.end_s)
    rows = max(2, screen.height - OTHER_LINES)
    strip = render(found, screen.width, screen.colour, screen.fancy, window_s, max_rows=rows) if found.end_s > 0 else []
    return [_labelled("nodes", counts), *strip]


def _counts(graph: Graph, screen: Screen, names: bool) -> Text:
    text = Text()
    for role, nodes in by_role(graph).items():
        if nodes:
            mark = "██" if screen.colour and screen.fancy else ROLE_LETTERS.get(role, "-")
            text.append(mark, style=role_style(role) if screen.colour else "").append(f" {role} {len(nodes)}")
            text.append(f" {hostlist.fold(nodes)}" if names else "", style="dim").append("   ")
    text.rstrip()
    return text


def sparkline(values: list[float], width: int, fancy: bool) -> str:
    """The last `width` values as heights between their least and their greatest."""
    levels = "▁▂▃▄▅▆▇█" if fancy else "_.-=+*#@"
    values = values[-width:]
    low, high = min(values), max(values)
    if high == low:
        return levels[0] * len(values)
    return "".join(levels[round((value - low) / (high - low) * (len(levels) - 1))] for value in values)


def _curves(view: RunView, screen: Screen) -> list[Text]:
    lines = []
    width = max(10, min(60, screen.width - LABEL - 24))
    arrow = "→" if screen.fancy else "->"
    for key, name, form in CURVES:
        values = [value for _, value in view.metrics.series(key)]
        if values:
            curve = sparkline(values, width, screen.fancy)
            lines.append(_labelled(name, f"{curve}  {form.format(values[0])} {arrow} {form.format(values[-1])}"))
    accuracies = [
        f"{each['accuracy']:.1%} ({each['when']})" for each in view.graph.evaluations if each["accuracy"] is not None
    ]
    if accuracies:
        lines.append(_labelled("accuracy", f" {arrow} ".join(accuracies[:1] + accuracies[1:][-2:])))
    return lines


def _moves(view: RunView, screen: Screen) -> list[Text]:
    graph = view.graph
    settled = [epoch for epoch in graph.epochs if epoch.state == "cancelled" or epoch.moves]
    if not settled:
        return []
    pause = graph.median_pause_ms
    counts = f"{len(graph.committed)} committed, {len(graph.cancelled)} cancelled"
    head = _labelled("moves", counts + (f", median pause {pause:.0f} ms" if pause is not None else ""))
    return [head, *(_move(epoch, graph.started_t, screen) for epoch in settled[-SHOWN_MOVES:])]


def _move(epoch: Epoch, started_t: float, screen: Screen) -> Text:
    arrow = " → " if screen.fancy else " -> "
    text = Text(f"  {duration((epoch.ended_t or epoch.proposed_t) - started_t):>7} ")
    for source, target in dict.fromkeys((move.source, move.target) for move in epoch.moves):
        nodes = [move.node for move in epoch.moves if (move.source, move.target) == (source, target)]
        text.append(f" {hostlist.fold(nodes)} ")
        for index, role in enumerate((source, target)):
            text.append(arrow if index else "").append(role, style=role_style(role) if screen.colour else "")
    if epoch.state == "committed" and epoch.pause_ms is not None:
        text.append(f"  {epoch.pause_ms:.0f} ms", style="dim")
    elif epoch.state != "committed":
        text.append(f"  {epoch.state}", style="yellow")
    return text.append(f"  {epoch.reason}" if epoch.reason else "", style="dim")


def _trouble(view: RunView, state: State) -> list[Text]:
    lines = [Text(f"{state.name}: {state.reason}", style="yellow")] if state.reason else []
    lines += [
        Text(f"died: {d['role']} worker {d['device']} on {d['node']}: {d['status']}", style="red")
        for d in view.graph.deaths[-2:]
    ]
    return lines + [Text(f"problem: {text}", style="red") for text in problems(view)[:2]]
