"""The Client that reads jobs and nodes through pyslurm, where that is installed and fits the site's Slurm.

pyslurm is optional: it is GPL-2.0-only, each release fits one release of Slurm, and it cannot launch steps. Everything
but reading therefore goes through the tools as well. It must never be loaded into a process that uses MPI: both bring a
libslurm or PMIx of their own.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from dynarl.errors import SlurmError
from dynarl.slurm import cli_client, hostlist
from dynarl.slurm.client import JobInfo, NodeInfo, Presence

IMPORT_TIMEOUT_S = 20


def why_not() -> str | None:
    """None where pyslurm works, else the reason.

    Asked in a child process, because importing it ends the process where libslurm finds no slurm.conf (all releases up
    to 24.11), and crashes where it was built for another release.
    """
    try:
        result = subprocess.run(
            [sys.executable, "-c", "import pyslurm; pyslurm.Nodes.load()"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=IMPORT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"importing it took more than {IMPORT_TIMEOUT_S} s"
    if result.returncode == 0:
        return None
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"importing it ended with status {result.returncode}"


class PyslurmClient(cli_client.CliClient):
    """Reads with pyslurm, acts with the tools. Raises SlurmError where pyslurm does not work."""

    name = "pyslurm"

    def __init__(self, module: Any = None):
        super().__init__()
        if module is None:
            if reason := why_not():
                raise SlurmError(f"pyslurm cannot be used here: {reason}")
            import pyslurm as module
        self._pyslurm = module

    def job(self, job_id: str) -> JobInfo:
        try:
            job = self._pyslurm.Job.load(int(job_id))
        except self._pyslurm.RPCError as error:
            if cli_client.NO_SUCH_JOB.search(str(error)):
                return JobInfo(job_id, Presence.ABSENT)
            return JobInfo(job_id, Presence.UNKNOWN, detail=str(error))
        return JobInfo(
            job_id,
            Presence.PRESENT,
            job.state,
            tuple(hostlist.expand(job.allocated_nodes or "")),
            job.state_reason or "None",
            job.name or "",
        )

    def nodes(self) -> list[NodeInfo]:
        try:
            found = self._pyslurm.Nodes.load()
        except self._pyslurm.RPCError as error:
            raise SlurmError(f"pyslurm: {error}") from None
        # Upper case with flags ("IDLE+DRAIN") here, lower case in sinfo.
        return [NodeInfo(node.name, (node.state or "unknown").lower()) for node in found.values()]
