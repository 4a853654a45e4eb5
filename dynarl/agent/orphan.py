"""When an agent's controller is gone, and the end that the agent puts to the job then."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from dynarl import rundir
from dynarl.errors import SlurmError
from dynarl.hypergraph import journal
from dynarl.slurm import hostlist, orphan
from dynarl.slurm.client import Client

log = logging.getLogger(__name__)

# The controller says something every 2 s; a silent one is gone, or the network to it is.
SILENCE_S = 60.0
LOOK_S = 5.0
# By then a dead controller has written its last record, and a living one has not yet noticed that this agent is cut off
# (fleet.AGENT_SILENCE_S).
MARK_S = 10.0
# As those of the controller.
EXIT_CODES = {"requeued": 75, "failed": 1, "cancelled": 0}


class ControllerWatch:
    """Counts how long the controller has been silent. `gone`: for too long, and it had been there before."""

    def __init__(self, journal_path: Path):
        self._journal = journal_path
        self._silent_s = 0.0
        self._known = self.gone = False
        self._mark = 0

    def heard(self) -> None:
        self._silent_s, self._known = 0.0, True

    async def until_gone(self) -> None:
        """Returns after SILENCE_S without a word, LOOK_S later at most."""
        # Counted, not timed: if this process itself stands still for a while, it has not listened either.
        while self._silent_s <= SILENCE_S:
            await asyncio.sleep(LOOK_S)
            self._silent_s += LOOK_S
            if self._silent_s == MARK_S:
                self._mark = self._written()
        self.gone = self._known

    def runs_on(self) -> bool:
        """Whether the controller has written to the journal in its silence: then it does without this agent."""
        return self._written() != self._mark

    def _written(self) -> int:
        """Bytes of the journal. Opened, not looked up: on NFS only an open is promised to show what others wrote."""
        try:
            with open(self._journal, "rb") as file:
                return file.seek(0, os.SEEK_END)
        except OSError as error:
            log.error("the journal cannot be read: %s", error)
            return -1


def settle(
    client: Client, run: Path, node: str, max_requeues: int, watch: ControllerWatch, env: Mapping[str, str]
) -> None:
    """Ask Slurm to start this agent's job again, or to end it, and say so in the log and in the journal.

    Slurm then ends this process, but KillWait after a TERM; until then the journal can be written.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    restarts, cancel_asked = int(env.get("SLURM_RESTART_COUNT") or 0), "cancel" in os.listdir(run / "control")
    lost = orphan.Orphan(env["SLURM_JOB_ID"], node, restarts, max_requeues, cancel_asked)
    listed = hostlist.expand(env.get("SLURM_JOB_NODELIST", ""))
    gone = f"the controller{f' on {listed[0]}' if listed else ''} has not answered for {SILENCE_S:.0f} s"
    try:
        outcome = orphan.settle(client, lost, watch.runs_on)
    except SlurmError as error:
        log.error("%s, and job %s may be left as it is: %s", gone, lost.job_id, error)
        return
    log.error("%s: %s", gone, outcome.text)
    if outcome.state is not None:
        reason, code = f"{gone}: {node} {outcome.text}", EXIT_CODES[outcome.state]
        try:
            journal.add_last_word(rundir.journal(run), "run_ended", state=outcome.state, reason=reason, exit_code=code)
        except OSError as error:
            log.error("the journal cannot be written: %s", error)
