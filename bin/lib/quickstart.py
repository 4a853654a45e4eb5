"""The second half of bin/quickstart, in the virtual environment that the first half made: Slurm up, job, results, Slurm down."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dynarl.config import load, validate
from dynarl.config.schema import Config
from dynarl.errors import ConfigError

TOP = Path(__file__).resolve().parents[2]
MINISLURM = str(TOP / "bin" / "minislurm")
DYNARL = str(TOP / "bin" / "dynarl")
# A cluster of its own, so that one that somebody has started for other work is left alone.
CLUSTER = ["--name", "quickstart"]
SITE_ANSWER_TIMEOUT_S = 10


class Failed(RuntimeError):
    """Something that was started here did not work; its own words have been printed already, the message says what it was."""


def main() -> int:
    args = parse()
    # So that a closed terminal or a `kill` runs the same clean-up as Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        config, overrides = load_job(args.config, args.nodes)
        with slurm(args, config.cluster.nodes) as environment:
            return run_job(args.config, overrides, environment)
    except ConfigError as error:
        return complain(str(error), 2)
    except Failed as error:
        return complain(str(error), 1)
    except KeyboardInterrupt:
        return complain("interrupted", 130)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bin/quickstart")
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes of the Slurm and of the job [as in the configuration]")
    parser.add_argument("--config", type=Path, default=TOP / "configs" / "jobs" / "arithmetic-grpo.yaml", metavar="FILE", help="the job")
    parser.add_argument("--keep", action="store_true", help="leave the Slurm running afterwards")
    parser.add_argument("--use-site-slurm", action="store_true", help="run in the Slurm that this machine has")
    return parser.parse_args()


def complain(message: str, status: int) -> int:
    print(f"quickstart: {message}", file=sys.stderr)
    return status


def load_job(path: Path, nodes: int | None) -> tuple[Config, list[str]]:
    """The checked configuration, and the `--set` options that fit it to `nodes`. Raises ConfigError."""
    overrides = []
    if nodes is not None:
        split = load.load_layers(path).config.split
        # More or fewer nodes generate; the trainers and scorers stay as the job has them.
        overrides = [f"cluster.nodes={nodes}", f"split.rollout={nodes - split.training - split.inference}"]
        if nodes <= split.training + split.inference:
            raise ConfigError(
                f"--nodes {nodes}: {path.name} has {split.training} training and {split.inference} inference nodes, so it takes "
                f"at least {split.training + split.inference + 1}. A job for one node is configs/jobs/one-node.yaml")
    loaded = load.load_layers(path, overrides)
    validate.check(loaded.config)
    return loaded.config, overrides


# Slurm


@contextlib.contextmanager
def slurm(args: argparse.Namespace, nodes: int) -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands work. A Slurm that was started for it is stopped at the end."""
    site = site_slurm()
    if args.use_site_slurm:
        if site is None:
            raise Failed("--use-site-slurm: no Slurm answers here (`scontrol ping` and `squeue` say why)")
        say(f"Using this machine's Slurm ({site})")
        yield job_environment()
        return
    if site is not None:
        say(f"This machine has a working Slurm ({site}). It is left alone; --use-site-slurm would run the job in it.")
    ours = not is_up()
    if ours:
        say(f"Starting a Slurm of {nodes} node{'s' * (nodes != 1)} on this machine")
    shares = [option for directory in private_directories() for option in ("--share", directory)]
    try:
        # Also where it is up: then it checks that it is the one that is needed.
        up = subprocess.run([MINISLURM, "up", *CLUSTER, "--nodes", str(nodes), "--cpus-per-node", "2", *shares], stdout=subprocess.PIPE, text=True)
        say("".join(f"  {line}\n" for line in up.stdout.splitlines() if not line.startswith("use it:")).rstrip())
        if up.returncode:
            raise Failed("the Slurm did not start")
        yield job_environment(minislurm_variables())
    finally:
        if ours and not args.keep:
            say("Stopping the Slurm")
            stop()
        elif is_up():
            say("The Slurm is still running. To use it, and to stop it:")
            say(f'    eval "$(bin/minislurm env {shlex.join(CLUSTER)})"')
            say(f"    bin/minislurm down {shlex.join(CLUSTER)}")


