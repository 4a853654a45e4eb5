"""The nodes of the job: which there are, which are left, and which home role each has."""

from __future__ import annotations

import logging
import os
import subprocess

from dynarl.config import degrees
from dynarl.config.schema import TAKING_TURNS, Config
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
    if len(nodes) < training + (config.policy.name not in TAKING_TURNS):
        raise ConfigError(
            f"{len(nodes)} node(s) are left ({', '.join(nodes)}), too few for {training} training node(s) "
            "and a rollout node"
        )
    inference = min(split.inference, max(0, len(nodes) - training - 1))
    roles = ["training"] * training + ["inference"] * inference
    roles += ["rollout"] * (len(nodes) - len(roles))
    return dict(zip(nodes, roles))


def with_trainers(config: Config, home: dict[str, str], num_training: int) -> dict[str, str]:
    """Home roles with `num_training` nodes in training (0: as in `home`). Rollout nodes join, the first ones first;
    those that leave generate. The first training node of `home` is always one. Raises ConfigError where too few are
    left.

    >>> with_trainers(Config(), {"n1": "training", "n2": "inference", "n3": "rollout", "n4": "rollout"}, 2)
    {'n1': 'training', 'n2': 'inference', 'n3': 'training', 'n4': 'rollout'}
    """
    if num_training in (0, sum(role == "training" for role in home.values())):
        return home
    able = [node for wanted in ("training", "rollout") for node, role in home.items() if role == wanted]
    most = len(able) - (config.policy.name not in TAKING_TURNS)
    if num_training > most:
        raise ConfigError(f"nodes={num_training} for the trainer, but of {len(able)} that train or generate {most} can")
    training = able[:num_training]
    others = {node: "rollout" if role == "training" else role for node, role in home.items()}
    return {node: "training" if node in training else role for node, role in others.items()}


def with_inference(home: dict[str, str], num_inference: int) -> dict[str, str]:
    """Home roles with `num_inference` nodes in inference. The last rollout nodes join, the last inference nodes leave
    to generate. Raises ConfigError where too few are left.

    >>> with_inference({"n1": "training", "n2": "inference", "n3": "rollout", "n4": "rollout"}, 2)
    {'n1': 'training', 'n2': 'inference', 'n3': 'rollout', 'n4': 'inference'}
    """
    present = [node for node, role in home.items() if role == "inference"]
    able = present + [node for node, role in reversed(home.items()) if role == "rollout"]
    if num_inference > len(able):
        raise ConfigError(f"{num_inference} nodes for inference, but only {len(able)} score or generate")
    inference = able[:num_inference]
    others = {node: "rollout" if role == "inference" else role for node, role in home.items()}
    return {node: "inference" if node in inference else role for node, role in others.items()}


def all_homes(config: Config, home: dict[str, str]) -> list[dict[str, str]]:
    """The home roles that the layouts of a run lead to, as far as there are nodes for them; with `plan.replan` any node
    may get any role that there is in the split."""
    found = [dict.fromkeys(home, role) for role in sorted(set(home.values()))] if config.plan.replan else []
    for each in degrees.every(config.training):
        try:
            found.append(with_trainers(config, home, each.nodes))
        except ConfigError:
            pass  # it is refused when its time comes
    return found
