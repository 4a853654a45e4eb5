"""`dynarl config`: what a configuration says, where each value comes from, and whether it can work."""

from __future__ import annotations

from pathlib import Path

import click

from dynarl.cli import output

CONFIG = click.argument("config_file", metavar="[CONFIG]", required=False, type=click.Path(path_type=Path))
SET = click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a setting. May be repeated."
)


@click.group("config")
def command() -> None:
    """Show and check configurations.

    Layers, a later one wins: built-in, the cluster's file ($DYNARL_CLUSTER or /etc/dynarl/clusters.d), CONFIG, --set.
    """


@command.command("show", cls=output.Command)
@CONFIG
@SET
@click.option("--origin", is_flag=True, help="Show the file and line that every value comes from.")
@output.format_option("yaml", "json", default="yaml")
def show(config_file: Path | None, overrides: tuple[str, ...], origin: bool, output_format: str) -> None:
    """Print the whole configuration, built-in values included. Without CONFIG: what a job file starts from here."""
    import msgspec

    from dynarl.config import load

    loaded = load.load_layers(config_file, overrides)
    values = msgspec.to_builtins(loaded.config)
    if output_format == "json":
        output.print_json({"config": values, "origins": loaded.origins} if origin else {"config": values})
    elif origin:
        for path, source in loaded.origins.items():
            section, _, key = path.partition(".")
            click.echo(f"{path} = {_shown(values[section][key])}  # {source}")
    else:
        click.echo(load.dump(loaded.config), nl=False)


def _shown(value: object) -> str:
    import msgspec

    return msgspec.json.encode(value).decode()


@command.command("validate", cls=output.Command)
@click.argument("config_file", metavar="CONFIG", type=click.Path(path_type=Path))
@SET
@output.format_option()
def check(config_file: Path, overrides: tuple[str, ...], output_format: str) -> None:
    """Check CONFIG without asking Slurm. Exit code 3 and every fault found, or 0."""
    from dynarl.config import load

    config = load.load(config_file, overrides)
    if output_format == "json":
        output.print_json({"valid": True})
    else:
        split = config.split
        click.echo(
            f"{config_file} is valid: {config.cluster.nodes} nodes (rollout {split.rollout}, "
            f"inference {split.inference}, training {split.training}), "
            f"policy {config.policy.name}, {config.run.iterations} iterations"
        )


@command.command("reference")
def print_reference() -> None:
    """Print the reference of all settings, as in docs/configuration.md."""
    from dynarl.config import reference

    click.echo(reference.rendered(), nl=False)
