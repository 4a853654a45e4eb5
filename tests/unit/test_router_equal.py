"""`policy.equal_nodes`: where one node has decoded slowly so far."""

import pytest
from test_router import hand_out, report

from dynarl import wire
from dynarl.config.schema import Algorithm, Config, Policy, Rollout
from dynarl.controller.router import Router
from dynarl.dataflow.ledger import Ledger
from dynarl.scheduler.survival import Lengths


@pytest.mark.parametrize("equal", [True, False])
def test_nodes_of_equal_hardware_get_the_same_whatever_their_requests_took_so_far(equal):
    config = Config(
        rollout=Rollout(max_running=16), algorithm=Algorithm(max_response_tokens=200), policy=Policy(equal_nodes=equal)
    )
    router, ledger = Router(config, Lengths(200)), Ledger([wire.sample_id(1, g, m) for g in range(4) for m in range(4)])
    report(router, {"n1": 10, "n2": 3})
    given = {node: len(samples) for node, samples in hand_out(router, ledger, ["n1", "n2"], now=10.0).items()}
    assert (given["n1"] == given["n2"] == 8) == equal
