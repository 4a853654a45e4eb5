"""A plan for people: a tree, a picture of devices over time, memory, and why.

All of it is made from the object that `dynarl plan -o json` prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from dynarl.report.palette import ROLE_COLOURS, ROLE_LETTERS
from dynarl.report.units import size, within

# For stages that are no roles of their own, in the order in which they come up; of the same palette.
MORE_COLOURS = ("#56B4E9", "#F0E442", "#D55E00", "#000000")
SWITCHING = "·"
HOW = {"temporal": "in turn", "spatial": "side by side"}


def marks(stages: list[str]) -> dict[str, tuple[str, str]]:
    """A letter and a colour for each stage, no two alike."""
    found: dict[str, tuple[str, str]] = {}
    spare = iter(MORE_COLOURS * len(stages))
    for stage in stages:
        names = [part for part in stage.split("+") if part in ROLE_LETTERS] or [stage]
        taken = {letter for letter, _ in found.values()}
        choices = [ROLE_LETTERS.get(names[0], stage[0].upper()), *stage.upper(), *stage]
        letter = next((c for c in choices if c not in taken and c.isalpha()), "#")
        colour = ROLE_COLOURS.get(names[0])
        found[stage] = letter, colour if colour and colour not in {c for _, c in found.values()} else next(spare)
    return found


def head(told: dict[str, Any]) -> tuple[str, str]:
    """What is planned and how fast that is; what the plan is."""
    what = " on ".join(filter(None, (told["model"], f"{told['devices']} {told['device'] or 'devices'}")))
    samples = told["groups"] * told["group_size"]
    speed = f", {told['tokens_per_s'] / 1e3:,.1f} thousand tokens/s" if told["tokens_per_s"] else ""
    return f"{what}: {samples} samples in {took(told['seconds'], told)}{speed}", f"{told['mode']}: {told['shape']}"


def took(seconds: float, told: dict[str, Any]) -> str:
    """`43.4 s`, or `9m14s` in a plan that takes minutes."""
    return within(seconds, told["seconds"])


def tree(told: dict[str, Any], fancy: bool, colour: bool) -> Iterator[Text]:
    """The tree in lines."""
    stages = [leaf["stage"] for leaf in leaves(told["plan"])]
    yield from _branch(told["plan"], "", "", marks(stages), told, fancy, colour)


def leaves(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan] if plan["kind"] == "stage" else [leaf for part in plan["parts"] for leaf in leaves(part)]


def _branch(
    node: dict[str, Any], lead: str, indent: str, signs: dict, told: dict[str, Any], fancy: bool, colour: bool
) -> Iterator[Text]:
    span = f"{took(node['start_s'], told)} to {took(node['end_s'], told)}"
    if node["kind"] == "stage":
        letter, shade = signs[node["stage"]]
        idle = node["devices"][1] - node["devices"][0] - node["used"]
        busy = node["busy_s"] / max(node["end_s"] - node["start_s"], 1e-9)
        line = Text(lead).append(f"{letter} {node['stage']}", style=shade if colour else "bold")
        line.append(f"  {place(node['devices'], told)}, {node['layout']}")
        line.append(f"  {span}" + (f", busy {busy:.0%} of it" if busy < 0.995 else ""), style="dim")
        yield line.append(f"  {idle} idle" if idle else "", style="dim")
        return
    title = "in turn" if node["kind"] == "in_turn" else "side by side"
    yield (
        Text(lead)
        .append(title, style="bold")
        .append(f"  {place(node['devices'], told)}")
        .append(f"  {span}", style="dim")
    )
    tee, last, pipe = ("├─ ", "└─ ", "│  ") if fancy else ("|- ", "`- ", "|  ")
    for number, part in enumerate(node["parts"]):
        ends = number == len(node["parts"]) - 1
        if number and node["chunks"] and (chunks := node["chunks"][number - 1]) > 1:
            groups = told["groups"] // chunks
            arrow = "↓" if fancy else "v"
            yield Text(
                f"{indent}{pipe}{arrow} in {chunks} chunks of {groups} {'group' if groups == 1 else 'groups'}",
                style="dim",
            )
        yield from _branch(
            part, indent + (last if ends else tee), indent + ("   " if ends else pipe), signs, told, fancy, colour
        )


def place(devices: list[int], told: dict[str, Any]) -> str:
    """`nodes 0-4` where they are whole ones, else `devices 0-12`."""
    first, end, per_node = *devices, told["devices_per_node"]
    noun = "device"
    if per_node > 1 and first % per_node == 0 and end % per_node == 0:
        first, end, noun = first // per_node, end // per_node, "node"
    return f"{noun} {first}" if end - first == 1 else f"{noun}s {first}-{end - 1}"


def picture(told: dict[str, Any], width: int, fancy: bool, colour: bool) -> Iterator[Text]:
    """Who works when: a row for each set of devices."""
    found = leaves(told["plan"])
    signs = marks([leaf["stage"] for leaf in found])
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    cuts = sorted({edge for leaf in found for edge in leaf["devices"]})
    for first, end in zip(cuts, cuts[1:]):
        rows[first, end] = [leaf for leaf in found if leaf["devices"][0] <= first and end <= leaf["devices"][1]]
    label = max(len(place(list(row), told)) for row in rows) + 1
    columns = max(20, width - label)
    total = told["seconds"]
    for row, here in rows.items():
        line = Text(f"{place(list(row), told):<{label}}")
        for column in range(columns):
            low, high = total * column / columns, total * (column + 1) / columns
            covered = {leaf["stage"]: _covered(leaf["periods"], low, high) for leaf in here}
            most = max(covered, key=covered.get, default=None)
            if most is not None and sum(covered.values()) >= (high - low) / 2:
                letter, shade = signs[most]
                line.append("█" if fancy and colour else letter, style=shade if colour else "")
            else:
                switching = any(_covered(leaf["switching"], low, high) > 0 for leaf in here)
                line.append((SWITCHING if fancy else "-") if switching else " ", style="dim")
        line.rstrip()
        yield line
    yield Text(" " * label + "0s" + f"{took(total, told):>{columns - 2}}", style="dim")
    legend = Text(" " * label)
    for stage, (letter, shade) in signs.items():
        legend.append("██" if fancy and colour else letter, style=shade if colour else "").append(f" {stage}   ")
    yield legend


def _covered(periods: list[list[float]], low: float, high: float) -> float:
    return sum(max(0.0, min(end, high) - max(start, low)) for start, end in periods)


def memory_rows(told: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(stage, parts, sum, share of the device) of the fullest device of each stage that says what it holds."""
    limit = told["memory_limit_bytes"]
    rows = []
    for leaf in leaves(told["plan"]):
        if parts := leaf["memory_bytes"]:
            total = sum(parts.values())
            text = ", ".join(f"{name} {size(part)}" for name, part in parts.items() if part)
            rows.append((leaf["stage"], text, size(total), f"{total / limit:.0%} of {size(limit)}"))
    return rows


