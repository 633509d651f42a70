"""A table of text: the same cells on a terminal and in Markdown."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import rich.table

from cs336_systems.host.text import markdown_code, markdown_row, markdown_text

Row = TypeVar("Row")
LONGEST = 100  # characters of a name in Markdown; kernels' names are templates of hundreds
NUMBER = re.compile(r"[-+(<]*\d|-?$")  # the beginning of a cell in a column of numbers; it may be empty


@dataclass(frozen=True)
class Table:
    """A title, column heads, rows of cells, and a note below, which is Markdown. Columns of numbers are right-aligned;
    with `names` the first column holds names of operators, which may be very long."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    names: bool = False

    @classmethod
    def of(
        cls, title: str, rows: Iterable[Row], columns: Mapping[str, Callable[[Row], str]], note: str = ""
    ) -> "Table":
        """Table of objects, a row each: `columns` maps a head to the function that makes its cells; the first gives
        names."""
        return cls(title, list(columns), [[cell(row) for cell in columns.values()] for row in rows], note, names=True)

    def numeric(self) -> list[bool]:
        """For each column whether it has numbers only."""
        columns = [[row[i] for row in self.rows] for i in range(len(self.heads))]
        found = [any(column) and all(NUMBER.match(cell) for cell in column) for column in columns]
        return [False, *found[1:]] if self.names else found

    def markdown(self, level: int = 2) -> str:
        """The table as a section of Markdown; its title is a heading of this level, or for 0 a line of text."""
        title = markdown_text(self.title)
        heading = f"{'#' * level} {title}" if level else f"{title}:"
        lines = [[*map(markdown_text, self.heads)], ["--:" if right else "---" for right in self.numeric()]]
        for first, *rest in self.rows:
            named = markdown_code(cut(first, LONGEST)) if self.names else markdown_text(first)
            lines.append([named, *map(markdown_text, rest)])
        rows = "\n".join(markdown_row(line, str) for line in lines)
        return "\n\n".join(filter(None, (heading, rows, self.note))) + "\n"

    def table(self, width: int = 44) -> rich.table.Table:
        """The table for a terminal, names cut to a width."""
        table = rich.table.Table(title=self.title, caption=self.note or None, title_justify="left")
        table.title_style, table.caption_justify = "bold", "left"
        for head, right in zip(self.heads, self.numeric(), strict=True):
            named = self.names and not table.columns
            table.add_column(head, justify="right" if right else "left", no_wrap=named, overflow="fold")
        for first, *rest in self.rows:
            table.add_row(cut(first, width) if self.names else first, *rest)
        return table


def cut(name: str, width: int) -> str:
    """The name with its middle left out where it is longer than `width`: kernels differ at their ends."""
    if len(name) <= width:
        return name
    head = (width - 1) * 2 // 3
    return f"{name[:head]}…{name[len(name) - (width - 1 - head) :]}"


def milliseconds(nanoseconds: float) -> str:
    """1234567 -> `1.235`."""
    return f"{nanoseconds / 1e6:,.3f}"


def percent(share: float) -> str:
    """0.1234 -> `12.34%`."""
    return f"{share:.2%}"
