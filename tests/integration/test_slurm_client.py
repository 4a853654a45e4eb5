"""The same promises on a real Slurm, by every client that works on this machine."""

import os

import pytest
import slurm_contract

from dynarl.slurm import environ, preflight, pyslurm_client
from dynarl.slurm.cli_client import CliClient


@pytest.fixture(params=["cli", "pyslurm"])
def client(request, minislurm, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", minislurm(nodes=2).env["SLURM_CONF"])
    if request.param == "cli":
        return CliClient()
    if reason := pyslurm_client.why_not():
        pytest.skip(f"pyslurm does not work here: {reason}")
    return pyslurm_client.PyslurmClient()


def test_says_what_it_is(client):
    slurm_contract.says_what_it_is(client, {"n1", "n2"})


def test_tells_present_from_absent(client):
    command = ["sbatch", "--parsable", "--job-name=contract", "--output=/dev/null", "--wrap=sleep 100"]
    slurm_contract.tells_present_from_absent(client, command, environ.for_sbatch(os.environ))


def test_requeues_what_may_be(client):
    command = ["sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 100"]
    commands = [[*command[:1], option, *command[1:]] for option in ("--requeue", "--no-requeue")]
    slurm_contract.requeues_what_may_be(client, commands, environ.for_sbatch(os.environ))


def test_refuses_to_requeue_what_is_not_there(client):
    slurm_contract.refuses_to_requeue_what_is_not_there(client)


def test_preflight_finds_nothing_wrong(client):
    findings = list(preflight.check(client))
    assert [finding for finding in findings if finding.level is not preflight.Level.OK] == []
