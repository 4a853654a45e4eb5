"""The `dynarl` command. Commands are imported when they are called, so that `--help` stays fast."""

from __future__ import annotations

import importlib

import click

from dynarl import __version__

# name: (where its click command is, what `dynarl --help` says of it), in the order in which they are shown.
COMMANDS = {
    "submit": ("dynarl.cli.submit:command", "Submit a run, or show exactly what would be submitted."),
    "status": ("dynarl.cli.status:command", "How a run is doing."),
    "watch": ("dynarl.cli.watch:command", "Follow a run as it goes."),
    "logs": ("dynarl.cli.logs:command", "Read the logs of controller, agents and workers."),
    "timeline": ("dynarl.cli.timeline:command", "Which node had which role when."),
    "graph": ("dynarl.cli.graph:command", "What runs where: the hypergraph of a run."),
    "explain": ("dynarl.cli.explain:command", "Why nodes changed role, and what came of it."),
    "cancel": ("dynarl.cli.cancel:command", "End a run in good order."),
    "export": ("dynarl.cli.export:command", "The model of a run as a Hugging Face directory."),
    "import": ("dynarl.cli.import_cmd:command", "A Hugging Face directory as a checkpoint."),
    "config": ("dynarl.cli.config_cmd:command", "Show and check configurations."),
    "doctor": ("dynarl.cli.doctor:command", "Check that this machine and its Slurm can run dynarl."),
    "plan": ("dynarl.cli.plan:command", "Which stage gets which devices, in turn or side by side, and why."),
    "vps": ("dynarl.cli.vps:command", "What it takes to move a model to another parallel layout."),
    "simulate": ("dynarl.cli.simulate:command", "What a policy would make of a workload, on a simulated cluster."),
    "sim": ("dynarl.cli.sim_cmd:command", "Fit the simulator to recorded runs, and hold it against them."),
    "bench": ("dynarl.cli.bench:command", "Run a benchmark."),
}

EPILOG = """\b
RUN is a run id, the start of one, a Slurm job id, or `last`.
Exit codes: 0 good, 1 job or check failed, 2 usage, 3 configuration wrong,
4 Slurm unreachable or too old, 5 not found, 6 timeout, 130 interrupted."""


class LazyGroup(click.Group):
    """Knows its commands by name; the help of the group needs no import at all."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dynarl")
def main() -> None:
    """Reinforcement-learning post-training inside one Slurm allocation, on nodes that change role while it runs."""


if __name__ == "__main__":
    main(prog_name="dynarl")
