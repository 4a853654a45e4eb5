"""Which replica gets how many groups at a time."""

from collections import Counter
from types import SimpleNamespace

from dynarl.config.schema import Config
from dynarl.controller.leases import Leases
from dynarl.controller.replicas import inside_nodes
from dynarl.controller.telemetry import Monitor
from dynarl.dataflow.ledger import Ledger

NODES = ["n1", "n2", "n3"]


def held(num_groups: int) -> list[int]:
    """Leases of the three nodes once this many groups were offered to them, most first."""
    ledger = Ledger([f"1:{g}:0" for g in range(num_groups)], scored_by_inference=False)
    ledger.dispatch("n1", ledger.waiting(num_groups))
    for sample in list(ledger.running):
        ledger.finished(sample, "n1", reward=1.0, tokens=10, finish="stop")
    replicas = inside_nodes(dict.fromkeys(NODES, frozenset(("training",))), 1, 1)
    leases = Leases(
        SimpleNamespace(agents={}), ledger, Monitor(Config()), {"training": replicas}, lambda work, undo: work.close()
    )
    leases.hand_out("training", ledger.in_state("scored"), NODES, lambda sample: {})
    return sorted(Counter(replica.nodes[0] for _, replica in leases.at.values()).values(), reverse=True)


def test_where_there_are_many_groups_each_replica_has_one_that_waits():
    assert held(9) == [2, 2, 2]


def test_of_the_last_groups_none_waits_at_a_replica_while_another_could_take_it():
    assert held(2) == [1, 1] and held(3) == held(4) == held(6) == [1, 1, 1] and held(7) == [2, 1, 1]
