"""What the fields of journal records are, whatever the event: a record in which one is something else is left out.

A journal may come from another version, or from somebody's editor. So the fold holds each record against this before it
takes anything from it, and what is wrong with one is told by the path of the field.
"""

from __future__ import annotations

from typing import Any

import msgspec


class _Move(msgspec.Struct):
    node: str
    source: str
    target: str


class _Cluster(msgspec.Struct):
    nodes: int | None = None
    devices_per_node: int = 1


class _Policy(msgspec.Struct):
    name: str | None = None
    lend_owners: bool = False


class _Run(msgspec.Struct):
    iterations: int | None = None


class _Algorithm(msgspec.Struct):
    workflow: str | None = None
    minibatches: int = 1


class _WarmStart(msgspec.Struct):
    steps: int | None = None


class _Training(msgspec.Struct):
    tp: int = 1
    pp: int = 1


class _Config(msgspec.Struct):
    """The settings that are read from a journal."""

    run: _Run | None = None
    cluster: _Cluster | None = None
    policy: _Policy | None = None
    algorithm: _Algorithm | None = None
    warm_start: _WarmStart | None = None
    training: _Training | None = None


class Fields(msgspec.Struct):
    """Null where a value may be unknown, or where a number was not finite."""

    seq: int
    t: float
    type: str
    attempt: int | None = None
    accuracy: float | None = None
    bytes: int | None = None
    checkpoint: str | None = None
    config: _Config | None = None
    device: int = 0
    epoch: int = 0
    exit_code: int | None = None
    home: str | dict[str, str] = ""
    iteration: int | None = None
    iterations: int | None = None
    job_id: int | str | None = None
    layout: str = ""
    live_requests: int | None = None
    loss: float | None = None
    moves: list[_Move] | None = None
    node: str = ""
    nodes: list[str] | None = None
    number: int = 0
    path: str | None = None
    pause_ms: float | None = None
    proposed: dict[str, int] | None = None
    phases: dict[str, float] | None = None
    rank: int | None = None
    reason: str | None = None
    role: str = ""
    roles: dict[str, str] = {}
    run: str | None = None
    samples: list[str] | None = None
    seen: dict[str, float | None] | None = None
    size: int | None = None
    split: dict[str, int] | None = None
    stages: dict[str, float] | None = None
    state: str = ""
    status: str | int | None = None
    steps: int | None = None
    tail: list[str] | None = None
    timeouts: int | None = None
    version: int | None = None
    when: str | None = None


def wrong_in(record: dict[str, Any]) -> str:
    """What is not as it should be; "" when nothing is.

    >>> wrong_in({"seq": 1, "t": 0.5, "type": "evaluated", "accuracy": "high", "note": "of another version"})
    'Expected `float | null`, got `str` - at `$.accuracy`'
    """
    try:
        msgspec.convert(record, Fields)
    except msgspec.ValidationError as error:
        return str(error)
    return ""
