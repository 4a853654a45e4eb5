"""What a simulated job runs on: all that a scenario comes down to before its first event.

A **node** is the unit that changes role, as in a real job. It has `cluster.devices_per_node` devices; a device is a
group of GPUs that train one replica together (tp x pp of them), or score, or that holds several rollout engines. So the job's
configuration has tp = pp = 1: what is inside a device is the business of the times below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from dynarl.config.schema import Config
from dynarl.errors import ConfigError
from dynarl.perf.rollout import StepModel
from dynarl.sim.decode import DecodeEngine
from dynarl.sim.workload import SimRequest


class Network(Protocol):
    """How long a transfer takes. op: `all_reduce`, `broadcast` or `p2p`; group: GPUs, numbered node by node and device
    by device; num_bytes: of the message, at each member."""

    def seconds(self, op: str, group: Sequence[int], num_bytes: int) -> float: ...


@dataclass(frozen=True)
class Times:
    """Seconds that things take, besides decoding and what goes over the network.

    inference, training: of one group at one device, from (prompt, response) tokens of its samples; optimizer: of one
    step, from the number of devices that share the optimizer's state; transfer: of a node, from its old and its new
    role, weights included; load: of new weights into the workers of a role; verdict: of a node on an answer, one after
    another, and verify: of every answer besides; restart: of a worker that died. Orders of a change of roles take `at_work`
    times as long on nodes that have work.
    """

    inference: Callable[[Sequence[tuple[int, int]]], float]
    training: Callable[[Sequence[tuple[int, int]]], float]
    optimizer: Callable[[int], float] = lambda num_devices: 0.0
    transfer: Callable[[str, str], float] = lambda source, target: 0.0
    load: Callable[[str], float] = lambda role: 0.0
    prepare_s: float = 0.05
    vote_s: float = 0.005
    drain_s: float = 0.05
    commit_s: float = 0.005
    message_s: float = 0.001
    verify_s: float = 0.005
    verdict_s: float = 0.0
    at_work: float = 1.0
    restart_s: float = 30.0


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker of this role on this node dies so many seconds after the start of an iteration."""

    iteration: Annotated[int, Meta(ge=1)]
    at_s: Annotated[float, Meta(ge=0)]
    node: str
    role: Literal["rollout", "inference", "training"]


@dataclass(frozen=True)
class World:
    """step, kv_capacity_tokens: of one rollout engine, of which a device has `engines_per_device`; together they decode
    `rollout.max_running` requests. draw: requests of an iteration, from its number and the seed; tools_at_once: tool
    calls that a node makes at a time (None: any number); gradient_bytes, weight_bytes: of one whole replica;
    sample_bytes: of one token on its way to another node; figures_s: between two reports of a rollout device;
    decision_s: what a decision of the adaptive scheduler is taken to cost.

    Raises ConfigError for what cannot run.
    """

    config: Config
    homes: dict[str, str]
    gpus_per_device: int
    engines_per_device: int
    step: StepModel
    kv_capacity_tokens: int
    draw: Callable[[int, int], Sequence[SimRequest]]
    times: Times
    network: Network
    gradient_bytes: int = 0
    weight_bytes: int = 0
    sample_bytes: int = 12
    tools_at_once: int | None = None
    figures_s: float = 5.0
    decision_s: float = 0.05
    failures: Sequence[Failure] = field(default=())

    def __post_init__(self) -> None:
        if self.config.training.tp * self.config.training.pp != 1 or self.config.training.layouts:
            raise ConfigError("a device of a simulated node trains a replica: training.tp and pp are 1, no layouts")
        if self.config.rollout.max_running % self.engines_per_device:
            raise ConfigError(
                f"rollout.max_running = {self.config.rollout.max_running} of a device is not shared evenly by its "
                f"{self.engines_per_device} engines"
            )
        for failure in self.failures:
            if self.homes.get(failure.node) is None:
                raise ConfigError(f"a failure on {failure.node!r}, which is not one of the {len(self.homes)} nodes")
            if failure.role == "training" and self.homes[failure.node] == "training":
                raise ConfigError(
                    f"a failure of the training worker on {failure.node}, which owns optimizer state: going back to a "
                    "checkpoint is not simulated; let a node fail whose home role is another one"
                )

    def engine(self) -> DecodeEngine:
        """An empty rollout engine."""
        rollout, each = self.config.rollout, self.engines_per_device
        return DecodeEngine(self.step, self.kv_capacity_tokens, rollout.max_running // each, rollout.order)

    @property
    def num_gpus(self) -> int:
        return len(self.homes) * self.gpus_per_node

    @property
    def gpus_per_node(self) -> int:
        return self.config.cluster.devices_per_node * self.gpus_per_device
