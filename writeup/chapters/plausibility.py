"""Implausible figures, ours and published, each with the reason."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.harness import SLACK
from cs336_systems.cost.flops import count_parameters
from cs336_systems.host.console import format_bytes
from cs336_systems.host.text import markdown_text
from cs336_systems.presets import model_preset
from writeup import plausibility_rules as rules
from writeup.book import Book
from writeup.cells import joined
from writeup.plausibility import KINDS, Suspect, doubtful_means, let_pass
from writeup.plausibility_figures import label
from writeup.publications import ORIGINAL, Publications, PublishedTable
from writeup.tables import markdown

MOST = 20  # means listed


def content(book: Book) -> dict[str, Any]:
    """The suspects of both kinds, and how many figures were looked at."""
    published, tables = book.published_suspects, book.published.tables.values()
    original = [each for each in published if each.where.startswith(ORIGINAL)]
    means = doubtful_means(book.everything)
    return {
        "published": listing(book, published),
        "count": len(published),
        "kinds": kinds(published),
        "let_pass": [markdown_text(each) for each in let_pass(book.published)],
        "shifted": shifted(book.published),
        "twice": twice(book.published),
        "figures": count(tables),
        "original": len(original),
        "original_figures": count([table for table in tables if table.source.id == ORIGINAL]),
        "others": len(published) - len(original),
        "records": len(book.everything),
        "ours": listing(book, book.suspects) if book.suspects else "",
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


def count(tables: Iterable[PublishedTable]) -> int:
    """Number of figures of some tables."""
    return sum(len(row.values) for table in tables for row in table.rows)


def listing(book: Book, suspects: Sequence[Suspect]) -> str:
    """A table of suspects: where, what, which kind, why."""
    rows = []
    for each in suspects:
        where, kind = unnamed(book, each.where), KINDS[each.kind]
        cells = {"<where": where, "<what stands there": each.text, "<it": kind, "<why": each.why}
        rows.append({head: markdown_text(cell) for head, cell in cells.items()})
    return markdown(rows)


def unnamed(book: Book, where: str) -> str:
    """The place of a figure without the name of its author: the sources have those."""
    source, comma, rest = where.partition(", ")
    found = book.published.sources.get(source)
    if not found:
        return where
    return f"{f'a write-up of {found.year}' if found.year else 'another write-up'}{comma}{rest}"


def kinds(suspects: Sequence[Suspect]) -> str:
    """Number of each kind: `12 *impossible*, 11 *inconsistent* and 1 *empty*`."""
    counts = {words: sum(each.kind == kind for each in suspects) for kind, words in KINDS.items()}
    return joined(f"{count} *{words}*" for words, count in counts.items() if count)


def shifted(published: Publications) -> dict[str, str]:
    """The original's two shifted figures, one place further right or left."""
    large = published.value(ORIGINAL, "flat again", size="medium", nodes=2)
    small = published.value(ORIGINAL, "sharding times", size="medium", nodes=2, candidate="stage 0")
    assert large is not None
    assert small is not None
    return {"large": f"{large.ms / 10:.3g} ms", "small": f"{small.ms * 10:.3g} ms"}


def twice(published: Publications) -> str:
    """One figure that its author published twice, as no rule here could have told."""
    table = published.table("damek", "published twice")
    first, second = (table.value(edition=edition) for edition in ("first", "second"))
    assert first is not None
    assert second is not None
    what = markdown_text(label(table.fixed))
    return (
        f"A student published {first.text} and then {second.text} for the same ({what}); {table.note}. No "
        "rule here detects this; only samples in turn, and their spread, do."
    )


def casts(published: Publications) -> dict[str, str]:
    """Memory that a 16-bit copy of the weights adds to the original's forward pass of its largest model."""
    wide = published.value(ORIGINAL, "memory", size="2.7B", pass_="forward")
    narrow = published.value(ORIGINAL, "memory in mixed precision", size="2.7B", pass_="forward")
    assert wide is not None
    assert narrow is not None
    halves = 2 * sum(count_parameters(model_preset("2.7B")).values())
    sizes = {"wide": wide.value, "narrow": narrow.value, "halves": halves, "both": wide.value + halves}
    return {name: format_bytes(size) for name, size in sizes.items()}
