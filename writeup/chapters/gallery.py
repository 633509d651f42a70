"""The gallery of broken variants: each as a difference, with the test that sees it and what that said."""

from typing import Any

from cs336_systems.text import markdown_code, markdown_text, printable
from writeup.book import Book
from writeup.cells import STALE
from writeup.chapters.equality import provenance
from writeup.gallery import Variant, variants
from writeup.proofs import COMMAND, SAW, Report, read_report


def content(book: Book) -> dict[str, Any]:
    """Every variant, how many were seen, and what the report was made on."""
    report = read_report()
    found = [_shown(report, variant) for variant in variants()]
    return {
        "variants": found,
        "seen": sum(each["seen_by_test"] for each in found),
        "stale": STALE if any(each["stale"] for each in found) else "",
        "source": provenance(report),
        "command": markdown_code(COMMAND),
    }


def _shown(report: Report, variant: Variant) -> dict[str, Any]:
    catcher, saw = report.proof(variant.test), report.proof(f"{SAW}[{variant.name}]")
    old = report.older([variant.test])
    return {
        "title": markdown_text(variant.title),
        "anchor": f"gallery-{variant.name}",
        "file": markdown_code(variant.file),
        "diff": variant.diff(),
        "wrong": markdown_text(variant.wrong),
        "seen": markdown_text(variant.seen),
        "slow_network": variant.slow_network,
        "test": f"[{markdown_code(variant.test)}](#{catcher.anchor}){STALE if old else ''}",
        "where": printable(saw.where),
        "message": printable(saw.message),
        "seen_by_test": saw.outcome == "passed",
        "stale": bool(old),
    }
