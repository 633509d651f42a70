"""Tables on narrow terminals: no text is cut; a table that does not fit is transposed, or written row by row.

as it is       with words wrapped, but neither words nor numbers cut
transposed     a column for each row, if there are few
row by row     one line for each cell: its column's head, and the cell
"""

from typing import Any

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table


def fitting(table: Table, console: Console, options: ConsoleOptions) -> Table:
    """Return the table, or one with the same cells that fits into the options' width."""
    columns = ((column.header, *column.cells) for column in table.columns)
    texts = [list(row) for row in zip(*columns, strict=True)]  # heads, then the cells of each row
    if any(not isinstance(text, str) for row in texts for text in row):
        return table  # tables in tables are left as they are
    endless = options.update(width=10_000, max_width=10_000)
    for form in (table, _turned(table, texts)):
        widths = []
        for column in form.columns:
            breaks = column.justify == "left" and not column.no_wrap
            head, *cells = (Measurement.get(console, endless, text) for text in (column.header, *column.cells))
            # Heads may be wrapped between words, numbers not; what may not be wrapped would be cut.
            room = head.maximum if column.no_wrap else head.minimum
            column.min_width = max([room, *(each.minimum if breaks else each.maximum for each in cells)])
            widths.append(max(each.maximum for each in (head, *cells)))
        excess = options.max_width - Measurement.get(console, endless, form).minimum
        if excess >= 0:
            least = [column.min_width or 0 for column in form.columns]
            while sum(widths) > sum(least) + excess:  # the widest column gives way
                widths[max((width, i) for i, width in enumerate(widths) if width > least[i])[1]] -= 1
            for column, width in zip(form.columns, widths, strict=True):
                column.width = width
            return form
    return _row_by_row(table, texts)


def _like(table: Table, head: bool) -> Table:
    """Make an empty table with the same title and caption."""
    found = Table(title=table.title, caption=table.caption, show_header=head, title_justify="left")
    found.title_style, found.caption_style, found.caption_justify = table.title_style, table.caption_style, "left"
    return found


def _turned(table: Table, texts: list[list[Any]]) -> Table:
    heads, *rows = zip(*texts, strict=True)
    found = _like(table, head=True)
    for number, head in enumerate(heads):
        found.add_column(head, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        found.add_row(*row)
    return found


def _row_by_row(table: Table, texts: list[list[Any]]) -> Table:
    heads, *rows = texts
    found = _like(table, head=False)
    found.add_column(overflow="fold")
    found.add_column(overflow="fold", ratio=1)
    for row in rows:
        pairs = [(head, cell) for head, cell in zip(heads, row, strict=True) if cell]
        for number, pair in enumerate(pairs, 1):
            found.add_row(*pair, end_section=number == len(pairs))
    return found
