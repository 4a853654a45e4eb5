"""Parallel degrees of the trainer: what a configuration says, iteration by iteration."""

from __future__ import annotations

import re
from typing import NamedTuple

from dynarl.config.schema import Config, Training
from dynarl.errors import ConfigError


class Degrees(NamedTuple):
    """Tensor, pipeline and expert parallelism. Data parallelism follows from the number of workers: of all devices of
    `nodes` training nodes, 0 being as many as `split.training` says.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    nodes: int = 0

    def __str__(self) -> str:
        shown = {"tp": True, "pp": True, "ep": self.ep > 1, "nodes": self.nodes > 0}
        return ",".join(f"{name}={value}" for name, value in self._asdict().items() if shown[name])


def parse(text: str) -> Degrees:
    """
    >>> parse("tp=2, nodes=3")
    Degrees(tp=2, pp=1, ep=1, nodes=3)
    >>> parse("dp=2")
    Traceback (most recent call last):
        ...
    dynarl.errors.ConfigError: 'dp=2' in 'dp=2' is not one of tp=N, pp=N, ep=N, nodes=N
    """
    values: dict[str, int] = {}
    for item in text.split(","):
        found = re.fullmatch(r"\s*(tp|pp|ep|nodes)\s*=\s*([1-9]\d*)\s*", item)
        if not found:
            known = "tp=N, pp=N, ep=N, nodes=N"
            raise ConfigError(f"{item.strip()!r} in {text!r} is not one of {known}")
        if found[1] in values:
            raise ConfigError(f"{found[1]} is there twice in {text!r}")
        values[found[1]] = int(found[2])
    return Degrees(**values)


def first(training: Training) -> Degrees:
    """Those that a run starts with."""
    return Degrees(training.tp, training.pp, training.ep)


def at(training: Training, iteration: int) -> Degrees:
    """Those of an iteration. Raises ConfigError for a layout that cannot be read."""
    begun = [begins for begins in map(int, training.layouts) if begins <= iteration]
    return parse(training.layouts[str(max(begun))]) if begun else first(training)


def every(training: Training) -> list[Degrees]:
    """Those of the start, and all others that a run goes through."""
    return [first(training), *map(parse, training.layouts.values())]


def vocab_multiple(config: Config) -> int:
    """What the vocabulary of a tensor-parallel rank is padded to: matrix units of a GPU want it, a CPU does not."""
    return 128 if config.cluster.device == "cuda" else 1
