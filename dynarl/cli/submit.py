"""`dynarl submit`: a run into Slurm's queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dynarl.cli import output


@click.command("submit", cls=output.Command)
@click.argument("config_file", metavar="[CONFIG]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override a setting, such as cluster.nodes=8. May be repeated.",
)
@click.option(
    "--resume", metavar="RUN", help="Go on with RUN from its newest complete checkpoint instead of starting a new run."
)
@click.option(
    "--dry-run", is_flag=True, help="Show the script, the sbatch and srun lines and all variables; submit nothing."
)
@click.option(
    "--wait", "wait_for_it", is_flag=True, help="Return when the job has ended; exit code 1 unless it ended well."
)
@output.format_option()
def command(
    config_file: Path | None,
    overrides: tuple[str, ...],
    resume: str | None,
    dry_run: bool,
    wait_for_it: bool,
    output_format: str,
) -> None:
    """Submit CONFIG as a new run, or RUN once more.

    The configuration is checked first, then Slurm; on an error nothing is submitted and no directory is made.
    """
    if (config_file is None) == (resume is None):
        raise click.UsageError("give either CONFIG or --resume RUN")
    from dynarl import rundir
    from dynarl.config import load, validate
    from dynarl.slurm import backend, submission

    run = rundir.resolve(resume) if resume else None
    if dry_run:
        from dynarl.cli import preview

        config = load.load_layers(rundir.config(run) if run else config_file, overrides).config
        validate.check(config)
        data = preview.preview(config, run)
        if output_format == "json":
            output.print_json(data)
        else:
            click.echo(preview.rendered(data))
        return
    config = None if run else load.load(config_file, overrides)
    client = backend.client()
    done = submission.submit_resume(client, run, overrides) if run else submission.submit_new(client, config)
    for note in done.notes:
        output.note(f"note: {note}")
    if rundir.is_local(done.run):
        output.note(f"note: other nodes hardly see {done.run.parent}; set run.root or {rundir.ENV_ROOT}")
    result: dict[str, Any] = {"run": done.run.name, "job_id": done.job_id, "directory": str(done.run)}
    ended_well = True
    if wait_for_it:
        if output_format != "json":
            output.note(f"job {done.job_id} of {done.run.name} is submitted; waiting for its end")
        ended_well = _wait(client, done, result)
    if output_format == "json":
        output.print_json(result)
    else:
        _print(result)
    if not ended_well:
        raise SystemExit(1)


def _wait(client: Any, done: Any, result: dict[str, Any]) -> bool:
    """Wait, and add how it ended to `result`."""
    from dynarl import rundir
    from dynarl.hypergraph import journal
    from dynarl.slurm import submission

    info = submission.wait(client, done.job_id)
    ends = [record for record in journal.read(rundir.journal(done.run)) if record["type"] == "run_ended"]
    last = ends[-1] if ends else {}
    result |= {"job_state": info.state, "state": last.get("state"), "reason": last.get("reason") or None}
    good = submission.succeeded(info)
    return last.get("state") == "completed" if good is None else good


def _print(result: dict[str, Any]) -> None:
    rows = [("run", result["run"]), ("job", result["job_id"]), ("files", result["directory"])]
    if "job_state" in result:
        rows.append(
            ("ended", " ".join(str(part) for part in (result["job_state"], result["state"], result["reason"]) if part))
        )
    for name, value in rows:
        click.echo(f"{name:<6} {value}")
    if "job_state" not in result:
        output.note(f"Follow it with: dynarl watch {result['run']}")
