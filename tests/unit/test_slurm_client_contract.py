import pytest
import slurm_contract
from fake_tools import FakeTools

from dynarl.slurm.cli_client import CliClient
from dynarl.slurm.fake import FakeClient

SLURM = {
    "fake": lambda: (slurm := FakeClient(), slurm),
    "cli": lambda: (CliClient(FakeTools(slurm := FakeClient())), slurm),
}


@pytest.fixture(params=SLURM)
def pair(request):
    """A client, and the fake Slurm behind it."""
    return SLURM[request.param]()


def test_says_what_it_is(pair):
    slurm_contract.says_what_it_is(pair[0], {"n1", "n2", "n3", "n4"})


def test_tells_present_from_absent(pair):
    client, slurm = pair
    slurm_contract.tells_present_from_absent(
        client, ["sbatch", "--job-name=contract"], {}, lambda job: slurm.set_state(job, "RUNNING")
    )


def test_requeues_what_may_be(pair):
    client, slurm = pair
    slurm_contract.requeues_what_may_be(
        client, [["sbatch", "--requeue"], ["sbatch", "--no-requeue"]], {}, lambda job: slurm.set_state(job, "RUNNING")
    )


def test_refuses_to_requeue_what_is_not_there(pair):
    slurm_contract.refuses_to_requeue_what_is_not_there(pair[0])
