"""Random histories that a controller could have written: they break no rule, and can be folded in any two parts."""

import itertools

from graph_records import decision, records
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.hypergraph.check import check, check_proposal
from dynarl.hypergraph.edges import edges, placement, vertices
from dynarl.hypergraph.fold import fold
from dynarl.hypergraph.graph import Move
from dynarl.hypergraph.queries import critical_path, free_pool, staleness, waits

HOMES = {"r1": "rollout", "r2": "rollout", "i1": "inference", "t1": "training"}
MAY = {"rollout": ("rollout", "training"), "inference": ("inference", "training"), "training": ("training",)}


class History:
    """Each method writes what belongs together and keeps to the rules; `draw` makes the choices."""

    def __init__(self, draw):
        self.draw, self.events, self.decisions = draw, [], itertools.count(1)
        self.attempt = self.done = self.version = self.epoch = self.checkpoint = 0
        self.start()

    def add(self, type, fields=None, **named):
        self.events.append((type, fields or named))

    def start(self):
        self.attempt += 1
        self.add("run_started", run="r", config={}, job_id=1, nodes=list(HOMES), attempt=self.attempt)
        for rank, (node, home) in enumerate(HOMES.items()):
            self.add("agent_up", node=node, rank=rank, home=home)
        self.add("step_launched", nodes=list(HOMES))
        for node, home in HOMES.items():
            for role in MAY[home]:
                self.add("worker_up", node=node, role=role, device=0)
        if self.attempt > 1:
            self.add("resumed", iteration=self.checkpoint, checkpoint="c")
            self.done = self.checkpoint
        self.roles, self.epoch = dict(HOMES), 100 * self.attempt
        self.weights()
        self.add("epoch_committed", epoch=self.epoch, roles=dict(self.roles), moves=[])

    def weights(self):
        self.version += 1
        self.add("weights_staging", version=self.version)
        self.add("weights_staged", version=self.version, nodes=list(HOMES))

    def move(self):
        node = self.draw(st.sampled_from([n for n in HOMES if n != "t1"]))
        target = next(role for role in MAY[HOMES[node]] if role != self.roles[node])
        moves = {node: target}
        if target == "training" and not set((self.roles | moves).values()) >= {"rollout"}:
            return
        self.add(*decision(next(self.decisions), self.done + 1, moves, requests__running=2))
        self.epoch += 1
        listed = [{"node": node, "source": self.roles[node], "target": target}]
        self.add("epoch_proposed", epoch=self.epoch, moves=listed, reason="")
        if self.draw(st.booleans()):
            self.roles |= moves
            self.add("epoch_committed", epoch=self.epoch, roles=dict(self.roles), moves=listed, live_requests=1)
        else:
            self.add("epoch_cancelled", epoch=self.epoch, reason="no")

    def iteration(self):
        number = self.done + 1
        samples = [f"{number}:{prompt}:0" for prompt in range(3)]
        self.add("iteration_started", iteration=number, version=self.version, samples=samples)
        for _ in range(self.draw(st.integers(0, 2))):
            self.move()
        self.add("step_committed", iteration=number, samples=samples, stages={"rollout": 0.5})
        self.done = number
        self.weights()

    def worker(self):
        node, role = self.draw(st.sampled_from([(n, r) for n, h in HOMES.items() for r in MAY[h]]))
        self.add("worker_died", node=node, role=role, device=0, status="killed")
        self.add("worker_up", node=node, role=role, device=0, attempt=2)

    def save(self):
        self.checkpoint = self.done
        self.add("checkpoint_saved", iteration=self.done, path="c")

    def rest(self):
        self.add("evaluated", when="start", iteration=self.done, accuracy=0.5)
        self.add("layout_committed", iteration=self.done + 1, layout="tp=1,pp=1")
        self.add("decision_outcome", number=1, predicted_finish_s=1.0, actual_finish_s=2.0)


@st.composite
def histories(draw):
    history = History(draw)
    actions = ["iteration", "move", "worker", "save", "start", "rest"]
    for action in draw(st.lists(st.sampled_from(actions), max_size=12)):
        getattr(history, action)()
    return records(*history.events)


def facts(graph):
    return {**vars(graph), "samples": graph.samples.tally()}


@settings(max_examples=60, deadline=None)
@given(histories(), st.data())
def test_folding_in_two_parts_is_folding_as_a_whole(history, data):
    cut = data.draw(st.integers(0, len(history)))
    assert facts(fold(history[cut:], fold(history[:cut]))) == facts(fold(history))


@settings(max_examples=60, deadline=None)
@given(histories())
def test_a_history_that_keeps_the_rules_breaks_none_at_any_record(history):
    graph = fold([])
    for record in history:
        if record["type"] == "epoch_proposed":
            moves = [Move(**move) for move in record["moves"]]
            assert check_proposal(graph, moves, live_requests=1) == []
        fold([record], graph)
        assert graph.faults == []
        assert {v for edge in edges(graph) for v in edge.vertices} <= set(vertices(graph))
        busy = [device for role in graph.workflow.roles for device in placement(graph, role).vertices[1:]]
        assert len(busy) == len(set(busy)) and sorted([*busy, *free_pool(graph)]) == sorted(
            v for v in vertices(graph) if v.startswith("device/"))
        waits(graph), critical_path(graph), staleness(graph)
    assert check(graph) == []
    assert graph.version == len(history)
