"""The agent's part in a transition that is given up."""

import asyncio

from dynarl.agent.transitions import Transitions


class PretendRemapper:
    def __init__(self):
        self.forgotten = []

    def forget(self, ranks):
        self.forgotten.append(ranks)


def test_a_node_that_knows_nothing_of_a_transition_forgets_its_communicator_all_the_same(tmp_path):
    """To make a new one all nodes have to meet, also those whose own part went well, or had none."""
    remapper = PretendRemapper()
    transitions = Transitions(0, remapper, None, None, None, tmp_path)
    asyncio.run(transitions.abort("0badc0de", "another node failed", [0, 1], 1.0))
    assert remapper.forgotten == [[0, 1]]
