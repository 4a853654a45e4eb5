"""What things take on a scenario's hardware, from the performance models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dynarl.fabric.network import AnalyticNetwork, FlowLevelNetwork
from dynarl.fabric.topology import rail_optimised
from dynarl.perf.device import Device, Efficiency, load_device
from dynarl.perf.model import ModelCost
from dynarl.perf.parallel import Parallel
from dynarl.perf.rollout import StepModel, kv_capacity_tokens
from dynarl.perf.training import UPDATE_BYTES, inference_seconds, microbatch_seconds
from dynarl.sim.world import Times

if TYPE_CHECKING:
    from dynarl.sim.scenario import Scenario, Stage

# Seconds of a group at one replica, from (prompt, response) tokens of its samples.
GroupSeconds = Callable[[Sequence[tuple[int, int]]], float]


class Costs:
    """step: of a rollout engine, whose KV memory holds `kv_tokens`."""

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self.device, self.model = load_device(scenario.device), ModelCost.of(scenario.model)
        rollout = scenario.rollout
        device = self._efficient(rollout.efficiency)
        if rollout.step_overhead_s is not None:
            device = msgspec.structs.replace(device, step_overhead_s=rollout.step_overhead_s)
        step = StepModel.of(device, self.model, rollout.tp)
        self.step = step.scaled(scenario.errors.rollout)
        self.kv_tokens = kv_capacity_tokens(self.device, self.model, rollout.tp, rollout.memory_fraction)

    def _efficient(self, efficiency: Efficiency | None) -> Device:
        return self.device if efficiency is None else msgspec.structs.replace(self.device, efficiency=efficiency)

    def times(self, lockstep: bool) -> Times:
        scenario, moves, slower = self.scenario, self.scenario.moves, self.scenario.errors

        def transfer(source: str, target: str) -> float:
            leave_s = moves.leave_rollout_s if source == "rollout" else 0.0
            return slower.moves * (leave_s + moves.join_s.get(target, 0.0))

        owned = self.model.num_params / scenario.training.tp
        memory = self.device.efficiency.memory * self.device.memory_bytes_per_s
        return Times(
            inference=self._stage("inference", slower.inference),
            training=self._in_step(slower.training) if lockstep else self._stage("training", slower.training),
            optimizer=lambda owners: scenario.training.step_s + owned / owners * UPDATE_BYTES / memory,
            transfer=transfer,
            load=lambda role: moves.sync_s if role == "rollout" else 0.0,
        )

    def _stage(self, role: str, slower: float) -> GroupSeconds:
        """Seconds of one group at a replica, one sequence after the other."""
        alone, abreast = self._sequences(role), self._abreast(role)

        def seconds(samples: Sequence[tuple[int, int]]) -> float:
            return slower * sum(alone(np.array([prompt + response for prompt, response in samples])).tolist()) / abreast

        return seconds

    def _abreast(self, role: str) -> int:
        """Replicas of a stage inside the unit that changes role."""
        return self.scenario.width // getattr(self.scenario, role).tp

    def _sequences(self, role: str) -> Callable[[np.ndarray], np.ndarray]:
        """Seconds of sequences of so many tokens, prompts included, each by itself."""
        stage: Stage = getattr(self.scenario, role)
        device, parallel = self._efficient(stage.efficiency), Parallel(tp=stage.tp)

        def seconds(tokens: np.ndarray) -> np.ndarray:
            work = device, self.model, tokens, (tokens - 1) / 2, parallel
            return stage.sequence_s + (inference_seconds(*work) if role == "inference" else sum(microbatch_seconds(*work)))

        return seconds

    def _in_step(self, slower: float) -> GroupSeconds:
        """Every sequence takes as long as the longest of n is expected to: with the N sequences of an iteration in order,
        the i-th is the longest of n with probability (i / N)^n - ((i - 1) / N)^n."""
        n, requests = self.scenario.nodes, self.scenario.workload.draw(1, 0)
        tokens = np.array([request.total_tokens for request in requests])
        each = sorted((slower * self._sequences("training")(tokens) / self._abreast("training")).tolist())
        total = len(each)
        longest = sum(t * ((i / total) ** n - ((i - 1) / total) ** n) for i, t in enumerate(each, 1))
        return lambda samples: longest * len(samples)

    def network(self) -> AnalyticNetwork | FlowLevelNetwork:
        scenario, device = self.scenario, self.device
        machines = -(-scenario.gpus // device.devices_per_node)
        net = rail_optimised(
            machines,
            device.devices_per_node,
            nic_bytes_per_s=device.efficiency.network * device.inter_bytes_per_s,
            nvlink_bytes_per_s=device.efficiency.network * device.intra_bytes_per_s,
            leaf_radix=machines,
            nvlink_latency_s=device.intra_latency_s,
            network_latency_s=device.inter_latency_s,
        )
        return (AnalyticNetwork if scenario.network == "analytic" else FlowLevelNetwork)(net)
