"""A flame graph of one step, and the shares of norms, softmax and other parts in it."""

from typing import Any

from benchmarks.records import Record
from writeup.book import Book, Citation
from writeup.cells import NONE
from writeup.profiles import largest, plain_profiles, profile_picture, tables
from writeup.tables import Table

LEAST = 5e-4  # share of a part that is listed


def content(book: Book) -> dict[str, Any]:
    """The picture, the shares of norms and softmax, and which parts take the rest."""
    cited = plain_profiles(book)
    main = largest(cited)
    profile = tables(book, main) if main else None
    return {
        "picture": profile_picture(
            book, main, "flame",
            "One training step, from the top down: step, phase, module, operator. Width is time; the blocks are added "
            "up.",
            "An icicle of one step: forward, backward and optimizer, below them modules and their operators",
        ),
        "parts": parts(book, cited, main, profile),
    }  # fmt: skip


def parts(book: Book, cited: Citation, main: Record | None, profile: dict[str, Any] | None) -> Table:
    """The whole step by part of the model; each moment is in one row."""
    ways = {"in forward": ("forward",), "in backward": ("backward", "recomputed"), "elsewhere": ("other",)}
    listed = [each for each in profile["parts"] if each["share"] >= LEAST] if profile else []
    whole = sum(each[name] for each in (profile or {"parts": []})["parts"] for way in ways.values() for name in way)
    rows = []
    for each in listed:
        spent = {head: sum(each[name] for name in names) for head, names in ways.items()}
        shares = {head: f"{found / whole:.1%}" if found else NONE for head, found in spent.items()}
        rows.append({"<part": each["name"], **shares, "in all": f"{each['share']:.1%}"})
    return Table(book, rows, cited.only(size=main.config["size"]) if main else cited)
