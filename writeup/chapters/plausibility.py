"""Every figure that cannot be, ours and published, with the reason."""

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import SLACK
from cs336_systems.console import format_bytes
from cs336_systems.cost.parameters import count_parameters
from cs336_systems.presets import model_preset
from cs336_systems.text import markdown_text
from writeup import plausibility_rules as rules
from writeup.book import Book
from writeup.plausibility import Suspect, doubtful_means, suspects_of_published
from writeup.publications import Publications
from writeup.tables import markdown

ORIGINAL = "rod-2024"
MOST = 20  # means listed


def content(book: Book) -> dict[str, Any]:
    """The suspects of both kinds, and how many figures were looked at."""
    published = suspects_of_published(book.published)
    original = [each for each in published if each.where.startswith(ORIGINAL)]
    means = doubtful_means(book.everything)
    return {
        "published": listing(published),
        "count": len(published),
        "figures": sum(len(row.values) for table in book.published.tables.values() for row in table.rows),
        "original": len(original),
        "original_figures": sum(len(row.values) for table in tables_of(book) for row in table.rows),
        "others": len(published) - len(original),
        "records": len(book.everything),
        "ours": listing(book.suspects) if book.suspects else "",
        "suspects": len(book.suspects),
        "means": [markdown_text(f"{each.where}, {each.text}: {each.why}") for each in means[:MOST]],
        "more_means": len(means) - MOST,
        "misplaced": f"{rules.MISPLACED:.2f}",
        "sign_test": rules.SIGN_TEST,
        "errors": rules.STANDARD_ERRORS,
        "decades": rules.DECADES,
        "slack": f"{SLACK - 1:.0%}",
        "casts": casts(book.published),
    }


def tables_of(book: Book) -> list[Any]:
    """The original's tables."""
    return [table for table in book.published.tables.values() if table.source.id == ORIGINAL]


def listing(suspects: Sequence[Suspect]) -> str:
    """A table of suspects: where, what, why."""
    rows = [[markdown_text(text) for text in (each.where, each.text, each.why)] for each in suspects]
    return markdown(("<where", "<what stands there", "<why it cannot be"), rows)


def casts(published: Publications) -> dict[str, str]:
    """What a 16-bit copy of the weights adds to the original's forward pass of its largest model."""
    wide = published.value(ORIGINAL, "memory", size="2.7B", pass_="forward")
    narrow = published.value(ORIGINAL, "memory in mixed precision", size="2.7B", pass_="forward")
    assert wide is not None
    assert narrow is not None
    halves = 2 * sum(count_parameters(model_preset("2.7B")).values())
    sizes = {"wide": wide.value, "narrow": narrow.value, "halves": halves, "both": wide.value + halves}
    return {name: format_bytes(size) for name, size in sizes.items()}
