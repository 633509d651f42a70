"""Foreign text made harmless where it goes: a terminal, a Markdown table, a cell of a spreadsheet.

Names of files, modules and traces, and what errors say, may hold anything. Each place has signs that are commands there
and not text; what is foreign passes through the function for its place, where it is written. (HTML and SVG: what is
printable through `html.escape`. JSON: `json.dumps`, which escapes all that a terminal would obey.)
"""

import csv
import re
from collections.abc import Iterable, Sequence
from io import StringIO
from unicodedata import category

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how a cell begins that a spreadsheet computes rather than shows


def printable(text: str, keep: str = "") -> str:
    r"""Text for one line of a terminal or a log: what would move the cursor, start a line, turn the writing direction
    or fail to be encoded is shown as Python writes it, `\x1b`, unless it is in `keep`.

    A terminal obeys escape sequences (CWE-150), and a log's reader takes a line break for a new entry (CWE-117).
    """
    if text.isprintable():
        return text
    return "".join(each if each in keep or _is_shown(each) else ascii(each)[1:-1] for each in text)


def _is_shown(character: str) -> bool:
    return character.isprintable() or category(character) == "Zs"  # the other spaces, such as that which does not break


def plot_text(text: str) -> str:
    """Text for a label in matplotlib, which takes what stands between two dollar signs for a formula."""
    return printable(text, keep="\n").replace("$", "\\$")


def markdown_text(text: str) -> str:
    """Text for one line of Markdown, or a cell of a table there, that starts no HTML tag, link, code, formula or cell.

    For GitHub's Markdown and for pandoc's. An underscore inside a word is text in both.
    """
    escaped = re.sub(r"([\\|`*\[\]$~^#\"]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", printable(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;")


def markdown_code(text: str) -> str:
    """Text as code in a cell of a Markdown table, between more backticks than it has in a row."""
    text = printable(text).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def markdown_row(cells: Iterable[str]) -> str:
    """A row of a Markdown table, of text."""
    return f"| {' | '.join(map(markdown_text, cells))} |"


def csv_lines(rows: Iterable[Sequence[str | float | None]]) -> str:
    """Rows as RFC 4180 has them. Text that a spreadsheet would compute gets an apostrophe before it, and is then shown
    (CWE-1236); numbers stay numbers, None an empty cell."""
    file = StringIO()
    csv.writer(file).writerows([_cell(value) for value in row] for row in rows)
    return file.getvalue()


def _cell(value: str | float | None) -> str | float | None:
    if not isinstance(value, str):
        return value
    text = value.replace("\0", "\\x00")
    return f"'{text}" if text.startswith(FORMULA) else text
