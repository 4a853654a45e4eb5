"""The mapping from pyslurm's objects; the contract test checks, where pyslurm works, that they are like that."""

from types import SimpleNamespace

import pytest

from dynarl.errors import SlurmError
from dynarl.slurm.client import Presence
from dynarl.slurm.pyslurm_client import PyslurmClient


class RPCError(Exception):
    pass


def module(job=None, error=None):
    def load(*arguments):
        if error:
            raise RPCError(error)
        return job

    node = SimpleNamespace(name="n1", state="IDLE+DRAIN")
    return SimpleNamespace(
        RPCError=RPCError,
        Job=SimpleNamespace(load=load),
        Nodes=SimpleNamespace(load=lambda: {"n1": node} if not error else load()),
    )


def test_a_job_is_read():
    job = SimpleNamespace(state="RUNNING", allocated_nodes="n[1-2]", state_reason=None, name="x")
    info = PyslurmClient(module(job)).job("7")
    assert (info.presence, info.state, info.nodes, info.name, info.alive) == (
        Presence.PRESENT,
        "RUNNING",
        ("n1", "n2"),
        "x",
        True,
    )


@pytest.mark.parametrize(
    "error, presence",
    [
        ("Invalid job id specified", Presence.ABSENT),
        ("Unable to contact slurm controller (connect failure)", Presence.UNKNOWN),
    ],
)
def test_an_outage_is_not_absence(error, presence):
    assert PyslurmClient(module(error=error)).job("7").presence is presence


def test_nodes_are_read_or_the_error_is_passed_on():
    assert PyslurmClient(module()).nodes()[0].state == "idle+drain"
    with pytest.raises(SlurmError, match="pyslurm: no contact"):
        PyslurmClient(module(error="no contact")).nodes()
