"""Untrusted text: checks of files before reading, and escapes for each destination: a terminal, a plot, Markdown.

Names of files, modules and traces, and errors' messages, may hold characters that are commands there. Code that writes
them calls the function of the destination; for HTML and SVG that is `html.escape(printable(text))`, for JSON
`json.dumps`, which also escapes a terminal's control characters.
"""

import errno
import json
import re
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unicodedata import category


def regular(path: Path) -> Path:
    """Return the path of a file that will be read. Raises OSError for a pipe or a device, which may never end."""
    if stat.S_ISREG(mode := path.stat().st_mode) or stat.S_ISDIR(mode):
        return path
    raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))


def strict_json(text: str) -> Any:
    """Parse JSON. Raises ValueError for invalid text, and for some that Python would read: NaN and infinities, such as
    `1e999`, and lists nested too deeply to be written again."""
    try:
        found = json.loads(text, parse_constant=_no_number)
        json.dumps(found, allow_nan=False)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def printable(text: str, keep: str = "") -> str:
    r"""Text for one line of a terminal or a log: characters that would move the cursor, start a line, change the
    writing direction or fail to be encoded are escaped as in Python (`\x1b`), unless they are in `keep`.

    A terminal obeys escape sequences (CWE-150), and a log's reader takes a line break for a new entry (CWE-117).
    """
    if text.isprintable():
        return text
    # "Zs": other spaces, such as the no-break space.
    shown = (each in keep or each.isprintable() or category(each) == "Zs" for each in text)
    return "".join(each if plain else ascii(each)[1:-1] for each, plain in zip(text, shown, strict=True))


def plot_text(text: str) -> str:
    """Text for a label in matplotlib, which takes text between two dollar signs for a formula."""
    return printable(text, keep="\n").replace("$", "\\$")


def markdown_text(text: str) -> str:
    """Text for one line of Markdown, or a cell of a table there, that starts no HTML tag, link, code, formula or cell.

    For GitHub's Markdown and for pandoc's. An underscore inside a word is text in both.
    """
    escaped = re.sub(r"([\\|`*\[\]$~^#\"]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", printable(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;")


def markdown_code(text: str) -> str:
    """Text as code in a cell of a Markdown table, between more backticks than it has consecutive ones."""
    text = printable(text).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def markdown_row(cells: Iterable[str], escape: Callable[[str], str] = markdown_text) -> str:
    """A row of a Markdown table, each cell escaped."""
    return f"| {' | '.join(map(escape, cells))} |"
