"""A transition as it is ordered: which layouts of which model, and what one rank has to do for it.

A `Request` says everything that a plan depends on, in plain values that travel as messages; every rank makes its own
part of the plan from it, and the digests say whether all of them made the same plan.
"""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from dynarl.transport.messages import Places
from dynarl.vps.layout import CheckpointLayout, EngineLayout, HFLayout, Layout
from dynarl.vps.spec import ModelSpec, preset
from dynarl.vps.train_layout import Shards, TrainLayout

LAYOUTS = {cls.__name__: cls for cls in (TrainLayout, EngineLayout, HFLayout, CheckpointLayout)}


class Request(msgspec.Struct, frozen=True):
    """model: config.json of the Hugging Face form, or {"preset": name}; source, destination: `describe`d layouts whose
    ranks are those of `Places(num_nodes, devices_per_node)`; piece_bytes: of one message at most; budget_bytes: memory
    for messages per rank.
    """

    model: dict[str, Any]
    source: dict[str, Any]
    destination: dict[str, Any]
    kinds: list[str]
    num_nodes: int
    devices_per_node: int
    relabel: bool = False
    budget_bytes: int = 32 << 20
    piece_bytes: int = 1 << 20

    @property
    def places(self) -> Places:
        return Places(self.num_nodes, self.devices_per_node)

    @property
    def ring_bytes(self) -> int:
        """Each rank has two rings; a ring holds two messages at least, so that one is packed while one is sent."""
        return max(self.budget_bytes // 2, 2 * self.piece_bytes)

    @property
    def key(self) -> str:
        """Equal for equal requests: what plans are cached by."""
        return f"{zlib.crc32(msgspec.json.encode(self, order='deterministic')):08x}"

    @property
    def spec(self) -> ModelSpec:
        return _spec(msgspec.json.encode(self.model, order="deterministic"))

    def layouts(self) -> tuple[Layout, Layout]:
        return layout_of(self.source), layout_of(self.destination)

    def ranks(self) -> list[int]:
        """Everybody who takes part."""
        source, destination = self.layouts()
        return sorted({*source.ranks, *destination.ranks})


@dataclass
class RankPlan:
    """One rank's part. `transfers` and `local` as the planner gives them; digest: of the whole plan, unsigned 32 bits;
    peak_bytes: of state and messages; item_bytes: of an element of each kind.
    """

    rank: int
    transfers: list[Any]
    local: Any
    digest: int
    peak_bytes: int
    bytes_received: int
    item_bytes: dict[str, int]


def plan_rank(request: Request, rank: int) -> RankPlan:
    """This rank's part of the plan of `request`. Raises ValueError (LayoutError, SpecError) for what cannot be."""
    plan = _plan(request.key, _Held(request))
    return RankPlan(
        rank=rank,
        transfers=list(plan.transfers(rank)),
        local=plan.local(rank),
        digest=_as_number(plan.digest),
        peak_bytes=plan.peak_bytes.get(rank, 0),
        bytes_received=plan.bytes_received.get(rank, 0),
        item_bytes={kind: request.spec.itemsize(kind) for kind in request.kinds},
    )


class _Held:
    """Carries a request past the cache, which goes by the key."""

    def __init__(self, request: Request):
        self.request = request

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)


@lru_cache(maxsize=8)
def _plan(key: str, held: _Held) -> Any:
    from dynarl.vps.plan import plan_transition

    request = held.request
    source, destination = request.layouts()
    return plan_transition(
        request.spec,
        source,
        destination,
        kinds=tuple(request.kinds),
        relabel=request.relabel,
        budget_bytes=request.budget_bytes,
    )


@lru_cache(maxsize=8)
def _spec(model: bytes) -> ModelSpec:
    config = msgspec.json.decode(model)
    return preset(config["preset"]) if "preset" in config else ModelSpec.from_hf(config)


def _as_number(digest: int | str | bytes) -> int:
    if isinstance(digest, int):
        return (digest ^ digest >> 32) & 0xFFFFFFFF
    return zlib.crc32(digest.encode() if isinstance(digest, str) else digest)


def describe(layout: Layout) -> dict[str, Any]:
    """A layout in plain values.

    >>> layout = TrainLayout(tp=2, dp=2)
    >>> layout_of(describe(layout)) == layout
    True
    """
    values = {"layout": type(layout).__name__}
    for field in dataclasses.fields(layout):
        value = getattr(layout, field.name)
        if isinstance(value, Shards):
            value = [
                [position, [[chunk, name, lo, hi] for (chunk, name), (lo, hi) in sorted(intervals.items())]]
                for position, intervals in sorted(value.by_position.items())
            ]
        values[field.name] = msgspec.to_builtins(value)
    return values


def layout_of(values: dict[str, Any]) -> Layout:
    """The layout that was described. Raises ValueError."""
    values = dict(values)
    name = values.pop("layout", None)
    if name not in LAYOUTS:
        raise ValueError(f"layout {name!r} is not one of {', '.join(LAYOUTS)}")
    if (shards := values.get("shards")) is not None:
        values["shards"] = Shards({p: {(c, n): (lo, hi) for c, n, lo, hi in intervals} for p, intervals in shards})
    for field in ("ranks", "kinds", "pp_layers"):
        if values.get(field) is not None:
            values[field] = tuple(values[field])
    return LAYOUTS[name](**values)
