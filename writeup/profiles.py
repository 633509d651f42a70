"""Pictures and tables that a profile left beside its record, for any chapter."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.profiling_pictures import picture_beside, tables_beside
from benchmarks.records import Record
from writeup.book import Book, Citation
from writeup.figures import Figure, picture
from writeup.words import joined

BELOW = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9./-]*")  # a folder below that of the records


def folder(book: Book) -> Path:
    """The folder of this machine's records, below which pictures lie."""
    return book.results / (book.machine or "")


def tables(book: Book, record: Record) -> dict[str, Any] | None:
    """The tables of rank 0, as `benchmarks.lib.profiling_pictures.as_json` has them, or None if the run left none."""
    name = str(record.metrics.get("pictures", ""))
    return tables_beside(folder(book), record) if BELOW.fullmatch(name) else None


def with_tables(book: Book, cited: Citation) -> Citation:
    """Select the profiles whose tables and pictures are there; without any, the citation counts as not measured."""
    return replace(cited, records=tuple(record for record in cited.measured if tables(book, record)))


def without_tables(book: Book, cited: Citation) -> str:
    """Sentence on profiles without tables; nothing if all have them, or if a later profile replaced those without."""
    kept = with_tables(book, cited).values("size") if with_tables(book, cited) else []
    bare = [record.config["size"] for record in cited.measured if record.config["size"] not in kept]
    if not bare:
        return ""
    sizes = joined(f"`{size}`" for size in dict.fromkeys(bare))
    return f"{sizes} was profiled before tables were kept; profiled again, it is listed, too."


def profile_picture(book: Book, record: Record | None, which: str, caption: str, alt: str) -> Figure | None:
    """The `timeline`, `flame` or `memory` of a profile; None if its run left none."""
    path = picture_beside(folder(book), record, f"{which}.svg") if record and tables(book, record) else None
    return picture(path, f"{book.chapter}-{path.parent.name}-{which}", caption, alt) if path else None
