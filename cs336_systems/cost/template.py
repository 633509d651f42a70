"""Text, tables and pages with numbers filled in: the words are in a template, the arithmetic in Python.

`{S:B}` is the number S formatted for the unit B, `{plan.tp}` and `{parts[host]:s}` look into objects, and
`{hidden:yes|no}` is one of two texts, by a condition. A line that names a value which is None is left out.
"""

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import compress, count
from pathlib import Path
from string import Formatter
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cs336_systems.host.console import format_bytes, format_count, format_seconds

Value = float | str | bool | None
Number = Callable[[Any, str], str]  # (value, unit) as text

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")


class _Filled(Formatter):
    """A formatter whose numbers have units, and whose conditions choose a text."""

    def __init__(self, number: Number) -> None:
        self._number = number

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, bool):
            return format_spec.split("|")[not value]
        return "" if value is None else self._number(value, format_spec)  # None: in the text that is not chosen


@cache
def fields(line: str) -> list[tuple[str, str]]:
    """(name, unit) of each number of a line."""
    return [(name, spec or "") for _, name, spec, _ in Formatter().parse(line) if name]


def kept_lines(template: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a template without those that name a None."""
    for line in template.splitlines():
        if all(Formatter().get_field(name, (), values)[0] is not None for name, _ in fields(line)):
            yield line


def unit_text(value: Any, unit: str) -> str:
    """A number as text: units are s, b (bytes), n (counted), p (parameters), or a format of Python's."""
    ways = {"s": format_seconds, "b": format_bytes, "n": format_count, "p": lambda each: format_count(each, "B")}
    return format(value, unit) if isinstance(value, str) or unit not in ways else ways[unit](value)


def fill(template: str, values: Mapping[str, Any], number: Number = unit_text) -> Iterator[str]:
    """Lines of a template with their values, `number(value, unit)` as text."""
    return (_Filled(number).vformat(line, (), values) for line in kept_lines(template, values))


@cache
def read_template(name: str) -> str:
    """The text of a template, a path from this folder."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def read_data(name: str) -> dict[str, Any]:
    """The tables of `NAME.toml`, a path from this folder."""
    return tomllib.loads(read_template(f"{name}.toml"))


def fill_file(name: str, values: Mapping[str, Any]) -> list[str]:
    """Lines of `templates/NAME.txt` with their values."""
    return list(fill(read_template(f"templates/{name}.txt"), values))


class Total(list[Any]):
    """A table's row of sums, in bold."""


def new_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any] | None] = (), title: str | None = None, narrow: bool = False
) -> Table:
    """A table with its first column aligned left, the others right. Signs before a column's name: `<` aligned left,
    `~` that and its lines may wrap, `?` left out of a `narrow` table; after it, as in `time:s`, the unit of numbers
    (`unit_text`). A row that is None ends a section."""
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, title=title, title_justify="left"
    )
    shown = [not (narrow and name.startswith("?")) for name in columns]
    heads = [name.lstrip("?").partition(":")[::2] for name in columns]  # (name, unit)
    for place, (name, _) in enumerate(compress(heads, shown)):
        left = place == 0 or name[:1] in ("<", "~")
        table.add_column(name.lstrip("<~"), justify="left" if left else "right", no_wrap=name[:1] != "~")
    for row in rows:
        if row is None:
            table.add_section()
            continue
        cells = zip(row, heads, strict=True)
        texts = (unit_text(cell, unit) if isinstance(cell, int | float) else cell for cell, (_, unit) in cells)
        table.add_row(*compress(texts, shown), style="bold" if isinstance(row, Total) else None)
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


def print_json(found: Any) -> None:
    """Print a value as JSON; infinities and NaN are a mistake."""
    click.echo(json.dumps(found, indent=1, allow_nan=False))
