"""Norms and other kernels that memory bounds: written out, fused, compiled."""

from statistics import median
from typing import Any

from writeup.book import Book, facts, sections
from writeup.chapters import compiled, fused, layernorm, rmsnorm
from writeup.words import pair_ratios


def content(book: Book) -> dict[str, Any]:
    """Tables and pictures of the four sections, and the values that its sentences quote."""
    return {"f": facts(lambda: spoken(book))} | sections(book, layernorm, rmsnorm, compiled, fused)


def spoken(book: Book) -> dict[str, Any]:
    """The time of a norm over that of LayerNorm and of a copy, with pages kept; and with fresh pages."""
    norms = book.cite("norms", dtype="fp32", columns=4096, **{"pass": "forward"})
    fused_norm, eager, fast = (norms.need(candidate=name) for name in ("layernorm", "eager", "compiled"))
    earlier = [each for each in book.history("norms") if "pages_kept" not in each.environment]
    fresh = [each for each in earlier if each.config == fused_norm.config]
    return {
        "kept": bool(fused_norm.environment.get("pages_kept")),
        "eager": median(pair_ratios(eager, fused_norm)),
        "compiled": median(pair_ratios(fast, fused_norm)),
        "of_copy": fused_norm.metrics["copy_fraction_median"],
        "fresh_copy": fresh[-1].metrics["copy_fraction_median"] if fresh else 1.0,
    }
