"""`explain`: derivations of a step, and of the answers to the course's accounting questions."""

from itertools import chain
from typing import Any

import click
from rich.markdown import Markdown
from rich.table import Table

from cs336_systems.cost.commands.explain_step import explain_step
from cs336_systems.cost.commands.output import new_table, print_page, print_warnings
from cs336_systems.cost.commands.request import request_options, take, take_request
from cs336_systems.cost.commands.settings import COUNT, ModelOptions
from cs336_systems.cost.course import QUESTIONS, defaults, parse_numbers, question
from cs336_systems.cost.notebook.summa import block_cost, grids, rows_for_summa
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_count, options


class Topics(click.Group):
    """A group with a command for each question of the course, besides its own."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if found := super().get_command(ctx, cmd_name):
            return found
        if cmd_name not in QUESTIONS:
            raise UserError(f"nothing is called {cmd_name!r}; choose from {', '.join([*self.commands, *QUESTIONS])}")
        title = f"A question of the course: {QUESTIONS[cmd_name].title}\n\nIts numbers: {defaults(cmd_name)}"
        numbers = click.Argument(["numbers"], nargs=-1, metavar="[NAME=VALUE]...")
        return click.Command(
            cmd_name, params=[numbers], help=title, callback=lambda numbers: _answer(cmd_name, numbers)
        )

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, rows in self.listed().items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def listed(self) -> dict[str, list[tuple[str, str]]]:
        """(name, what it explains) of commands and of questions."""
        commands = [(name, each.get_short_help_str(100)) for name, each in self.commands.items()]
        return {"Commands": commands, "Questions of the course": [(name, q.title) for name, q in QUESTIONS.items()]}


@click.group("explain", cls=Topics, invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Derive a prediction of a step, or the answer to a question of the course, in words and numbers.

    `explain step` takes the options of `step`; a question takes numbers, as in `explain rings N=16`. Without a
    command it lists what can be explained.
    """
    if context.invoked_subcommand is None:
        table = Table.grid(padding=(0, 2))
        for row in chain.from_iterable(command.listed().values()):
            table.add_row(*row)
        console.console().print(table)


@command.command("step")
@request_options
def step_command(**given: Any) -> None:
    """The time of a step: from the model's FLOPs to each of its seconds."""
    request, screen = take_request(given), console.console()
    numbers, tables = explain_step(request)
    screen.print(request.lines())
    print_page(screen, "explain_step", numbers, tables, indent=3)
    print_warnings(screen, request.warnings())


@command.command("grids")
@click.option("--ranks", type=COUNT, default=64, show_default=True, help="Ranks of each grid.")
@click.option("--tokens", type=COUNT, default=2048, show_default=True, help="Rows of the stream.")
@options(ModelOptions)
def grids_command(ranks: int, tokens: int, **given: Any) -> None:
    """Tensor parallelism in one, two and three dimensions: a block's forward, rank by rank."""
    config, screen = take(ModelOptions, given).model_config(), console.console()
    table = new_table(["grid", "FLOPs", "received", "held", "in buffers"])
    for grid in grids(ranks):
        try:
            cost = block_cost(grid, tokens, config.d_model, config.d_ff)
        except UserError as error:
            table.add_row(grid.name, str(error))
            continue
        table.add_row(grid.name, *map(format_count, (cost.flops, cost.received_by_each, cost.held, cost.buffers)))
    screen.print(
        f"One block of {config.d_model} x {config.d_ff}, {tokens} tokens, {ranks} ranks. Per rank, in elements, not "
        "bytes: received; held (operands and results); most in buffers at once."
    )
    screen.print(table)
    for side in (grid.side for grid in grids(ranks) if grid.kind == "2d"):
        least = rows_for_summa(config.d_model, config.d_ff, side)
        screen.print(f"2D on {side} x {side} ranks receives less than 1D from {least:,.0f} tokens on.")


def _answer(name: str, numbers: tuple[str, ...]) -> None:
    screen, text = console.console(), question(name, **parse_numbers(numbers)).markdown()
    if screen.is_terminal:
        screen.print(Markdown(text))
    else:
        click.echo(text)