def reasons(told: dict[str, Any]) -> list[str]:
    """Why this plan, and what would change it."""
    why, lines = told["why"], []
    others = [(name, seconds) for name, seconds in why["modes"].items() if name != told["mode"]]
    for name, seconds in others:
        if seconds is None:
            lines.append(f"all {HOW[name]}: no plan fits")
        else:
            lines.append(f"all {HOW[name]}: {took(seconds, told)}, {_slower(seconds / told['seconds'] - 1)}")
    pure = [seconds for seconds in why["modes"].values() if seconds is not None]
    for each in why["alternatives"]:
        if any(abs(each["seconds"] - seconds) < 1e-6 * seconds for seconds in pure):
            continue  # told already
        lines.append(f"{each['shape']}: {took(each['seconds'], told)}, {_slower(each['slower'])}")
    return lines


def limits(told: dict[str, Any]) -> str:
    """What the time hangs on."""
    found = told["why"]["sensitivity"]
    saved = ", ".join(f"{each['stage']} {each['saved']:.1%}" for each in found)
    return f"one stage {found[0]['nudge']:.0%} faster saves: {saved}"


def sureness(told: dict[str, Any]) -> str:
    found = told["why"]["stability"]
    share = f"{found['best']:.0%} of {found['draws']} draws"
    text = f"with costs off by up to {found['error']:.0%} it stays the best of these in {share}"
    if found["best"] == 1:
        return text
    return f"{text}, within 2% of the best in {found['close']:.0%}, and loses {found['loss']:.1%} at most"


def _slower(share: float) -> str:
    return "as fast" if share < 0.0005 else f"{share:.1%} slower"
