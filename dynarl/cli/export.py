"""`dynarl export`: the model of a run as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import click

from dynarl import rundir
from dynarl.cli import output
from dynarl.errors import ConfigError, NotFoundError


@click.command("export", cls=output.Command)
@click.argument("run", default="last")
@click.option("--format", "file_format", type=click.Choice(["hf"]), default="hf", help="A Hugging Face directory.")
@click.option("--to", "target", type=click.Path(path_type=Path), help="Where to; default: RUN/export/ITERATION.")
@click.option("--iteration", type=click.IntRange(min=0), help="Of which checkpoint; default: the newest.")
@click.option(  # --format, elsewhere the long name of -o, is what is written here
    "-o", "--output", "output_format", type=click.Choice(["table", "json"]), default="table", help="How to print the result."
)
def command(run: str, file_format: str, target: Path | None, iteration: int | None, output_format: str) -> None:
    """Write the model of a checkpoint of RUN in a form that transformers and SGLang load.

    RUN: its id, the start of it, a Slurm job id, or `last`. Nothing is overwritten.
    """
    from dynarl.transport.hf import export_model

    found = rundir.resolve(run)
    checkpoint = rundir.newest_checkpoint(found) if iteration is None else rundir.checkpoint(found, iteration)
    if checkpoint is None or not (checkpoint / rundir.COMPLETE).exists():
        which = "complete checkpoint" if iteration is None else f"complete checkpoint of iteration {iteration}"
        raise NotFoundError(f"{found} has no {which}; there are: {_complete(found)}")
    place = target or found / "export" / checkpoint.name
    try:
        with output.progress("writing tensors") as advance:
            spec = export_model(checkpoint, place, advance)
    except ValueError as error:  # of a model that is not known, or of a file that is damaged
        raise ConfigError(str(error)) from None
    result = {"path": str(place), "checkpoint": str(checkpoint), "parameters": spec.parameters, "dtype": spec.dtype}
    if output_format == "json":
        output.print_json(result)
    else:
        click.echo(f"{place}\n  {spec.parameters:,} parameters, {spec.dtype}, from {checkpoint.name}")


def _complete(run: Path) -> str:
    names = [path.name for path in sorted(run.glob("checkpoints/*")) if (path / rundir.COMPLETE).exists()]
    return ", ".join(names) or "none"
