"""Tensor and pipeline parallelism: our layouts, a published study, and the arithmetic of their limits."""

from typing import Any

from writeup.book import Book, facts, sections
from writeup.chapters import arithmetic, megatron
from writeup.layer_schematics import split_block
from writeup.schematics import schedules


def content(book: Book) -> dict[str, Any]:
    """Tables and pictures of the sections, and the values that its sentences quote."""
    found = {"f": facts(lambda: spoken(book)), "schedules": schedules(), "split_block": split_block()}
    return found | sections(book, megatron, arithmetic)


def spoken(book: Book) -> dict[str, Any]:
    """Efficiency of the three ways to use two ranks, and what the published study's model is off by."""
    cited = book.cite("scaling")
    two = {axis: cited.need(layout=layout) for axis, layout in {"tp": "2x1x1", "pp": "1x2x1", "dp": "1x1x2"}.items()}
    return {axis: each.metrics["efficiency_median"] for axis, each in two.items()} | {
        "bubble": two["pp"].metrics["bubble"], "ideal": two["pp"].predicted["bubble"]
    }  # fmt: skip
