"""What every Client promises, whatever is behind it: called for the fake, the tools on a fake, and on a real Slurm."""

from __future__ import annotations

import time

import pytest

from dynarl.errors import SlurmError
from dynarl.slurm import version
from dynarl.slurm.client import Client, Presence, Restarts


def until(client: Client, job_id: str, states: set[str], timeout_s: float = 120.0):
    deadline = time.monotonic() + timeout_s
    while (info := client.job(job_id)).state not in states:
        assert time.monotonic() < deadline, info
        time.sleep(0.2)
    return info


def says_what_it_is(client: Client, node_names: set[str]) -> None:
    version.require(client.version())
    assert {node.name for node in client.nodes()} == node_names
    assert len(client.nodes()) == len(node_names)
    default = [part for part in client.partitions() if part.default]
    assert len(default) == 1 and default[0].up and default[0].nodes == len(node_names)
    assert client.config()["JobRequeue"] in ("0", "1")
    assert "pmix" in client.mpi_plugins()


def tells_present_from_absent(
    client: Client, command: list[str], environment: dict[str, str], start=lambda job_id: None
) -> None:
    """`command` submits a job that runs long; `start` makes it run where nothing else does."""
    assert client.job("999999").presence is Presence.ABSENT
    assert client.job("999999").alive is False
    job_id = client.submit(command, environment)
    assert client.job(job_id).presence is Presence.PRESENT and client.job(job_id).alive is True
    start(job_id)
    running = until(client, job_id, {"RUNNING"})
    assert running.nodes and running.name == "contract"
    client.cancel(job_id)
    ended = until(client, job_id, {"CANCELLED"})
    assert ended.alive is False


def requeues_what_may_be(
    client: Client, commands: list[list[str]], environment: dict[str, str], start=lambda job_id: None
) -> None:
    """`commands` submit a job that may be requeued and one that may not; `start` as above."""
    may, may_not = (client.submit(command, environment) for command in commands)
    for job_id in (may, may_not):
        start(job_id)
        until(client, job_id, {"RUNNING"})
    assert client.restarts(may) == Restarts(allowed=True, count=0)
    assert client.restarts(may_not) == Restarts(allowed=False, count=0)
    client.requeue(may)
    with pytest.raises(SlurmError):
        client.requeue(may_not)
    until(client, may, {"PENDING"})
    assert client.restarts(may) == Restarts(allowed=True, count=1)
    with pytest.raises(SlurmError):  # another one's request came first
        client.requeue(may)
    client.cancel(may)
    client.cancel(may_not)


def refuses_to_requeue_what_is_not_there(client: Client) -> None:
    with pytest.raises(SlurmError):
        client.requeue("999999")
