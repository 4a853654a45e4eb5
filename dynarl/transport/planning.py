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

from dynarl.transport.messages import Places, Schedule
from dynarl.vps.layout import CheckpointLayout, EngineLayout, HFLayout, Layout
from dynarl.vps.plan import plan_for_rank
from dynarl.vps.presets import preset
from dynarl.vps.spec import ModelSpec
from dynarl.vps.train_layout import Shards, TrainLayout

LAYOUTS = {cls.__name__: cls for cls in (TrainLayout, EngineLayout, HFLayout, CheckpointLayout)}


class Request(msgspec.Struct, frozen=True):
    """model: config.json of the Hugging Face form, or {"preset": name}; source, destination: `describe`d layouts whose
    ranks are those of `Places(num_nodes, devices_per_node)`; budget_bytes: what the planner may spend beyond the larger
    state; piece_bytes: of one message at most; ring_bytes: of each of the two rings of a rank.
    """

    model: dict[str, Any]
    source: dict[str, Any]
    destination: dict[str, Any]
    kinds: list[str]
    num_nodes: int
    devices_per_node: int
    budget_bytes: int = 1 << 30
    # Small enough that what was packed is still in the cache when it is sent. Between ranks of one node, where messages
    # as a rule are not packed, half a ring.
    piece_bytes: int = 512 << 10
    ring_bytes: int = 4 << 20

    @property
    def places(self) -> Places:
        return Places(self.num_nodes, self.devices_per_node)

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
    nodes = ByNode(request)
    plan = plan_for_rank(request.spec, *nodes.layouts, nodes.inner(rank), **nodes.options)
    inner = nodes.inner(rank)
    return RankPlan(
        rank=rank,
        transfers=[exchange._replace(peer=nodes.outer(exchange.peer)) for exchange in plan.transfers(inner)],
        local=list(plan.local(inner)),
        digest=zlib.crc32(plan.digest.encode()),
        peak_bytes=plan.peak_bytes[inner],
        bytes_received=plan.bytes_received[inner],
        item_bytes={kind: request.spec.itemsize(kind) for kind in request.kinds},
    )


def schedule_of(request: Request, plan: RankPlan) -> Schedule:
    """All that this rank does, as messages of bounded size."""
    places = request.places
    here = places.node_of(plan.rank)
    near = max(request.piece_bytes, request.ring_bytes // 2)
    return Schedule.of(
        plan.transfers,
        plan.item_bytes,
        lambda peer: near if places.node_of(peer) == here else request.piece_bytes,
        plan.local,
    )


class ByNode:
    """Ranks as the planner gets them: workers and staging rank of a node side by side, so that it knows who is near."""

    def __init__(self, request: Request):
        self._places = request.places
        per_node = request.devices_per_node + 1
        self.layouts = [layout.relabelled([self.inner(r) for r in layout.ranks]) for layout in request.layouts()]
        self.options = dict(kinds=tuple(request.kinds), budget_bytes=request.budget_bytes, ranks_per_node=per_node)

    def inner(self, rank: int) -> int:
        places = self._places
        device = places.devices_per_node if places.is_staging(rank) else places.device_of(rank)
        return places.node_of(rank) * (places.devices_per_node + 1) + device

    def outer(self, inner: int) -> int:
        node, device = divmod(inner, self._places.devices_per_node + 1)
        if device == self._places.devices_per_node:
            return self._places.staging_rank(node)
        return self._places.worker_rank(node, device)


@lru_cache(maxsize=8)
def _spec(model: bytes) -> ModelSpec:
    config = msgspec.json.decode(model)
    return preset(config["preset"]) if "preset" in config else ModelSpec.from_hf(config)


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
