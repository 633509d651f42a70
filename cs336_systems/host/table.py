"""Tables of text, with the same cells on a terminal and in Markdown."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import rich.table

from cs336_systems.host.console import format_bytes, format_count
from cs336_systems.host.text import markdown_code, markdown_row, markdown_text

# Formats of columns: times are in nanoseconds and shown in milliseconds.
FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "ms": lambda time: f"{time / 1e6:,.3f}",
    "some": lambda time: f"{time / 1e6:,.3f}" if time else "",
    "%": "{:.2%}".format,
    "share": "{:.1%}".format,
    "count": lambda count: format_count(count) if count else "",
    "speed": lambda flops: format_count(flops * 1e9) if flops else "",  # FLOP per nanosecond, shown per second
    "bytes": format_bytes,
    "ratio": "{:.2f}".format,
    "ms or -": lambda time: "-" if time is None else f"{time / 1e6:.3f}",
    "% or -": lambda share: "-" if share is None else f"{100 * share:.1f} %",
}
LONGEST, SHORT = 100, 44  # characters of a name in Markdown and on a terminal; kernels' names are templates of hundreds
NUMBER = re.compile(r"[-+(<]*\d(?!\S* x )|-$")  # the beginning of a cell in a column of numbers, which is no shape


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
    def of(cls, title: str, rows: Sequence[object], columns: str, note: str = "", names: bool = True) -> "Table":
        """Make a table with a row for each object; columns are `head: field format`, separated by ";".

        A field may lie in another (`inclusive.forward`) or be a quotient (`total/calls`); a column whose format ends in
        ? is left out if it has only zeros.
        """
        heads, cells = list[str](), list[list[str]]()
        for column in columns.split(";"):
            head, fields, form, optional = re.fullmatch(r"\s*(.+): (\S+) (.+?)(\??)", column).groups()  # type: ignore[union-attr]
            above, *below = (list(map(attrgetter(field), rows)) for field in fields.split("/"))
            values = [a / b if b else 0 for a, b in zip(above, *below, strict=True)] if below else above
            if any(values) or not optional:
                heads.append(head)
                cells.append(list(map(FORMATS[form], values)))
        return cls(title, heads, list(zip(*cells, strict=True)), note, names)

    def numeric(self) -> list[bool]:
        """List, for each column, True if at least half of what it has are numbers: some may be missing, in words."""
        columns = [[row[i] for row in self.rows if row[i]] for i in range(len(self.heads))]
        found = [bool(each) and 2 * sum(bool(NUMBER.match(cell)) for cell in each) >= len(each) for each in columns]
        return [False, *found[1:]] if self.names else found

    def markdown(self, level: int = 2) -> str:
        """Write the table as a section of Markdown; its title is a heading of this level, or for 0 a line of text."""
        title = markdown_text(self.title)
        heading = f"{'#' * level} {title}" if level else f"{title}:"
        lines = [[*map(markdown_text, self.heads)], ["--:" if right else "---" for right in self.numeric()]]
        for first, *rest in self.rows:
            named = markdown_code(cut(first, LONGEST)) if self.names else markdown_text(first)
            lines.append([named, *map(markdown_text, rest)])
        rows = "\n".join(markdown_row(line, str) for line in lines)
        return "\n\n".join(filter(None, (heading, rows, self.note))) + "\n"

    def table(self) -> rich.table.Table:
        """Make the table for a terminal, with shorter names."""
        table = rich.table.Table(title=self.title, caption=self.note.replace("\\*", "*") or None, title_justify="left")
        table.title_style, table.caption_justify = "bold", "left"
        for head, right in zip(self.heads, self.numeric(), strict=True):
            named = self.names and not table.columns
            table.add_column(head, justify="right" if right else "left", no_wrap=named, overflow="fold")
        for first, *rest in self.rows:
            table.add_row(cut(first, SHORT) if self.names else first, *rest)
        return table


def cut(name: str, width: int) -> str:
    """Shorten a name to `width` by leaving out its middle, since kernels' names differ at their ends."""
    if len(name) <= width:
        return name
    head = (width - 1) * 2 // 3
    return f"{name[:head]}…{name[len(name) - (width - 1 - head) :]}"
