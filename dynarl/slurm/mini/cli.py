"""The command line: arguments in, text out. Exit status 0 done, 1 failed with one message, 2 wrong usage."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

import dynarl
from dynarl.slurm.mini import MiniSlurmError, cluster, preflight
from dynarl.slurm.mini.node import PRIVATE
from dynarl.slurm.mini.spec import ClusterSpec, Paths
from dynarl.slurm.mini.status import status

DEFAULT_NAME = "mini"


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    preflight.complete_path()
    # So that `up` takes back what it began also when it is ended by a timeout or a test runner.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return args.command(args, Paths.of(_state_dir(args)))
    except (MiniSlurmError, OSError) as error:
        print(f"minislurm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("minislurm: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--state-dir", metavar="DIR", help="files of the cluster [$MINISLURM_DIR or ~/.cache/dynarl/minislurm]"
    )
    common.add_argument("--name", default=DEFAULT_NAME, help="cluster name; each has files of its own [mini]")
    parser = argparse.ArgumentParser(prog="minislurm", description="A real Slurm of N nodes on this machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, parents=[common], help=help, description=help)
        sub.set_defaults(command=function)
        return sub

    up = add("up", _up, "start a cluster and wait until its nodes are idle")
    up.add_argument("--nodes", type=int, required=True, metavar="N")
    up.add_argument("--gpus-per-node", type=int, default=0, metavar="G", help="fake GPUs [0]")
    cpus = os.cpu_count()
    up.add_argument("--cpus-per-node", type=int, default=cpus, metavar="C", help=f"CPUs Slurm believes in [{cpus}]")
    up.add_argument("--cpu-quota", type=float, metavar="Q", help="cores of compute per node, e.g. 0.25 [no limit]")
    up.add_argument(
        "--share", action="append", default=[], metavar="DIR", help="directory under /tmp or /dev/shm that nodes see"
    )
    up.add_argument("--slurmd-timeout", type=int, default=10, metavar="S", help="silence that makes a node DOWN [10 s]")
    add("down", _down, "stop it and leave nothing but its logs")
    add("status", _status, "what is running").add_argument("-o", choices=("table", "json"), default="table")
    add("env", _env, "shell lines that make srun, sbatch, squeue use it")
    fail = add("fail-node", _fail, "take the power from a node")
    fail.add_argument("node")
    fail.add_argument("--no-wait", action="store_true", help="do not wait until Slurm has noticed")
    add("restore-node", _restore, "start a node that failed").add_argument("node")
    run = add("exec", _exec, "run a command on a node as if logged in there (outside of any job)")
    run.add_argument("node")
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND")
    return parser


def _state_dir(args: argparse.Namespace) -> str:
    if args.state_dir:
        return args.state_dir
    if os.environ.get("MINISLURM_DIR") and args.name == DEFAULT_NAME:
        return os.environ["MINISLURM_DIR"]
    suffix = "" if args.name == DEFAULT_NAME else f"-{args.name}"
    return os.path.expanduser(f"~/.cache/dynarl/minislurm{suffix}")


def _say(text: str) -> None:
    print(text, flush=True)


def _up(args: argparse.Namespace, paths: Paths) -> int:
    spec = ClusterSpec(
        nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        cpus_per_node=args.cpus_per_node,
        cpu_quota=args.cpu_quota,
        name=args.name,
        slurmd_timeout_s=args.slurmd_timeout,
        shares=shares(paths, args.share),
    )
    cluster.up(paths, spec, _say)
    option = f" --state-dir {shlex.quote(args.state_dir)}" if args.state_dir else ""
    option += f" --name {args.name}" if args.name != DEFAULT_NAME else ""
    print(f'use it:   eval "$({sys.argv[0] if sys.argv[0].endswith("minislurm") else "bin/minislurm"} env{option})"')
    return 0


def shares(paths: Paths, asked: list[str]) -> tuple[str, ...]:
    """Directories under a private place of the nodes that they have to see, without those inside another one.

    These are the ones asked for, the state directory, the current directory, this checkout, the home directory, the
    active virtual environment and this Python. MiniSlurmError if an asked for one is no directory or is a private
    place itself.
    """
    wanted = []
    for directory in asked:
        real = os.path.realpath(directory)
        if not os.path.isdir(real):
            raise MiniSlurmError(f"--share {directory}: no such directory")
        if real in PRIVATE:
            raise MiniSlurmError(f"--share {directory}: {real} is private to each node; share a directory in it")
        wanted.append(real)
    checkout = str(Path(dynarl.__file__).parents[1])
    defaults = [os.getcwd(), checkout, "~", os.environ.get("VIRTUAL_ENV", ""), sys.prefix, sys.base_prefix]
    wanted += [os.path.realpath(os.path.expanduser(directory)) for directory in defaults if directory]
    below = {d for d in (str(paths.root), *wanted) if d.startswith(tuple(f"{top}/" for top in PRIVATE))}
    return tuple(sorted(d for d in below if not any(d.startswith(other + "/") for other in below)))


def _down(args: argparse.Namespace, paths: Paths) -> int:
    print(f"down: logs are in {paths.log}" if cluster.down(paths, _say) else f"no cluster in {paths.root}")
    return 0


def _status(args: argparse.Namespace, paths: Paths) -> int:
    data = status(paths)
    if args.o == "json":
        print(json.dumps(data, indent=2))
        return 0
    print(f"{data['state']}  {data['state_dir']}")
    for node in data["nodes"]:
        power = "on" if node["powered"] else "off"
        slurm = node["slurm"] or "-"
        print(f"  {node['name']:<6}{power:<5}{slurm:<12}{node['address']:<16}{node['processes']} processes")
    return 0


def _env(args: argparse.Namespace, paths: Paths) -> int:
    for key, value in environment(paths).items():
        print(f"export {key}={shlex.quote(value)}")
    return 0


def environment(paths: Paths) -> dict[str, str]:
    """Variables that point Slurm's commands and minislurm itself at this cluster."""
    cluster.running(paths)
    variables = {"SLURM_CONF": str(paths.slurm_conf), "MINISLURM_DIR": str(paths.root)}
    srun = shutil.which("srun")
    if srun and os.path.dirname(srun) not in ORIGINAL_PATH:
        variables["PATH"] = ":".join([*ORIGINAL_PATH, os.path.dirname(srun)])
    return variables


ORIGINAL_PATH = os.environ.get("PATH", "").split(":")


def _fail(args: argparse.Namespace, paths: Paths) -> int:
    cluster.fail_node(paths, args.node, _say, wait=not args.no_wait)
    return 0


def _restore(args: argparse.Namespace, paths: Paths) -> int:
    cluster.restore_node(paths, args.node, _say)
    return 0


def _exec(args: argparse.Namespace, paths: Paths) -> int:
    preflight.check_root()
    init = cluster.running(paths, args.node).init(args.node)
    if init is None:
        raise MiniSlurmError(f"{args.node} is off")
    argv = [word for i, word in enumerate(args.argv) if i or word != "--"] or ["/bin/bash"]
    command = ["nsenter", "-t", str(init.pid), "-m", "-n", "-u", "-i", "-r", f"--wdns={os.getcwd()}", "--", *argv]
    os.execvpe(command[0], command, {**os.environ, "SLURM_CONF": str(paths.slurm_conf)})
