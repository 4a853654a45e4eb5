"""Where everything of a run lies: one directory on the shared file system, one tiny function per path.

::

    <root>/latest -> <run id>                    run id = <name>-<YYYYmmdd-HHMMSS>[-n]
    <root>/<run id>/config.yaml                  as submitted, complete
                    journal.jsonl                see hypergraph/journal.py
                    metrics.jsonl  tensorboard/
                    trace.jsonl  trace.1.jsonl   see controller/trace.py; the second is the older part
                    jobs                         Slurm job ids of this run, one per line, oldest first
                    keys/                        0700; the only place for secrets
                    logs/<attempt>/              one directory for each start of the controller, from 1
                    checkpoints/step-000010/     complete once it holds COMPLETE
                    slurm-<job id>.out           what the batch script printed
"""

from __future__ import annotations

import difflib
import os
import re
import secrets
import shutil
import time
from pathlib import Path

from dynarl.errors import NotFoundError

ENV_ROOT = "DYNARL_RUNS"
COMPLETE = "COMPLETE"
RUN_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*-\d{8}-\d{6}(-\d+)?$")


class RunNotFound(NotFoundError):
    """No run, or more than one, goes by this name. The message lists the near ones."""


def runs_root(config_root: str | None = None) -> Path:
    """`run.root` of the config if set, else $DYNARL_RUNS, else ~/dynarl-runs; absolute."""
    return Path(config_root or os.environ.get(ENV_ROOT) or "~/dynarl-runs").expanduser().absolute()


def is_local(path: Path) -> bool:
    """Whether other nodes hardly see what is there."""
    return any(path.is_relative_to(place) for place in ("/tmp", "/dev/shm"))


def create(root: Path, name: str) -> Path:
    """Make the directory of a new run and return it. Two that start in the same second get different ones."""
    root.mkdir(parents=True, exist_ok=True)
    run = _first_free(root, f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    keys(run).mkdir(mode=0o700)
    (run / "logs").mkdir()
    (run / "checkpoints").mkdir()
    return run


def _first_free(root: Path, stem: str) -> Path:
    number = 1
    while True:
        run = root / (stem if number == 1 else f"{stem}-{number}")
        try:
            run.mkdir()
            return run
        except FileExistsError:
            number += 1


def set_latest(run: Path) -> None:
    """Let `latest` name this run, in one step: a reader sees the old link or the new one."""
    fresh = run.parent / f".latest-{secrets.token_hex(4)}"
    fresh.symlink_to(run.name)
    fresh.replace(run.parent / "latest")


# Finding a run


def all_runs(root: Path) -> list[Path]:
    """Every run under `root`, oldest first by the time in its id."""
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if RUN_ID.match(p.name) and p.is_dir()), key=_age)


def _age(run: Path) -> tuple[str, int, str]:
    stamp, number = re.search(r"(\d{8}-\d{6})(?:-(\d+))?$", run.name).groups()
    return stamp, int(number or 1), run.name


def resolve(selector: str = "last", root: Path | None = None) -> Path:
    """The run that a person means: `last`, a run id, the unique start of one, a Slurm job id, or a path.

    Raises RunNotFound.
    """
    root = root or runs_root()
    if os.sep in selector:
        return _resolve_path(Path(selector).expanduser().absolute())
    runs = all_runs(root)
    if not runs:
        raise RunNotFound(f"no runs in {root}; set {ENV_ROOT} if they are kept elsewhere")
    if selector in ("last", "latest"):
        named = (root / "latest").resolve()
        return named if named in (run.resolve() for run in runs) else runs[-1]
    exact = [run for run in runs if run.name == selector]
    by_job = [run for run in runs if selector.isdecimal() and selector in job_ids(run)]
    by_prefix = [run for run in runs if run.name.startswith(selector)]
    found = exact or by_job[-1:] or by_prefix
    if len(found) == 1:
        return found[0]
    if found:
        raise RunNotFound(f"{selector!r} is the start of {len(found)} runs in {root}: {_listing(found)}")
    near = difflib.get_close_matches(selector, [run.name for run in runs], n=3, cutoff=0.4)
    hint = f"near: {', '.join(near)}" if near else f"newest: {_listing(runs)}"
    raise RunNotFound(f"no run {selector!r} in {root}; {hint}")


