"""A simulated run in characters: GPUs by role over time, a column per moment, roles stacked from the bottom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from dynarl.report.palette import ROLE_LETTERS, role_style
from dynarl.report.simulation import KINDS, sampled
from dynarl.report.units import duration

ROWS = 8
LETTERS = ROLE_LETTERS | {"idle": "."}


def render(timeline: Sequence[Mapping[str, float]], end_s: float, width: int, colour: bool, fancy: bool) -> list[Text]:
    """Lines of at most `width` columns for 0..end_s, `ROWS` high: each is an equal part of the GPUs."""
    num_gpus = max((sum(span[kind] for kind in KINDS) for span in timeline), default=0.0)
    label = len(f"{num_gpus:.0f}")
    columns = max(10, width - label - 1)
    stacks = [_stack(part, num_gpus) for part in sampled(timeline, columns, end_s)]
    lines = []
    for row in reversed(range(ROWS)):
        head = f"{num_gpus:.0f}" if row == ROWS - 1 else "0" if row == 0 else ""
        line = Text(f"{head:>{label}} ")
        for stack in stacks:
            kind = stack[row]
            mark = " " if kind is None else "█" if colour and fancy and kind != "idle" else LETTERS[kind]
            line.append(mark, style=role_style(kind) if colour and kind not in (None, "idle") else "")
        line.rstrip()
        lines.append(line)
    end = duration(end_s)
    lines.append(Text(f"{'':>{label}} 0s{end:>{columns - 2}}"))
    return lines


def legend(shares: Mapping[str, float], colour: bool, fancy: bool) -> Text:
    text = Text()
    for kind in KINDS:
        mark = "██" if colour and fancy and kind != "idle" else LETTERS[kind]
        text.append(mark, style=role_style(kind) if colour and kind != "idle" else "").append(
            f" {kind} {shares[kind]:.0%}   "
        )
    return text


def sureness(found: Mapping[str, Any]) -> str:
    """A sentence or two on what `sim.stability` has found.

    >>> told = {"error": 0.1, "order": ["dynarl", "static"], "variants": [
    ...     {"off": "rollout 10% slower", "makespan_s": {"dynarl": 6.0, "static": 5.0}, "same_order": False}]}
    >>> sureness(told)
    'With one role 10% slower or faster the order (dynarl, static) holds in 0 of 1 cases. Not with rollout 10% slower: static 5.0 s, dynarl 6.0 s.'
    """
    variants = found["variants"]
    others = [each for each in variants if not each["same_order"]]
    text = (f"With one role {found['error']:.0%} slower or faster the order ({', '.join(found['order'])}) holds in "
            f"{len(variants) - len(others)} of {len(variants)} cases.")
    for each in others:
        by_time = sorted(each["makespan_s"].items(), key=lambda item: item[1])
        text += f" Not with {each['off']}: {', '.join(f'{policy} {seconds:,.1f} s' for policy, seconds in by_time)}."
    return text


def _stack(part: Mapping[str, float], num_gpus: float) -> list[str | None]:
    """What each row of one column shows: the kind at the middle of its share of the GPUs; None: the run has ended."""
    if not sum(part.values()):
        return [None] * ROWS
    rows: list[str | None] = []
    for row in range(ROWS):
        level, below = (row + 0.5) / ROWS * num_gpus, 0.0
        for kind in KINDS:
            below += part[kind]
            if level < below:
                rows.append(kind)
                break
        else:
            rows.append(None)
    return rows
