"""The command group. Subcommands load when they run, so `sonicmoe --help` is instant and imports no
framework.
"""

from __future__ import annotations

import importlib

import click

from .. import __version__
from ..config import environment
from ..errors import did_you_mean
from .refusals import OneLineGroup

# One line per subcommand: `name` is a click command of that name in the module `module_of` it.
COMMANDS: dict[str, str] = {
    "train": "Train a small ERNIE-style MoE language model on the node.",
    "warmup": "Compile every kernel a training run needs, once per cluster.",
    "doctor": "Check this machine: versions, GPU, engine, caches, flags, self-test.",
    "bench": "Time the engines: stages, rates, memory; sweeps and the cost model fitted to them.",
    "bisect": "Find the stage, expert, row and token where a step first goes wrong.",
    "verify": "Check any experts of PyTorch against fp64: a table of passes and failures.",
}


def module_of(command: str) -> str:
    """The module of a subcommand: `sonicmoe/cli/<name>.py`, but `train` lies with its model."""
    return "ernie_compat.train_command" if command == "train" else f"{__package__}.{command}"


class LazyGroup(OneLineGroup):
    """A group whose subcommands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import its module and return the command; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(module_of(cmd_name)), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand, and refuse a flag in the environment that is not understood, whether
        the subcommand reads that flag or not. `doctor` runs on, because it reports every such flag.
        ConfigError names the variable, its value and what is needed; UsageError, for no such
        subcommand, names the nearest.
        """
        # Before click looks: its own message would not name the nearest command.
        if args and args[0] not in COMMANDS and (hint := did_you_mean(args[0], COMMANDS)):
            ctx.fail(f"No such command {args[0]!r}{hint}")
        found = super().resolve_command(ctx, args)
        # Reading the environment raises for a value that is not understood. Help must work all the
        # same.
        if found[0] != "doctor" and "--help" not in found[2]:
            environment()
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands from `COMMANDS`, importing none."""
        # click would import every command for the first line of its help.
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup)
@click.version_option(__version__, prog_name="sonicmoe")
def main() -> None:
    """Expert-MLP engine for Mixture-of-Experts training: FP8 on NVIDIA Hopper, one engine for
    Paddle and PyTorch.

    Results go to stdout. Progress and durations of work that takes longer than ten seconds go to
    stderr, a line every ten seconds.
    """
