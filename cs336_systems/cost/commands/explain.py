"""`explain`: where the numbers come from, of a step, of its memory, and of the course's accounting questions."""

from typing import Any

import click
from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table

from cs336_systems import console
from cs336_systems.cost.commands.grids import command as grids_command
from cs336_systems.cost.commands.memory_words import explain_memory
from cs336_systems.cost.commands.request import request_options, take_request
from cs336_systems.cost.commands.step_words import explain_step
from cs336_systems.cost.commands.told import Section
from cs336_systems.cost.commands.warned import print_warnings
from cs336_systems.cost.course import ANSWERS, defaults, parse_numbers, question
from cs336_systems.errors import UserError


class Topics(click.Group):
    """A group that has a command for each question of the course as well."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name)
        if found:
            return found
        if cmd_name not in ANSWERS:
            raise UserError(f"nothing is called {cmd_name!r}; choose from {', '.join([*self.commands, *ANSWERS])}")
        return _asked(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(100)) for name, each in self.commands.items()])
        with formatter.section("Questions of the course"):
            formatter.write_dl([(name, answer().question.title) for name, answer in ANSWERS.items()])


@click.group("explain", cls=Topics, invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Derive a prediction in words, with the numbers put in: of a step, of memory, or of a question of the course.

    `explain step` and `explain memory` take the options of `step`; a question takes numbers, as in
    `explain rings N=16`. Alone it lists what can be explained.
    """
    if context.invoked_subcommand is None:
        _list(console.console())


@command.command("step")
@request_options
def step_command(**given: Any) -> None:
    """The time of a step: from the model's FLOPs to each of its seconds."""
    request = take_request(given)
    _print(console.console(), [*request.lines()], explain_step(request))
    print_warnings(console.console(), request.config, request.plan, request.seq, request.system, request.constants)


@command.command("memory")
@request_options
def memory_command(**given: Any) -> None:
    """The memory of the fullest rank: weights, gradients, optimizer state, activations."""
    request = take_request(given)
    _print(console.console(), [*request.lines()], explain_memory(request))


command.add_command(grids_command, "grids")


def _asked(name: str) -> click.Command:
    """The command that prints one worked question."""

    title = ANSWERS[name]().question.title

    @click.command(name, help=f"A question of the course: {title}\n\nIts numbers: {defaults(name)}")
    @click.argument("numbers", nargs=-1, metavar="[NAME=VALUE]...")
    def asked(numbers: tuple[str, ...]) -> None:
        screen, text = console.console(), question(name, **parse_numbers(numbers)).markdown()
        if screen.is_terminal:
            screen.print(Markdown(text))
        else:
            click.echo(text)

    return asked


def _list(screen: Console) -> None:
    table = Table.grid(padding=(0, 2))
    for name, each in command.commands.items():
        table.add_row(name, each.get_short_help_str(100))
    for name, answer in ANSWERS.items():
        table.add_row(name, answer().question.title)
    screen.print(table)


def _print(screen: Console, about: list[str], sections: list[Section]) -> None:
    for line in about:
        screen.print(line)
    for number, section in enumerate(sections, 1):
        screen.print(f"\n{number}. {section.title}", style="bold")
        for line in section.lines:
            screen.print(Padding(line, (0, 0, 0, 3), expand=False))
