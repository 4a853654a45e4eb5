"""`dynarl import`: a Hugging Face directory as a checkpoint of ours."""

from __future__ import annotations

from pathlib import Path

import click

from dynarl.cli import output
from dynarl.errors import ConfigError


@click.command("import", cls=output.Command)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("target", type=click.Path(file_okay=False, path_type=Path))
@output.format_option()
def command(model: Path, target: Path, output_format: str) -> None:
    """Write the Hugging Face directory MODEL as a checkpoint in TARGET.

    The weights become float32 masters, the optimizer's moments are zero. `model.path: TARGET` starts a run from it, in
    whatever layout; `model.path` may name MODEL itself as well.
    """
    from dynarl import rundir
    from dynarl.transport.hf import import_model

    try:
        with output.progress("reading tensors"):
            spec = import_model(model, target)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    rundir.mark_complete(target)
    result = {"path": str(target), "parameters": spec.parameters, "dtype": spec.dtype, "tensors": len(spec.tensors)}
    if output_format == "json":
        output.print_json(result)
    else:
        click.echo(f"{target}\n  {spec.parameters:,} parameters in {len(spec.tensors)} tensors of {spec.dtype}")