def _resolve_path(path: Path) -> Path:
    if (path / "config.yaml").is_file() or journal(path).is_file():
        return path
    raise RunNotFound(f"{path} is not the directory of a run: it has neither config.yaml nor journal.jsonl")


def _listing(runs: list[Path]) -> str:
    names = [run.name for run in reversed(runs[-5:])]
    return ", ".join(names + ["..."] * (len(runs) > 5))


# Files of a run


def config(run: Path) -> Path:
    return run / "config.yaml"


def journal(run: Path) -> Path:
    return run / "journal.jsonl"


def metrics(run: Path) -> Path:
    return run / "metrics.jsonl"


def trace(run: Path) -> Path:
    return run / "trace.jsonl"


def older_trace(run: Path) -> Path:
    """What stood in `trace` until that was full."""
    return run / "trace.1.jsonl"


def tensorboard(run: Path) -> Path:
    return run / "tensorboard"


def keys(run: Path) -> Path:
    return run / "keys"


def batch_output(run: Path, job_id: str | int) -> Path:
    return run / f"slurm-{job_id}.out"


# Slurm jobs of a run: the first one, and one more for each resume


def add_job(run: Path, job_id: str | int) -> None:
    """Note that this Slurm job works on the run."""
    with open(run / "jobs", "a") as file:
        file.write(f"{job_id}\n")


def job_ids(run: Path) -> list[str]:
    """Slurm jobs that have worked on the run, oldest first."""
    noted = (run / "jobs").read_text().split() if (run / "jobs").is_file() else []
    seen = sorted((path.stem.removeprefix("slurm-") for path in run.glob("slurm-*.out")), key=lambda j: (len(j), j))
    return noted + [job for job in seen if job not in noted]


# Logs, by attempt


def new_attempt(run: Path) -> int:
    """Number of this start of the controller, from 1; its log directory exists on return."""
    number = max(attempts(run), default=0) + 1
    while True:
        try:
            logs(run, number).mkdir(parents=True)
            return number
        except FileExistsError:
            number += 1


def attempts(run: Path) -> list[int]:
    """Starts of the controller that have a log directory, in order."""
    if not (run / "logs").is_dir():
        return []
    return sorted(int(p.name) for p in (run / "logs").iterdir() if p.name.isdecimal())


def logs(run: Path, attempt: int) -> Path:
    return run / "logs" / str(attempt)


def controller_log(run: Path, attempt: int) -> Path:
    return logs(run, attempt) / "controller.log"


# Checkpoints


def checkpoint(run: Path, iteration: int) -> Path:
    return run / "checkpoints" / f"step-{iteration:06d}"


def checkpoint_iteration(path: Path) -> int:
    """The iteration after which a checkpoint was taken, from its directory's name."""
    return int(path.name.removeprefix("step-"))


def mark_complete(path: Path) -> None:
    """Declare a checkpoint whole. Everything in it must be on the disk by now."""
    fd = os.open(path / COMPLETE, os.O_WRONLY | os.O_CREAT, 0o644)
    os.fsync(fd)
    os.close(fd)


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = (run / "checkpoints").glob("step-*")
    return sorted((p for p in found if (p / COMPLETE).exists()), key=checkpoint_iteration)


def config_dir(model: str | Path) -> Path:
    """Where config.json and the tokenizer of `model.path` are: a Hugging Face directory, or a checkpoint of ours."""
    path = Path(model).expanduser()
    return path / "model" if (path / "state").is_dir() else path


def newest_checkpoint(run: Path) -> Path | None:
    return next(reversed(checkpoints(run)), None)


def prune_checkpoints(run: Path, keep: int) -> list[Path]:
    """Delete all complete checkpoints but the `keep` newest; returns the deleted ones."""
    old = checkpoints(run)[:-keep]
    for path in old:
        # The marker goes first: a half-deleted checkpoint must not look complete.
        (path / COMPLETE).unlink()
        shutil.rmtree(path)
    return old
