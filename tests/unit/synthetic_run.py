"""A made-up run directory: journal, metrics and logs as a real job would leave them, with a clock of its own.

`python tests/unit/synthetic_run.py ROOT [--live SPEED]` writes one to look at the commands with.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

from dynarl import rundir
from dynarl.hypergraph.journal import encode


class SyntheticRun:
    """Writes records at a pretended time. `speed`: pretended seconds per real second, None for no waiting."""

    def __init__(
        self,
        root: Path,
        name: str = "demo",
        nodes: int = 4,
        iterations: int = 10,
        seed: int = 1,
        start_t=1_795_000_000.0,
        speed=None,
    ):
        self.run = rundir.create(root, name)
        rundir.set_latest(self.run)
        self.nodes = [f"n{i + 1}" for i in range(nodes)]
        training, inference = max(1, nodes // 4), max(1, nodes // 8) if nodes > 2 else 0
        split = [nodes - training - inference, inference, training]
        homes = ["rollout"] * split[0] + ["inference"] * split[1] + ["training"] * split[2]
        self.homes = dict(zip(self.nodes, homes))
        self.roles = dict(self.homes)
        self.config = {
            "run": {"name": name, "iterations": iterations},
            "cluster": {"nodes": nodes, "devices_per_node": 1},
            "split": dict(zip(("rollout", "inference", "training"), split)),
            "algorithm": {"minibatches": 1, "prompts_per_step": 8, "group_size": 4},
            "training": {"tp": 1},
        }
        self.t, self.speed = start_t, speed
        self.seq, self.epoch, self.attempt, self.term = 0, 0, 0, 0
        self.random = random.Random(seed)

    def wait(self, seconds: float) -> None:
        self.t += seconds
        if self.speed:
            time.sleep(seconds / self.speed)

    def record(self, type: str, **fields) -> None:
        self.seq += 1
        stamp = time.time() if self.speed else self.t
        line = encode({"seq": self.seq, "t": stamp, "type": type, "owner": f"{self.term}.aa", **fields})
        with open(rundir.journal(self.run), "ab") as file:
            file.write(line)

    def log(self, path: Path, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.t)) + f",{int(self.t % 1 * 1000):03d}"
        with open(path, "a") as file:
            file.write(f"{stamp} {text}\n")

    def metrics(self, step: int, **data: float) -> None:
        with open(rundir.metrics(self.run), "a") as file:
            names = {name.replace("__", "/"): value for name, value in data.items()}
            file.write(json.dumps({"step": step, "t": self.t, "data": names}) + "\n")

    def start(self, job_id: int = 4711) -> None:
        self.attempt, self.term, self.epoch = rundir.new_attempt(self.run), self.term + 1, 0
        rundir.add_job(self.run, job_id) if self.attempt == 1 else None
        self.record("journal_opened", host="n1", pid=1)
        self.record(
            "run_started",
            run=self.run.name,
            config=self.config,
            job_id=str(job_id),
            nodes=self.nodes,
            attempt=self.attempt,
        )
        self.roles = {}
        for rank, (node, home) in enumerate(self.homes.items()):
            self.wait(0.1)
            self.roles[node] = home
            self.record("agent_up", node=node, rank=rank, home=home)
            self.log(rundir.logs(self.run, self.attempt) / f"{node}-agent.log", f"{node} INFO agent up, rank {rank}")
            for role in dict.fromkeys([home, "training"]):
                self.record("worker_up", node=node, role=role, device=0, attempt=1)
                self.log(rundir.logs(self.run, self.attempt) / f"{node}-{role}-0.1.log", f"{node}-{role}-0 INFO up")
        self.record("step_launched", step=self.attempt, command=["srun", "..."], nodes=self.nodes)
        self.record("epoch_committed", epoch=0, roles=self.roles, moves=[], phases={}, pause_ms=0.0)
        self.log(rundir.controller_log(self.run, self.attempt), "controller INFO all agents are up")

    def move(self, target: str, nodes: list[str], commit: bool = True) -> None:
        moves = [{"node": n, "source": self.roles[n], "target": target} for n in nodes]
        self.epoch += 1
        self.record("epoch_proposed", epoch=self.epoch, moves=moves, reason="requests at or under the threshold")
        phases = {
            name: round(self.random.uniform(5, 40), 1)
            for name in ("prepare_ms", "vote_ms", "drain_ms", "transfer_ms", "verify_ms", "commit_ms")
        }
        pause_ms = sum(phases.values()) - phases["prepare_ms"]
        self.wait(sum(phases.values()) / 1000)
        if not commit:
            self.record("epoch_cancelled", epoch=self.epoch, reason="n3 voted no: not enough memory")
            return
        self.roles |= {node: target for node in nodes}
        self.record(
            "epoch_committed", epoch=self.epoch, roles=self.roles, moves=moves, phases=phases, pause_ms=pause_ms
        )

    def iteration(self, number: int, moves: bool = True, drop: int = 0, twice: int = 0) -> None:
        samples = [f"{number}:{prompt}:{member}" for prompt in range(8) for member in range(4)]
        self.record("iteration_started", iteration=number, version=number, samples=samples)
        movable = [n for n, home in self.homes.items() if home == "rollout"]
        length = self.random.uniform(5, 7)
        self.wait(length * 0.5)
        step = max(1, (len(movable) - 1) // 2)
        released = []
        while moves and len(released) < len(movable) - 1:
            batch = movable[len(released) : len(movable) - 1][:step]
            if number % 4 == 0 and not released:
                self.move("training", batch, commit=False)
            self.move("training", batch)
            released += batch
            self.wait(length * 0.15)
        self.wait(length * 0.3)
        trained = samples[drop:] + samples[:twice]
        loss = 0.5 * math.exp(-number / 8)
        self.record(
            "step_committed", iteration=number, step=number, samples=trained, loss=loss, grad_norm=0.8, tokens=4000
        )
        progress = 1 - math.exp(-number / 5)
        self.metrics(
            number,
            critic__rewards__mean=0.3 + 0.6 * progress + self.random.uniform(-0.03, 0.03),
            response_length__mean=80 - 30 * progress + self.random.uniform(-3, 3),
            actor__grad_norm=0.8,
            actor__loss=loss,
            perf__throughput=420 + self.random.uniform(-30, 30),
            timing_s__step=length,
            timing_s__gen=length * 0.7,
        )
        if released:
            self.move("rollout", released)
        self.log(rundir.controller_log(self.run, self.attempt), f"controller INFO iteration {number} done")

    def evaluate(self, when: str, iteration: int, accuracy: float) -> None:
        self.wait(1.5)
        self.record("evaluated", when=when, iteration=iteration, accuracy=accuracy, size=128, timeouts=0)

    def end(self, state: str = "completed", reason: str | None = None, exit_code: int = 0) -> None:
        self.record("run_ended", state=state, reason=reason, exit_code=exit_code)

    def whole(self) -> Path:
        """A run from start to end that went well."""
        total = self.config["run"]["iterations"]
        self.start()
        self.wait(4)
        self.record("warm_start_done", steps=60, loss=0.9)
        self.evaluate("start", 0, 0.31)
        for number in range(1, total + 1):
            self.iteration(number)
            if number % 5 == 0:
                self.record("checkpoint_saved", iteration=number, path=str(rundir.checkpoint(self.run, number)))
        self.evaluate("end", total, 0.74)
        self.end()
        return self.run


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--live", type=float, metavar="SPEED")
    options = parser.parse_args()
    print(SyntheticRun(options.root, nodes=options.nodes, iterations=options.iterations, speed=options.live).whole())
