"""The nodes of the job: which there are, which are left, and which home role each has."""

from __future__ import annotations

import logging
import os
import subprocess

from dynarl.config.schema import Config
from dynarl.errors import ConfigError
from dynarl.slurm import environ, hostlist

log = logging.getLogger(__name__)


def allocated_nodes() -> list[str]:
    """Node names of this job, as Slurm has them. Raises ConfigError outside of a job."""
    listed = os.environ.get("SLURM_JOB_NODELIST")
    if not listed:
        raise ConfigError(
            "not inside a Slurm job (SLURM_JOB_NODELIST is not set): submit with `dynarl submit` "
            "or `sbatch slurm/dynarl.slurm`"
        )
    return hostlist.expand(listed)


def surviving_nodes(nodes: list[str]) -> list[str]:
    """Those of `nodes` that Slurm does not report as down; all of them when Slurm does not answer."""
    env = {k: v for k, v in environ.for_srun(os.environ).items() if not k.startswith("SINFO_")}
    try:
        text = subprocess.run(
            ["sinfo", "-h", "-N", "-n", ",".join(nodes), "-o", "%N|%T"],
            capture_output=True,
            text=True,
            env=env,
            timeout=30,
            check=True,
        ).stdout
    except (subprocess.SubprocessError, OSError) as error:
        log.warning("sinfo does not say which nodes are left (%s); trying with %s", error, ", ".join(nodes))
        return nodes
    states = dict(line.split("|") for line in text.split() if "|" in line)

    def usable(state: str) -> bool:
        # An asterisk: the node does not respond.
        return "*" not in state and not any(word in state for word in ("down", "fail", "unknown"))

    return [node for node in nodes if usable(states.get(node, "").lower())]


def assign_homes(config: Config, nodes: list[str]) -> dict[str, str]:
    """Home role of each node: training first (it owns the optimizer), then rollout, then inference.

    With fewer nodes than the split asks for, rollout gives up nodes first, then inference. Raises ConfigError when
    there are too few for the roles that the policy needs.
    """
    split = config.split
    training = split.training
    if len(nodes) < training + (config.policy.name != "colocated"):
        raise ConfigError(
            f"{len(nodes)} node(s) are left ({', '.join(nodes)}), too few for {training} training node(s) "
            "and a rollout node"
        )
    inference = min(split.inference, max(0, len(nodes) - training - 1))
    roles = ["training"] * training + ["inference"] * inference
    roles += ["rollout"] * (len(nodes) - len(roles))
    return dict(zip(nodes, roles))
