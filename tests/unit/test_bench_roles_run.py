"""The whole benchmark of roles on a pretended cluster: every candidate does all of the work, in the order asked for."""

import asyncio
import json
from collections import Counter
from types import SimpleNamespace

from pretend_cluster import WEIGHTS, Cluster

from dynarl.bench import roles
from dynarl.bench.roles_summary import summary
from dynarl.config.schema import Algorithm, Config, Policy, Rollout
from dynarl.controller.epochs import Epochs
from dynarl.controller.replicas import inside_nodes
from dynarl.controller.router import Router
from dynarl.controller.telemetry import Monitor
from dynarl.hypergraph import journal
from dynarl.scheduler.policy import capabilities

HOME = {"n1": "rollout", "n2": "inference", "n3": "training"}
CANDIDATES = {"static 1:1:1", "colocated", "dynamic", "adaptive", "dynamic by arrival", "adaptive by arrival"}


class Agents(Cluster):
    """Beside what an iteration asks of them. asked: (order, requests) of each hand-out to an engine."""

    def __init__(self):
        super().__init__(HOME, seed=1, longest=20)
        self.asked = []

    async def on_generate(self, node, requests, order, **args):
        self.asked.append((order, len(requests)))
        await super().on_generate(node, requests, order=order, **args)

    async def on_refresh(self, node, version):
        pass

    async def on_forget(self, node, iteration):
        node.held.clear()

    async def worker(self, node, role, device, method):
        assert (role, device, method) == ("rollout", 0, "figures")
        return {"prefill_tokens": self.agents[node].made, "reused_tokens": 3 * self.agents[node].made}


class Trainer:
    """owner_nodes, replicas as the iteration wants them. steps: samples of each optimizer step."""

    def __init__(self, cluster):
        self.cluster, self.owner_nodes, self.steps = cluster, ["n3"], []
        self.replicas = inside_nodes(HOME, 1, 1)

    async def begin(self, step, loss):
        pass

    async def step(self, contributors, tokens, lr):
        assert lr == 0.0 and tokens > 0 and {self.cluster.agents[n].active for n in contributors} == {"training"}
        total = Counter()
        for node in contributors:
            total += self.cluster.agents[node].buffer
            self.cluster.agents[node].buffer.clear()
        self.steps.append(total)


class Pretended(roles.RolesBench):
    def __init__(self, config, run_dir, log):
        self.config, self.run_dir, self.journal, self.fleet, self.home = config, run_dir, log, Agents(), HOME
        self.progress, self.weights = SimpleNamespace(warm_start_done=True), WEIGHTS
        self.may = self.offers = capabilities(Policy(name="colocated"), HOME)
        self.epochs = Epochs(self.fleet, log, HOME, 10.0, first_epoch=1)
        self.monitor = Monitor(config)
        self.router = Router(config, self.monitor.lengths)
        self.workers = SimpleNamespace(down=self.fleet.down, settled=self.nothing)
        self.staging = SimpleNamespace(everywhere=self.nothing)
        self.trainer = Trainer(self.fleet)
        self.traces = []
        self.writer = SimpleNamespace(trace=lambda line: self.traces.append(json.loads(line)))

    async def nothing(self):
        pass

    @property
    def stage(self):
        return self.fleet.iteration

    @stage.setter
    def stage(self, run):
        self.fleet.iteration = run


def test_every_candidate_trains_every_sample_once_and_is_in_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr(roles, "ROUNDS", 2)
    monkeypatch.setattr(roles, "LOOK_S", 0.002)
    config = Config(
        policy=Policy(threshold=4, dwell_s=0.0),
        algorithm=Algorithm(workflow="agentic", prompts_per_step=6, group_size=3, max_response_tokens=20,
                            normalize_std=False),
        rollout=Rollout(max_running=2, max_queued=16),
    )
    log = journal.Journal(tmp_path / "journal.jsonl")
    bench = Pretended(config, tmp_path, log)
    asyncio.run(asyncio.wait_for(bench.body(), 60))
    log.close()
    results = json.loads((tmp_path / "bench.json").read_text())
    assert set(results["rounds"]) == CANDIDATES and {len(each) for each in results["rounds"].values()} == {2}
    shared, own = (monitor for monitor, _ in bench.learned.values())
    assert shared is not own and shared.numbers is own.numbers, "no two decisions in the journal have one number"
    assert len(bench.trainer.steps) == 3 + 2 * len(CANDIDATES), "three are not counted"
    assert all(len(step) == 18 and set(step.values()) == {1} for step in bench.trainer.steps)
    assert {line["candidate"] for line in bench.traces} == CANDIDATES
    for line in bench.traces:
        assert len({answer[0] for answer in line["answers"]}) == 18 and line["roles"].keys() == HOME.keys()
        for role in ("inference", "training"):
            traced = sum(tokens for stage, tokens, _ in line["leases"] if stage == role)
            assert traced == sum(tokens for _, _, tokens, *_ in line["answers"])
    assert set(order for order, _ in bench.fleet.asked) == {"priority", "arrival"}
    asked = Counter()
    for order, count in bench.fleet.asked:
        asked[order] += count
    assert asked["priority"] >= 18 * 11 and asked["arrival"] >= 18 * 4
    figures = summary(results)
    assert figures["work"] == results["work"] and figures["work"]["answers"] == 18
    assert {round(row["prefill_saved"], 6) for row in figures["breakdown"].values()} == {0.75}
    for each in results["rounds"].values():
        for row in each:
            phases = sum(row[f"{phase}_s"] for phase in ("enter", "generate", "finish", "step", "sync"))
            assert abs(phases - row["seconds"]) < 1e-6
            watched = sum(seconds for name, seconds in row.items() if name.endswith("_node_s"))
            assert 0 < watched <= 3 * (row["generate_s"] + row["finish_s"]) + 0.1
    assert figures["breakdown"]["static 1:1:1"]["moves"] == 0 and figures["breakdown"]["colocated"]["moves"] > 0
