"""The notebook on a screen or in a file: an operator is a column, so that all 31 quantities fit in 120 columns."""

from collections.abc import Sequence
from typing import get_args

from rich.console import Console
from rich.table import Table as Grid

from cs336_systems.cost.notebook.differences import DIFFERENCES, Kind
from cs336_systems.cost.notebook.physics import Notebook
from cs336_systems.cost.notebook.tables import (
    SECTIONS,
    SUMMED,
    UNITS,
    Cell,
    Table,
    notebook_tables,
    show,
    show_total,
)

OPERATORS = 5  # side by side at most
TITLES: dict[Kind, tuple[str, str, str]] = {  # of a kind's table, and of its second and third column
    "wrong": ("What the notebook gets wrong", "the notebook", "what is right"),
    "missing": ("What the notebook leaves out", "", "what is right"),
    "text": ("What its code says, and what it printed: the output is of an older version", "the code", "the output"),
}


def print_notebook(console: Console, config: Notebook | None = None) -> None:
    """Both tables with totals and shares, then the differences, which are stated at the notebook's own sizes."""
    config = config or Notebook()
    console.print(
        f"batch {config.batch}, seq {config.seq}, d_model {config.d_model}, d_ff {config.d_ff}, num_heads "
        f"{config.num_heads}, num_layers {config.num_layers}, tp {config.tp}; everything is of one GPU"
    )
    print_tables(console, config)
    print_differences(console)


def print_differences(console: Console) -> None:
    """A table a kind of difference."""
    for kind in get_args(Kind):
        title, *columns = TITLES[kind]
        shown = [name for name in columns if name]
        grid = Grid("", *shown, "effect", title=title, title_justify="left", show_lines=True)
        for each in DIFFERENCES:
            if each.kind == kind:
                grid.add_row(each.name, *(text for text in (each.notebook, each.right) if text), each.effect)
        console.print(grid)


def print_tables(console: Console, config: Notebook | None = None) -> None:
    """Both tables, turned so that an operator is a column, the totals, and the shares of communication."""
    tables = notebook_tables(config)
    for each in tables.values():
        for rows in (each.rows[start : start + OPERATORS] for start in range(0, len(each.rows), OPERATORS)):
            names = ", ".join(str(row["layer"]) for row in rows) if len(each.rows) > OPERATORS else "one layer, one GPU"
            console.print(_grid(f"{each.title}: {names}", rows))
    console.print(_totals(tables))
    for each in tables.values():
        console.print(f"{each.title}: share of communication in the forward time {each.communication!r}")


def _grid(title: str, rows: Sequence[dict[str, Cell]]) -> Grid:
    grid = Grid("quantity", "unit", title=title, title_justify="left")
    for row in rows:
        grid.add_column(str(row["layer"]), justify="right", no_wrap=True)
    for section in SECTIONS[1:]:
        for name, unit in section:
            grid.add_row(name, unit, *(show(row[name]) for row in rows), end_section=name == section[-1][0])
    return grid


def _totals(tables: dict[str, Table]) -> Grid:
    depth = next(iter(tables.values())).depth
    grid = Grid("quantity", "unit", title=f"totals of {depth} layers", title_justify="left")
    for each in tables.values():
        grid.add_column(each.title, justify="right", no_wrap=True)
    grid.add_column("both", justify="right", no_wrap=True)
    sums = [each.totals() for each in tables.values()]
    for name in SUMMED:
        values = [each[name] for each in sums]
        grid.add_row(name, UNITS[name], *(show_total(value) for value in [*values, sum(values)]))
    return grid
