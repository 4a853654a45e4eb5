"""Layouts as a person writes them."""

from __future__ import annotations

import dataclasses

from dynarl.vps.layout import CheckpointLayout, EngineLayout, HFLayout, Layout, LayoutError
from dynarl.vps.train_layout import TrainLayout


def parse(text: str) -> Layout:
    """A layout from text: `[kind:]name=value,...`, kind being train (the default), engine, hf or checkpoint.

    Rank numbers are ranges (`ranks=0-3:8-11`), layers of pipeline stages are counts (`pp_layers=12*6:11*2`).

    >>> parse("engine:tp=2,dp=2,ranks=8-11").ranks
    (8, 9, 10, 11)
    >>> parse("tp=2,pp=3,pp_layers=4*2:3").pp_layers
    (4, 4, 3)
    """
    layouts = {"train": TrainLayout, "engine": EngineLayout, "hf": HFLayout, "checkpoint": CheckpointLayout}
    kind, colon, rest = text.strip().partition(":")
    if not colon or "=" in kind:
        kind, rest = (kind, "") if kind in layouts else ("train", text.strip())
    if kind not in layouts:
        raise LayoutError(f"{kind!r} in {text!r} is not one of {', '.join(layouts)}")
    fields = {f.name: str(f.type) for f in dataclasses.fields(layouts[kind]) if f.name not in ("kinds", "shards")}
    values = {}
    for item in filter(None, rest.split(",")):
        name, _, value = item.partition("=")
        if name not in fields:
            raise LayoutError(f"{name!r} in {text!r} is not one of {', '.join(fields)}")
        if name in values:
            raise LayoutError(f"{name!r} is there twice in {text!r}")
        values[name] = _parsed(name, fields[name], value, item)
    return layouts[kind](**values)


def _parsed(name: str, annotation: str, value: str, item: str) -> object:
    try:
        if name == "ranks":
            ends = [(part.partition("-")[0], part.rpartition("-")[2]) for part in value.split(":")]
            return tuple(rank for first, last in ends for rank in range(int(first), int(last) + 1))
        if name == "pp_layers":
            counts = [(part.partition("*")[0], part.partition("*")[2] or "1") for part in value.split(":")]
            return tuple(int(count) for count, times in counts for _ in range(int(times)))
        if name == "files":
            return tuple(value.split(":"))
        if annotation == "bool":
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        return int(value)
    except (ValueError, KeyError):
        raise LayoutError(f"{value!r} in {item!r} cannot be read as {name}") from None
