"""Tables of rows from one line for each column: `head: field format`."""

import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from cs336_systems.host.console import format_bytes, format_count
from cs336_systems.host.table import Table, milliseconds, percent

FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "ms": milliseconds,
    "some": lambda time: milliseconds(time) if time else "",
    "%": percent,
    "share": "{:.1%}".format,
    "count": lambda count: format_count(count) if count else "",
    "speed": lambda flops: format_count(flops * 1e9) if flops else "",  # a second, of those in a nanosecond
    "bytes": format_bytes,
    "ratio": "{:.2f}".format,
    "ms or -": lambda time: "-" if time is None else f"{time / 1e6:.3f}",
    "% or -": lambda share: "-" if share is None else f"{100 * share:.1f} %",
}


def sheet(title: str, rows: Sequence[object], columns: str, note: str = "", names: bool = True) -> Table:
    """The table of some rows, the first column of which has `names` of operators.

    `columns` are separated by ";". A field may lie in another (`inclusive.forward`) or be a quotient (`total/calls`); a
    column whose format ends in ? is left out where it has only zeros.
    """
    heads, cells = list[str](), list[list[str]]()
    for column in columns.split(";"):
        head, fields, form, optional = re.fullmatch(r"\s*(.+): (\S+) (.+?)(\??)", column).groups()  # type: ignore[union-attr]
        above, *below = (list(map(attrgetter(field), rows)) for field in fields.split("/"))
        values = [a / b if b else 0 for a, b in zip(above, *below, strict=True)] if below else above
        if any(values) or not optional:
            heads.append(head)
            cells.append(list(map(FORMATS[form], values)))
    return Table(title, heads, list(zip(*cells, strict=True)), note, names)
