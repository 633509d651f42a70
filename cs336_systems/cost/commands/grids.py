"""`explain grids`: what a rank receives and holds in tensor parallelism over lines, squares and cubes of ranks."""

from typing import Any

import click
from rich import box
from rich.table import Table

from cs336_systems import console
from cs336_systems.console import format_count
from cs336_systems.cost.large.settings import COUNT, ModelSettings, take
from cs336_systems.cost.notebook.summa import Grid, block_cost, grids, rows_for_summa
from cs336_systems.errors import UserError


@click.command("grids")
@click.option("--ranks", type=COUNT, default=64, show_default=True, help="Ranks of each grid.")
@click.option("--tokens", type=COUNT, default=2048, show_default=True, help="Rows of the stream.")
@console.options(ModelSettings)
def command(ranks: int, tokens: int, **given: Any) -> None:
    """Tensor parallelism in one, two and three dimensions: a block's forward, rank by rank."""
    config = take(ModelSettings, given).model_config()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("grid", no_wrap=True)
    for name in ("FLOPs a rank", "received by each", "operands and results held", "most in buffers"):
        table.add_column(name, justify="right", no_wrap=True)
    for grid in grids(ranks):
        try:
            cost = block_cost(grid, tokens, config.d_model, config.d_ff)
        except UserError as error:
            table.add_row(_name(grid), str(error))
            continue
        numbers = (cost.flops, cost.received_by_each, cost.held, cost.buffers)
        table.add_row(_name(grid), *(format_count(number) for number in numbers))
    screen = console.console()
    screen.print(f"One block of {config.d_model} x {config.d_ff}, {tokens} tokens, {ranks} ranks; numbers, not bytes.")
    screen.print(table)
    sides = [grid.side for grid in grids(ranks) if grid.kind == "2d"]
    for side in sides:
        least = rows_for_summa(config.d_model, config.d_ff, side)
        screen.print(f"2D on {side} x {side} ranks receives less than 1D from {least:,.0f} tokens on.")


def _name(grid: Grid) -> str:
    sides = {"1d": f"{grid.side}", "2d": f"{grid.side} x {grid.side}", "3d": " x ".join([str(grid.side)] * 3)}
    return f"{grid.kind}: {sides.get(grid.kind, f'{grid.side} x {grid.side} x {grid.depth}')}"
