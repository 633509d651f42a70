"""Memory of a step, and recomputing instead of keeping."""

from typing import Any

from writeup.book import Book, facts, sections
from writeup.chapters import activation_checkpointing, peaks


def content(book: Book) -> dict[str, Any]:
    """Tables and pictures of the sections, and the values that its sentences quote."""
    return {"f": facts(lambda: spoken(book))} | sections(book, peaks, activation_checkpointing)


def spoken(book: Book) -> dict[str, Any]:
    """Error of the counts, and the share of a block's kept bytes that recomputing saves."""
    peaks = book.cite("memory", mode=("forward", "step"), recompute="none").measured
    ratios = [r.predicted["peak_memory_bytes"] / r.metrics["peak_memory_bytes"] for r in peaks]
    kept = book.cite("memory", mode="residuals")
    whole, segments = (kept.need(recompute=name, recompute_every=1) for name in ("none", "segments"))
    return {
        "count": len(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "saved": 1 - segments.metrics["kept_bytes"] / whole.metrics["kept_bytes"],
    }
