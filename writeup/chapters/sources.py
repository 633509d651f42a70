"""Every record that a chapter cites: where it comes from, and who published the rest; the tests that are cited."""

from collections.abc import Iterable
from typing import Any

from benchmarks.records import Record
from cs336_systems.host.text import markdown_code, markdown_text
from writeup.book import Book, sections
from writeup.chapters import tests
from writeup.publications import Source
from writeup.tables import markdown


def content(book: Book) -> dict[str, Any]:
    """The records cited so far, by benchmark; the files that each benchmark exercises; the published sources."""
    cited: dict[str, dict[int, Record]] = {}
    chapters: dict[str, dict[str, None]] = {}
    for chapter, records in book.cited.items():
        for key, (record, _) in records.items():
            cited.setdefault(record.benchmark, {})[key] = record
            chapters.setdefault(record.benchmark, {})[chapter] = None
    names = sorted(cited)
    return {
        "machine": markdown_text(book.machine or ""),
        "records": markdown(
            ("<benchmark", "records cited", "<measured at", "<on", "<chapters"),
            [_row(name, list(cited[name].values()), list(chapters[name])) for name in names],
        ),
        "published": markdown(
            ("<source", "<year", "<hardware", "<where"),
            [_published(each) for each in book.published.sources.values()],
        ),
    } | sections(book, tests)


def _published(source: Source) -> list[str]:
    name = markdown_text(f"{source.author}: {source.title}")
    return [name, source.when, markdown_text(source.hardware), markdown_text(source.where)]


def _row(name: str, records: list[Record], chapters: list[str]) -> list[str]:
    commits = dict.fromkeys(str(record.environment["commit"])[:7] for record in records)
    dates = sorted({str(record.environment["date"])[:10] for record in records})
    links = ", ".join(f"[{each}](#{each})" for each in chapters)
    return [
        markdown_code(name),
        str(len(records)),
        _list(commits),
        " to ".join(dict.fromkeys((dates[0], dates[-1]))),
        links,
    ]


def _list(words: Iterable[str]) -> str:
    return ", ".join(map(markdown_code, words))
