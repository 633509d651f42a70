"""What a profile left beside its record, for any chapter: its pictures, and its tables."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.profiling_pictures import picture_beside, tables_beside
from benchmarks.records import Record
from writeup.book import Book, Citation
from writeup.figures import Figure, picture


def folder(book: Book) -> Path:
    """The folder of this machine's records, below which pictures lie."""
    return book.results / (book.machine or "")


def tables(book: Book, record: Record) -> dict[str, Any] | None:
    """The tables of rank 0, as `cs336_systems.profiling.tables.as_json` has them, or None if the run left none."""
    return tables_beside(folder(book), record)


def with_tables(book: Book, cited: Citation) -> Citation:
    """Those of some profiles whose tables and pictures are there; without any, the citation is as if not measured."""
    return replace(cited, records=tuple(record for record in cited.measured if tables(book, record)))


def profile_picture(book: Book, record: Record | None, which: str, caption: str, alt: str) -> Figure | None:
    """The `timeline`, `flame` or `memory` of a profile; None if its run left none."""
    path = picture_beside(folder(book), record, f"{which}.svg") if record else None
    return picture(path, f"{book.chapter}-{path.parent.name}-{which}", caption, alt) if path else None
