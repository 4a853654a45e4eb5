"""Slurm's command line tools on top of a FakeClient, printing what the real ones print (22.05). CliClient runs against
it.
"""

from __future__ import annotations

import subprocess

from dynarl.errors import SlurmError
from dynarl.slurm import hostlist
from dynarl.slurm.client import Presence
from dynarl.slurm.fake import FakeClient


class FakeTools:
    """Callable as CliClient's `run`. `script` holds (stdout, stderr, status) or exceptions that come first."""

    def __init__(self, slurm: FakeClient | None = None, *script):
        self.slurm, self.script = slurm or FakeClient(), list(script)
        self.commands: list[list[str]] = []
        self.environments: list[dict] = []

    def __call__(self, command, environment):
        self.commands.append(list(command))
        self.environments.append(dict(environment))
        if self.script:
            entry = self.script.pop(0)
            if isinstance(entry, BaseException):
                raise entry
            out, err, status = entry
        else:
            out, err, status = self._answer(list(command))
        return subprocess.CompletedProcess(command, status, out.encode("utf-8", "surrogateescape"), err.encode())

    def _answer(self, command):
        tool, *arguments = command
        options = dict(word.split("=", 1) for word in arguments if word.startswith("--") and "=" in word)
        words = [word for word in arguments if not word.startswith("-")]
        try:
            return getattr(self, "_" + tool)(arguments, options, words), "", 0
        except SlurmError as error:
            return "", str(error), 1

    def _sbatch(self, arguments, options, words):
        return self.slurm.submit(["sbatch", *arguments], {}) + "\n"

    def _squeue(self, arguments, options, words):
        assert options["--format"] == "%i|%T|%N|%r|%j" and options["--states"] == "all"
        job = self.slurm.job(options["--jobs"])
        if job.presence is not Presence.PRESENT:
            raise SlurmError("slurm_load_jobs error: Invalid job id specified")
        return f"{job.id}|{job.state}|{hostlist.fold(job.nodes)}|{job.detail}|{job.name}\n"

    def _scancel(self, arguments, options, words):
        self.slurm.cancel(words[0], options.get("--signal"), "--batch" in arguments)
        return ""

    def _scontrol(self, arguments, options, words):
        if words[0] == "requeue":
            self.slurm.requeue(words[1])
            return ""
        if words[:2] == ["show", "job"]:
            found = self.slurm.restarts(words[2])
            return f"JobId={words[2]} JobName= Requeue=7 Restarts=7 x Requeue={int(found.allowed)} Restarts={found.count} BatchFlag=1\n"
        lines = "".join(f"{key:<24}= {value}\n" for key, value in self.slurm.config().items())
        return f"Configuration data as of 2026-01-31T12:00:00\n{lines}\nSlurmctld(primary) at head is UP\n"

    def _sinfo(self, arguments, options, words):
        if "--Node" in arguments:
            return "".join(f"{node.name}|{node.state}\n" * 2 for node in self.slurm.nodes())  # as with two partitions
        return "".join(
            f"{'up' if part.up else 'down'}|{part.nodes}|1-{part.max_nodes or 'infinite'}|{part.time_limit}|"
            f"{part.name}{'*' if part.default else ''}\n"
            for part in self.slurm.partitions()
        )

    def _srun(self, arguments, options, words):
        if "--version" in arguments:
            return f"slurm-wlm {self.slurm.version()}\n"
        plain = [name for name in self.slurm.mpi_plugins() if name != "pmix_v4"]
        return (
            "MPI plugin types are...\n"
            + "".join(f"\t{name}\n" for name in plain)
            + "specific pmix plugin versions available: pmix_v4\n"
        )
