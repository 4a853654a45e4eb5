"""`dynarl doctor`: can this machine, this Python and this Slurm run dynarl?"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dynarl.cli import output

if TYPE_CHECKING:
    from dynarl.config.schema import Config
    from dynarl.slurm.preflight import Finding

# Modules that roles need, and the extra that brings them. Looked for, not imported: torch alone takes seconds.
PARTS = [
    ("mpi", ["mpi4py"]),
    ("train", ["torch", "megatron", "safetensors"]),
    ("rollout", ["torch", "tokenizers", "safetensors", "reasoning_gym"]),
    ("report", ["matplotlib"]),
]
MPI_TIMEOUT_S = 30


@click.command("doctor", cls=output.Command)
@click.argument("config_file", metavar="[CONFIG]", required=False, type=click.Path(path_type=Path))
@output.format_option()
def command(config_file: Path | None, output_format: str) -> None:
    """Check this machine and its Slurm, for CONFIG if given. Exit code 4 if something has to be put right."""
    from dynarl.config import load
    from dynarl.slurm.preflight import Level

    config = load.load(config_file) if config_file else None
    findings = list(examine(config))
    if output_format == "json":
        output.print_json({"findings": [{"level": f.level.value, "topic": f.topic, "text": f.text} for f in findings]})
    else:
        for finding in findings:
            click.echo(f"{finding.level.value:<5}  {finding.topic:<10}  {finding.text}")
    if any(finding.level is Level.FAULT for finding in findings):
        raise SystemExit(4)


def examine(config: Config | None) -> Iterator[Finding]:
    """All findings: this Python, its MPI, the place of runs, then Slurm."""
    from dynarl.errors import SlurmError
    from dynarl.slurm import backend, preflight

    yield _finding(True, "python", f"{platform.python_version()} at {sys.executable}")
    for extra, modules in PARTS:
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        text = (
            f"{', '.join(modules)} found" if not missing else f"no {', '.join(missing)}: pip install 'dynarl[{extra}]'"
        )
        yield _finding(not missing, extra, text, preflight.Level.NOTE)
    if importlib.util.find_spec("mpi4py"):
        yield _mpi_library()
    yield _runs(config)
    try:
        client = backend.client()
    except SlurmError as error:
        yield _finding(False, "backend", str(error))
        return
    yield from preflight.check(client, config)


def _finding(good: bool, topic: str, text: str, otherwise: object = None) -> Finding:
    from dynarl.slurm.preflight import Finding, Level

    return Finding(Level.OK if good else otherwise or Level.FAULT, topic, text)


def _mpi_library() -> Finding:
    """Which MPI library mpi4py loads. In a child: loading one may end the process."""
    from dynarl.slurm import environ

    code = "from mpi4py import MPI; print(MPI.Get_library_version())"
    try:
        result = subprocess.run(
            [sys.executable, "-c", code],
            env=environ.for_worker(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=MPI_TIMEOUT_S,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return _finding(False, "libmpi", f"MPI_Init took more than {MPI_TIMEOUT_S} s outside of a job")
    if result.returncode:
        last = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        return _finding(
            False,
            "libmpi",
            f"mpi4py finds no MPI library that works: {last}. Install Open MPI, or load the site's module",
        )
    return _finding(True, "libmpi", result.stdout.split(",")[0].strip())


def _runs(config: Config | None) -> Finding:
    from dynarl import rundir
    from dynarl.slurm.preflight import Level

    root = rundir.runs_root(config.run.root if config else None)
    place = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        return _finding(False, "runs", f"{root} cannot be written; set run.root or {rundir.ENV_ROOT}")
    if rundir.is_local(root):
        return _finding(
            False, "runs", f"{root}: other nodes hardly see this; set run.root or {rundir.ENV_ROOT}", Level.NOTE
        )
    return _finding(True, "runs", f"{root} (must be on a file system that all nodes share)")
