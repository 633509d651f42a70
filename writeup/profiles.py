"""Pictures and tables that a profile left beside its record, for any chapter."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.profiling_record import picture_beside, tables_beside
from benchmarks.records import Record
from writeup.book import Book, Citation
from writeup.cells import median_ms
from writeup.figures import Figure

COMMAND = "python -m benchmarks.profiling_run --size small --wrapper none --attention naive"
BELOW = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9./-]*")  # a folder below that of the records


def folder(book: Book) -> Path:
    """The folder of this machine's records, below which pictures lie."""
    return book.results / (book.machine or "")


def tables(book: Book, record: Record) -> dict[str, Any] | None:
    """The tables of rank 0, as `benchmarks.lib.profiling_record.as_json` has them, or None if the run left none."""
    name = str(record.metrics.get("pictures", ""))
    return tables_beside(folder(book), record) if BELOW.fullmatch(name) else None


def plain_profiles(book: Book) -> Citation:
    """The profiles of one rank with attention operator by operator that have tables and pictures."""
    return with_tables(book, book.cite("profiling", wrapper="none", attention="naive", command=COMMAND))


def largest(cited: Citation) -> Record | None:
    """The profile whose step took longest: the one in which operators, not their starts, take the time."""
    return max(cited, key=median_ms, default=None)


def with_tables(book: Book, cited: Citation) -> Citation:
    """Select the profiles whose tables and pictures are there; without any, the citation counts as not measured."""
    return replace(cited, records=tuple(record for record in cited.measured if tables(book, record)))


def profile_picture(book: Book, record: Record | None, which: str, caption: str, alt: str) -> Figure | None:
    """The `timeline`, `flame` or `memory` of a profile; None if its run left none."""
    path = picture_beside(folder(book), record, f"{which}.svg") if record and tables(book, record) else None
    if path is None:
        return None
    return Figure(f"{book.chapter}-{path.parent.name}-{which}", path.read_text(encoding="utf-8"), caption, alt)
