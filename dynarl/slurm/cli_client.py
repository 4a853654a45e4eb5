"""The Client that calls Slurm's own tools and reads text. Works with every release, and a poll costs a few hundred
bytes.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from dynarl.errors import SlurmError
from dynarl.slurm import hostlist, jobid, version
from dynarl.slurm.client import Client, JobInfo, NodeInfo, PartitionInfo, Presence, Restarts, TransientError

log = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 60.0
RETRY_PAUSES_S = (1.0, 3.0, 8.0)

# slurmctld is busy, restarting or failing over; the same question may be answered a little later.
TRANSIENT = re.compile(
    r"socket timed out|unable to contact slurm controller|connection refused|connection reset"
    r"|zero bytes were transmitted|communication connection failure|temporarily unable"
    r"|resource temporarily unavailable|in standby mode",
    re.IGNORECASE,
)
# Of these, the ones after which a job may have been accepted all the same.
PERHAPS_DONE = re.compile(r"timed out|zero bytes|reset", re.IGNORECASE)
NO_SUCH_JOB = re.compile(r"invalid job id|job/step already completing or completed", re.IGNORECASE)

Run = Callable[[Sequence[str], Mapping[str, str]], "subprocess.CompletedProcess[bytes]"]


def _run(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_TIMEOUT_S
    )


class CliClient(Client):
    """`run` and `pause` are replaced in tests."""

    name = "cli"

    def __init__(self, run: Run = _run, pause: Callable[[float], None] = time.sleep):
        self._run, self._pause = run, pause

    def version(self) -> version.Version:
        return version.parse(self._ask(["srun", "--version"]))

    def submit(self, command: Sequence[str], environment: Mapping[str, str]) -> str:
        output = self._ask(command, environment, once_if=PERHAPS_DONE)
        return str(jobid.from_sbatch(output).job)

    def job(self, job_id: str) -> JobInfo:
        # The free text comes last, since a name may hold the separator. Without --states finished jobs are left out.
        command = ["squeue", "--noheader", f"--jobs={job_id}", "--states=all", "--format=%i|%T|%N|%r|%j"]
        try:
            output = self._ask(command)
        except TransientError as error:
            return JobInfo(job_id, Presence.UNKNOWN, detail=str(error))
        except SlurmError as error:
            if NO_SUCH_JOB.search(str(error)):
                return JobInfo(job_id, Presence.ABSENT)
            raise
        for line in output.splitlines():
            fields = line.strip().split("|", 4)
            if len(fields) == 5 and fields[0] == job_id:
                _, state, nodes, reason, name = fields
                return JobInfo(job_id, Presence.PRESENT, state, tuple(hostlist.expand(nodes)), reason, name)
        return JobInfo(job_id, Presence.ABSENT)

    def cancel(self, job_id: str, signal: str | None = None, batch_only: bool = False) -> None:
        options = ([f"--signal={signal}"] if signal else []) + (["--batch"] if batch_only else [])
        self._ask(["scancel", *options, job_id])

    def restarts(self, job_id: str) -> Restarts:
        output = self._ask(["scontrol", "--oneliner", "show", "job", job_id])
        # Together, and the last of that kind: the job's name may hold anything.
        found = re.findall(r" Requeue=(\d+) Restarts=(\d+) ", output)
        if not found:
            raise SlurmError(f"scontrol does not say how often job {job_id} was started: {output.strip()}")
        allowed, count = found[-1]
        return Restarts(allowed != "0", int(count))

    def requeue(self, job_id: str) -> None:
        self._ask(["scontrol", "requeue", job_id])

    def nodes(self) -> list[NodeInfo]:
        found: dict[str, NodeInfo] = {}  # a node of two partitions is listed twice
        for line in self._ask(["sinfo", "--noheader", "--Node", "--format=%N|%T"]).splitlines():
            name, _, state = line.strip().partition("|")
            found[name] = NodeInfo(name, state)
        return list(found.values())

    def partitions(self) -> list[PartitionInfo]:
        found = []
        for line in self._ask(["sinfo", "--noheader", "--format=%a|%D|%s|%l|%P"]).splitlines():
            available, nodes, size, limit, name = line.strip().split("|", 4)
            largest = size.rpartition("-")[2]
            found.append(
                PartitionInfo(
                    name.removesuffix("*"),
                    name.endswith("*"),
                    available == "up",
                    int(nodes),
                    None if largest == "infinite" else int(largest),
                    limit,
                )
            )
        return found

    def config(self) -> dict[str, str]:
        pairs = (
            line.partition("=") for line in self._ask(["scontrol", "show", "config"]).splitlines() if " = " in line
        )
        return {key.strip(): value.strip() for key, _, value in pairs}

    def mpi_plugins(self) -> list[str]:
        # The list comes on stdout or stderr, by release; from 22.05 on the versions of pmix are on a line of their own.
        plugins = []
        for line in self._ask(["srun", "--mpi=list"], both=True).splitlines():
            plugins += re.findall(r"[\w]+", line.rpartition(":")[2]) if ":" in line or len(line.split()) == 1 else []
        return plugins

    def _ask(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        once_if: re.Pattern[str] | None = None,
        both: bool = False,
    ) -> str:
        """What the tool printed (with `both`, also on stderr). Retries what may pass; never where `once_if` matches."""
        # Bytes, decoded here: names of jobs need not be UTF-8.
        if environment is None:
            environment = _plain_environment(os.environ)
        for pause_s in (*RETRY_PAUSES_S, None):
            try:
                result = self._run(command, environment)
            except FileNotFoundError:
                raise SlurmError(
                    f"{command[0]} is not on the PATH. Is this a machine with Slurm (a login node)? "
                    "Perhaps a module has to be loaded"
                ) from None
            except subprocess.TimeoutExpired:
                message = f"socket timed out (no answer within {COMMAND_TIMEOUT_S:g} s)"
            else:
                errors = result.stderr.decode(errors="replace").strip()
                # An outage has been seen with exit status 0 and nothing but the message.
                if result.returncode == 0 and not (TRANSIENT.search(errors) and not result.stdout.strip()):
                    return (result.stdout + (result.stderr if both else b"")).decode(errors="replace")
                message = errors or result.stdout.decode(errors="replace").strip() or f"exit status {result.returncode}"
            if not TRANSIENT.search(message):
                raise SlurmError(f"{command[0]}: {message}")
            if once_if and once_if.search(message):
                raise TransientError(
                    f"{command[0]}: {message}\nIt may or may not have been accepted: look with squeue before "
                    "you submit again"
                )
            if pause_s is not None:
                log.warning("%s: %s; asking again in %g s", command[0], message, pause_s)
                self._pause(pause_s)
        raise TransientError(f"{command[0]}: {message} (asked {len(RETRY_PAUSES_S) + 1} times)")


def _plain_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without the user's own output formats and filters (SQUEUE_FORMAT, SINFO_STATES ...), and in English."""
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(("SQUEUE_", "SINFO_", "SCANCEL_", "SLURM_TIME_FORMAT"))
    }
    return kept | {"LC_ALL": "C"}
