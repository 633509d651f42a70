"""A flame graph of one step, and the shares of norms, softmax and other parts in it."""

from typing import Any

from benchmarks.records import Record
from writeup.book import Book, Citation
from writeup.cells import NONE
from writeup.chapters.function_calls import COMMAND, largest
from writeup.profiles import profile_picture, tables, with_tables
from writeup.tables import Table

LEAST = 5e-4  # share of a part that is listed


def content(book: Book) -> dict[str, Any]:
    """The picture, the shares of norms and softmax, and which parts take the rest."""
    profiled = book.cite("profiling", wrapper="none", attention="naive", command=COMMAND)
    cited = with_tables(book, profiled)
    main = largest(cited)
    profile = tables(book, main) if main else None
    return {
        "picture": profile_picture(
            book,
            main,
            "flame",
            "One training step, from the top down: step, phase, module, operator. Width is time; the blocks are added "
            "up.",
            "An icicle of one step: forward, backward and optimizer, below them modules and their operators",
        ),
        "parts": parts(book, cited, main, profile),
    }


def parts(book: Book, cited: Citation, main: Record | None, profile: dict[str, Any] | None) -> Table:
    """The whole step by part of the model; each moment is in one row."""
    rows = []
    if profile:
        whole = sum(total(row) for row in profile["parts"])
        for row in (each for each in profile["parts"] if each["share"] >= LEAST):
            ways = (row["forward"], row["backward"] + row["recomputed"], row["other"])
            cells = [f"{each / whole:.1%}" if each else NONE for each in ways]
            rows.append([row["name"], *cells, f"{row['share']:.1%}"])
    columns = ("<part", "in forward", "in backward", "elsewhere", "in all")
    return Table(book, columns, rows, cited.only(size=main.config["size"]) if main else cited)


def total(row: dict[str, Any]) -> int:
    """Nanoseconds of a part."""
    return int(row["forward"] + row["recomputed"] + row["backward"] + row["other"])
