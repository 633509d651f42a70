"""A table of text that can be shown on a terminal and written as Markdown: the same cells in both."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

LONGEST = 100  # characters of a name in Markdown; kernels' names are templates of hundreds


@dataclass(frozen=True)
class Sheet:
    """A title, a note under it, the columns' heads and the rows; the first column is text, the others numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        """The sheet as a section of Markdown."""
        lines = [_line(self.heads), _line(["---", *["---:"] * (len(self.heads) - 1)])]
        lines += [_line([f"`{cut(row[0], LONGEST)}`", *row[1:]]) for row in self.rows]
        return "\n\n".join(part for part in (f"## {self.title}", self.note, "\n".join(lines)) if part) + "\n"

    def table(self, width: int = 44) -> Table:
        """The sheet for a terminal, names cut to a width."""
        table = Table(title=escape(self.title), caption=escape(self.note) or None, title_justify="left")
        table.title_style, table.caption_justify = "bold", "left"
        for number, head in enumerate(self.heads):
            table.add_column(escape(head), justify="right" if number else "left", no_wrap=not number)
        for row in self.rows:
            table.add_row(escape(cut(row[0], width)), *map(escape, row[1:]))
        return table


def cut(name: str, width: int) -> str:
    """As much of a name as fits, its middle left out: kernels differ at their ends."""
    if len(name) <= width:
        return name
    head = (width - 1) * 2 // 3
    return f"{name[:head]}…{name[len(name) - (width - 1 - head) :]}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def milliseconds(nanoseconds: float) -> str:
    """1234567 -> `1.235`."""
    return f"{nanoseconds / 1e6:,.3f}"


def percent(share: float) -> str:
    """0.1234 -> `12.34%`."""
    return f"{share:.2%}"
