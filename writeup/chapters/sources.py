"""Sources: the folder of the records, those who published the other figures, and the tests that are cited."""

from typing import Any

from cs336_systems.host.text import markdown_text
from writeup.book import Book, sections
from writeup.chapters import tests
from writeup.publications import Source
from writeup.tables import markdown


def content(book: Book) -> dict[str, Any]:
    """The folder of the records, the published sources, and the cited tests."""
    return {
        "machine": markdown_text(book.machine or ""),
        "records": len(book.everything),
        "published": markdown([_published(each) for each in book.published.sources.values()]),
    } | sections(book, tests)


def _published(source: Source) -> dict[str, str]:
    cells = {"source": f"{source.author}: {source.title}", "year": source.when, "hardware": source.hardware}
    return {f"<{head}": markdown_text(cell) for head, cell in (cells | {"where": source.where}).items()}
