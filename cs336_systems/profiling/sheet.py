"""A table of text that can be shown on a terminal and written as Markdown: the same cells in both."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from cs336_systems.text import markdown_code, markdown_row, markdown_text

LONGEST = 100  # characters of a name in Markdown; kernels' names are templates of hundreds
NUMBER = re.compile(r"[-+(<]*\d|-?$")  # how a cell of numbers begins; an empty one is one, too


@dataclass(frozen=True)
class Sheet:
    """A title, the columns' heads, the rows, and a note below. Columns of numbers stand to the right.

    With `names` the first column has names of operators, which may be very long.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    names: bool = False

    def numeric(self) -> list[bool]:
        """Whether each column has numbers only, the first one apart if it has names."""
        columns = [[row[i] for row in self.rows] for i in range(len(self.heads))]
        found = [any(column) and all(NUMBER.match(cell) for cell in column) for column in columns]
        return [False, *found[1:]] if self.names else found

    def markdown(self, level: int = 2) -> str:
        """The sheet as a section of Markdown, its title a heading of a level, or of 0: a line of text.

        The note is Markdown already.
        """
        title = markdown_text(self.title)
        heading = f"{'#' * level} {title}" if level else f"{title}:"
        lines = [markdown_row(self.heads), _line(["--:" if right else "---" for right in self.numeric()])]
        for first, *rest in self.rows:
            named = markdown_code(cut(first, LONGEST)) if self.names else markdown_text(first)
            lines.append(_line([named, *map(markdown_text, rest)]))
        return "\n\n".join(part for part in (heading, "\n".join(lines), self.note) if part) + "\n"

    def table(self, width: int = 44) -> Table:
        """The sheet for a terminal, names cut to a width."""
        table = Table(title=self.title, caption=self.note or None, title_justify="left")
        table.title_style, table.caption_justify = "bold", "left"
        for head, right in zip(self.heads, self.numeric(), strict=True):
            named = self.names and not table.columns
            table.add_column(head, justify="right" if right else "left", no_wrap=named, overflow="fold")
        for first, *rest in self.rows:
            table.add_row(cut(first, width) if self.names else first, *rest)
        return table


def cut(name: str, width: int) -> str:
    """As much of a name as fits, its middle left out: kernels differ at their ends."""
    if len(name) <= width:
        return name
    head = (width - 1) * 2 // 3
    return f"{name[:head]}…{name[len(name) - (width - 1 - head) :]}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def milliseconds(nanoseconds: float) -> str:
    """1234567 -> `1.235`."""
    return f"{nanoseconds / 1e6:,.3f}"


def percent(share: float) -> str:
    """0.1234 -> `12.34%`."""
    return f"{share:.2%}"
