"""Output that all commands share: tables, JSON, and warnings about a prediction outside the fitted domain."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cs336_systems.cost.template import fill, kept_lines, read_template

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")


class Total(list[Any]):
    """A table's row of sums, in bold."""


def print_json(found: Any) -> None:
    """Print a value as JSON; infinities and NaN are a mistake."""
    click.echo(json.dumps(found, indent=1, allow_nan=False))


def new_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any] | None] = (), title: str | None = None, narrow: bool = False
) -> Table:
    """A table with its first column aligned left, the others right. Signs before a column's name: `<` aligned left,
    `~` that and its lines may wrap, `?` left out of a `narrow` table. A row that is None ends a section."""
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, title=title, title_justify="left"
    )
    shown = [not (narrow and name.startswith("?")) for name in columns]
    for place, name in enumerate(each.lstrip("?") for each, kept in zip(columns, shown, strict=True) if kept):
        left = place == 0 or name[:1] in ("<", "~")
        table.add_column(name.lstrip("<~"), justify="left" if left else "right", no_wrap=name[:1] != "~")
    for row in rows:
        if row is None:
            table.add_section()
        else:
            cells = (cell for cell, kept in zip(row, shown, strict=True) if kept)
            table.add_row(*cells, style="bold" if isinstance(row, Total) else None)
    return table


def print_page(
    screen: Console, name: str, values: Mapping[str, Any], parts: Mapping[str, Any], indent: int = 0
) -> None:
    """Print `templates/NAME.txt`: a line `[best]` stands for the part of that name, a table or a text, maybe empty;
    `# ` begins a heading, which gets a number. The terminal wraps such texts, and lines that begin with `> `. These
    signs count in the template alone, since a model's file may have a name that begins with one."""
    number, template = count(1), read_template(f"templates/{name}.txt")
    for sign, line in zip(kept_lines(template, values), fill(template, values), strict=True):
        named = sign.startswith("[")
        part = parts[line[1:-1]] if named else line[2:] if sign.startswith("> ") else line
        if sign.startswith("# "):
            screen.print(f"\n{next(number)}. {line[2:]}", style="bold")
        elif part or not sign:
            part = Padding(part, (0, 0, 0, indent), expand=False) if indent else part
            screen.print(part, soft_wrap=isinstance(part, str) and (named or sign.startswith("> ")))


def print_warnings(screen: Console, warnings: Iterable[str]) -> None:
    """Print one line for each warning."""
    for line in warnings:
        screen.print(Text.assemble(("warning:", "yellow"), f" {line}"))
