"""The batch job: which script, with which options of sbatch, and the site's part of it.

There is one script, `slurm/dynarl.slurm`. `dynarl submit` gives sbatch the options that follow from the configuration,
which win over the defaults in the script; by hand one gives them oneself. The script calls this module for the shell
lines that come from the configuration.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from dynarl.config import load, validate
from dynarl.config.schema import Config
from dynarl.errors import DynarlError
from dynarl.slurm import cli_client, preflight, timelimit

SHARE = Path(__file__).resolve().parents[1] / "share"


def script() -> Path:
    """The job script: that of the checkout, or the one that was installed with the package."""
    return (SHARE / "slurm" / "dynarl.slurm").resolve()


def home() -> Path | None:
    """The checkout that this package runs from; None where it is installed."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "slurm" / "dynarl.slurm").is_file() else None


def sbatch_options(config: Config, run: Path) -> list[str]:
    """Options that follow from the configuration; `run` is the run's directory."""
    cluster = config.cluster
    options = [
        f"--job-name={config.run.name}",
        f"--nodes={cluster.nodes}",
        f"--time={timelimit.formatted(timelimit.minutes(cluster.time))}",
        f"--signal=B:USR1@{cluster.signal_before_s}",
        "--no-kill",
        "--requeue" if cluster.requeue else "--no-requeue",
        "--open-mode=append",
        f"--output={str(run).replace('%', '%%')}/slurm-%j.out",
    ]
    for name in ("partition", "account", "qos"):
        if (value := getattr(cluster, name)) is not None:
            options.append(f"--{name}={value}")
    if cluster.device == "cuda":
        options.append(f"--gpus-per-node={cluster.devices_per_node}")
    return options + cluster.sbatch_args


def sbatch_command(config: Config, run: Path, resume: bool = False) -> list[str]:
    """The whole argv of sbatch. --parsable makes the job id the only thing it prints."""
    arguments = [str(script()), str(run / "config.yaml"), "--run-dir", str(run), *(["--resume"] if resume else [])]
    return ["sbatch", "--parsable", *sbatch_options(config, run), *arguments]


def environment(python: str = sys.executable) -> dict[str, str]:
    """What the job script has to be told: where it runs from, and that its configuration is complete."""
    found = {"DYNARL_PYTHON": python, "DYNARL_CLUSTER": load.NO_CLUSTER}
    if (root := home()) is not None:
        found["DYNARL_HOME"] = str(root)
    return found


def prologue(config: Config) -> str:
    """Shell lines for the job script: modules, then the site's own lines. One that fails ends the job."""
    lines = []
    if config.cluster.modules:
        # A batch shell is no login shell: where sbatch did not hand on the function `module`, it has to be defined.
        lines += [
            "if ! command -v module >/dev/null; then",
            "    for file in /etc/profile.d/lmod.sh /etc/profile.d/modules.sh; do [ ! -r $file ] || . $file; done",
            "fi",
        ]
        lines += [f"module load {shlex.quote(name)} || exit" for name in config.cluster.modules]
    lines += [f"{{ {line}\n}} || exit" for line in config.cluster.prologue]
    return "\n".join(lines)


def main() -> None:
    """Inside the job: check what can be checked before anything starts, and print the prologue."""
    parser = argparse.ArgumentParser(prog="dynarl.slurm")
    parser.add_argument("config")
    arguments, _ = parser.parse_known_args()  # the others are the controller's
    try:
        config = load.load(arguments.config)
        if nodes := os.environ.get("SLURM_JOB_NUM_NODES"):
            validate.check_allocation(config, int(nodes))
        preflight.require(cli_client.CliClient(), config, allocated=True)
        print(prologue(config))
    except DynarlError as error:
        print(f"dynarl.slurm: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