def site_slurm() -> str | None:
    """Version of a Slurm that works here already; None if there is none."""
    if "MINISLURM_DIR" in os.environ:
        return None  # this shell is pointed at a minislurm
    try:
        for command in (["scontrol", "ping"], ["squeue", "-h"]):
            subprocess.run(command, check=True, capture_output=True, timeout=SITE_ANSWER_TIMEOUT_S)
        return subprocess.run(["srun", "--version"], check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def is_up() -> bool:
    done = subprocess.run([MINISLURM, "status", *CLUSTER, "-o", "json"], capture_output=True, text=True)
    return done.returncode == 0 and json.loads(done.stdout)["state"] == "up"


def minislurm_variables() -> dict[str, str]:
    """What `minislurm env` exports."""
    lines = subprocess.run([MINISLURM, "env", *CLUSTER], check=True, capture_output=True, text=True).stdout.splitlines()
    words = [shlex.split(line)[1] for line in lines if line.startswith("export ")]
    return dict(word.split("=", 1) for word in words)


def private_directories() -> list[str]:
    """Directories that the nodes would not see by themselves: their /tmp is private, and runs may be kept in ours."""
    runs = os.environ.get("DYNARL_RUNS")
    if not runs:
        return []
    Path(runs).mkdir(parents=True, exist_ok=True)
    return [runs]


def stop() -> None:
    """Whatever happens meanwhile, this has to be finished: a second Ctrl-C must not leave a Slurm behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    subprocess.run([MINISLURM, "down", *CLUSTER], stdout=subprocess.DEVNULL)


def job_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """For the command line and the job: this interpreter on every node."""
    return {**os.environ, **(extra or {}), "DYNARL_PYTHON": sys.executable}


# The job


def run_job(config: Path, overrides: list[str], environment: dict[str, str]) -> int:
    say(f"Submitting {config.name}")
    options = [word for override in overrides for word in ("--set", override)]
    run = answer([DYNARL, "submit", str(config), *options], environment)["directory"]
    began = time.monotonic()
    try:
        subprocess.run([DYNARL, "watch", run], env=environment)
    except BaseException:
        say(f"Cancelling {run}")
        subprocess.run([DYNARL, "cancel", run], env=environment, stdout=subprocess.DEVNULL)
        raise
    status = answer([DYNARL, "status", run], environment)
    report(status, time.monotonic() - began, environment)
    return 0 if status["state"] == "completed" else 1


def report(status: dict, wall_s: float, environment: dict[str, str]) -> None:
    run, accuracy, moves, samples = status["run"], status["eval"], status["moves"], status["samples"]
    say("")
    say(f"{run}: {status['state']} after {wall_s:.0f} s, {status['iterations']} iterations")
    if status["state"] != "completed":
        say(f"  reason              {status['reason']}")
        say(f"  logs                {status['logs']}")
    if None not in (accuracy["start"], accuracy["end"]):
        say(f"  held-out accuracy   {percent(accuracy['start'])} before, {percent(accuracy['end'])} after")
    say(f"  moves               {moves['committed']} committed, {moves['cancelled']} cancelled")
    say(f"  samples             {samples['trained']} trained, {samples['lost']} lost, {samples['doubled']} doubled")
    say(f"  everything is in    {status['path']}")
    drawn = subprocess.run([DYNARL, "timeline", run, "-o", "png"], env=environment, capture_output=True, text=True)
    if drawn.returncode == 0:
        say(f"  timeline            {drawn.stdout.strip()}")
    else:
        say(f"  timeline            not drawn: {drawn.stderr.strip()}")


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


# Helpers


def say(text: str) -> None:
    # The terminal may be gone while there is still something to stop.
    with contextlib.suppress(OSError):
        print(text, flush=True)


def answer(command: list[str], environment: dict[str, str]) -> dict:
    """What a dynarl command says as JSON."""
    done = subprocess.run([*command, "-o", "json"], env=environment, stdout=subprocess.PIPE, text=True)
    data = json.loads(done.stdout) if done.stdout.strip() else {}
    if done.returncode:
        raise Failed(data.get("error", {}).get("message", f"{shlex.join(command[:2])} failed"))
    return data


if __name__ == "__main__":
    sys.exit(main())
