"""Which Client is used: the tools, unless $DYNARL_SLURM says pyslurm."""

from __future__ import annotations

import os

from dynarl.errors import SlurmError
from dynarl.slurm.client import Client

ENV_BACKEND = "DYNARL_SLURM"


def client(name: str | None = None) -> Client:
    """Raises SlurmError for an unknown name, or where pyslurm is asked for and does not work."""
    name = name or os.environ.get(ENV_BACKEND) or "cli"
    if name == "cli":
        from dynarl.slurm.cli_client import CliClient

        return CliClient()
    if name == "pyslurm":
        from dynarl.slurm.pyslurm_client import PyslurmClient

        return PyslurmClient()
    raise SlurmError(f"{ENV_BACKEND}={name}: expected cli or pyslurm")
