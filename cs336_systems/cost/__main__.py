"""The command line of the analytic model: `python -m cs336_systems.cost COMMAND`, listed by `--help`."""

import sys
from importlib import import_module

import click

from cs336_systems.cost.domain import DOMAIN
from cs336_systems.host.console import run_command

# Each is `command` in the file of its name in `commands`. Only the one that is run is imported.
COMMANDS = ("table", "step", "memory", "search", "fit", "validate", "explain", "plot", "probe")


class Commands(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = import_module(f"cs336_systems.cost.commands.{cmd_name}").command
        return found


@click.command(cls=Commands, no_args_is_help=False, epilog=DOMAIN)
def main() -> None:
    """Predict before you measure: FLOPs, bytes and seconds of a model on a machine, and the reasons."""


if __name__ == "__main__":
    sys.exit(run_command(main))
