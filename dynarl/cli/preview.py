"""What `dynarl submit --dry-run` shows: every line that would be run, and every variable that would be seen."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from dynarl import rundir
from dynarl.config.schema import Config
from dynarl.slurm import environ, jobscript, srun, submission

ADDRESS = "tcp://HEAD-NODE:PORT"


def preview(config: Config, run: Path | None = None) -> dict[str, Any]:
    """As JSON. `run`: the run to resume; None: a new one, whose directory does not exist yet."""
    from dynarl.controller.fleet import step_spec
    from dynarl.controller.nodes import assign_homes

    resume = run is not None
    run = run or rundir.runs_root(config.run.root) / f"{config.run.name}-YYYYMMDD-HHMMSS"
    nodes = [f"node{number}" for number in range(1, config.cluster.nodes + 1)]
    spec = step_spec(config, assign_homes(config, nodes), ADDRESS, run, attempt=1)
    inherited = submission.environment()
    return {
        "script": str(jobscript.script()),
        "script_text": jobscript.script().read_text(),
        "prologue": jobscript.prologue(config),
        "sbatch": jobscript.sbatch_command(config, run, resume),
        "controller": [
            sys.executable,
            "-u",
            "-m",
            "dynarl.controller",
            "--config",
            str(run / "config.yaml"),
            "--run-dir",
            str(run),
            *(["--resume"] if resume else []),
        ],
        "srun": srun.command_line(spec),
        "nodes": nodes,
        "environment": environ.masked(inherited),
        "roles": {
            role: environ.masked(_role_settings(config, role))
            for role in ("rollout", "inference", "training", "environment")
        },
        "roles_inherit": sorted(environ.for_worker(inherited)),
    }


def _role_settings(config: Config, role: str) -> dict[str, str]:
    """What a role worker gets on top of what it inherits; of the first device, where there are several."""
    settings = environ.identity(role, 0)
    if role != "environment":
        settings |= environ.model_settings(config.cluster.interface)
    settings |= config.cluster.env
    if config.cluster.device == "cuda" and role != "environment":
        settings["CUDA_VISIBLE_DEVICES"] = "one of " + ",".join(
            str(number) for number in range(config.cluster.devices_per_node)
        )
    return settings


def rendered(data: dict[str, Any]) -> str:
    """For reading: shell text that could be pasted, with headings as comments."""
    told = {
        name: data["environment"][name]
        for name in ("DYNARL_PYTHON", "DYNARL_HOME", "DYNARL_CLUSTER")
        if name in data["environment"]
    }
    inherited = {name: data["environment"][name] for name in data["roles_inherit"] if name not in told}
    parts = [
        (f"Job script: {data['script']}", data["script_text"].rstrip()),
        ("Lines that it evaluates (cluster.modules, cluster.prologue)", data["prologue"] or "# none"),
        ("Submitted with", _assignments(told, " ") + " " + srun.rendered(data["sbatch"])),
        ("Which becomes, on the first node", shlex.join(data["controller"])),
        (
            f"Which starts the step (the names {data['nodes'][0]}... stand for the nodes of the allocation)",
            srun.rendered(data["srun"]),
        ),
        *(
            (f"Variables that a worker for {role} gets (its first device)", _assignments(settings, "\n"))
            for role, settings in data["roles"].items()
        ),
        (
            "Variables that every worker inherits from here; Slurm's and MPI's are taken out",
            _assignments(told | inherited, "\n"),
        ),
    ]
    return "\n\n".join(f"# --- {heading}\n{text}" for heading, text in parts)


def _assignments(environment: dict[str, str], separator: str) -> str:
    return separator.join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
