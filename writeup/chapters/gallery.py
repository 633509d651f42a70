"""The gallery of broken variants: each as a diff, with the test that fails and its message."""

import re
from typing import Any

from cs336_systems.host.text import markdown_code, markdown_text, printable
from writeup.book import Book
from writeup.chapters.equality import provenance
from writeup.gallery import Variant, variants
from writeup.proofs import COMMAND, ROOT, SAW, STALE, Report, read_report


def content(book: Book) -> dict[str, Any]:
    """Every variant, how many were seen, and what the report was made on."""
    report = read_report()
    first: dict[tuple[str, str], Variant] = {}
    found = [_shown(report, variant, first) for variant in variants()]
    return {
        "variants": found,
        "seen": sum(each["seen_by_test"] for each in found),
        "stale": STALE if any(each["stale"] for each in found) else "",
        "known": all(each["known"] for each in found),
        "source": provenance(report),
        "command": markdown_code(COMMAND),
        "check": what_check_says(),
    }


def what_check_says() -> str:
    """The tables of docs/check.md that its tests prove; nothing in an installed copy, which has no such page."""
    page = ROOT / "docs" / "check.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    found = re.search(r"<!-- says: begin [^>]*-->\n(.*?)<!-- says: end -->", text, re.S)
    return found[1].strip() if found else ""


def _shown(report: Report, variant: Variant, first: dict[tuple[str, str], Variant]) -> dict[str, Any]:
    """Values of a variant for the template; `first` has the variants before it by their test's message."""
    catcher, saw = report.proof(variant.test), report.proof(f"{SAW}[{variant.name}]")
    old, changed = report.changed([variant.test]), report.changed([variant.file])
    earlier = first.setdefault((saw.where, saw.message), variant)
    return {
        "title": markdown_text(variant.title),
        "anchor": f"gallery-{variant.name}",
        "file": markdown_code(variant.file) + (STALE if changed else ""),
        "diff": variant.diff(),
        "wrong": markdown_text(variant.wrong),
        "seen": markdown_text(variant.seen),
        "test": f"[{markdown_code(variant.test)}](#{catcher.anchor}){STALE if old else ''}",
        "where": printable(saw.where),
        "message": printable(saw.message),
        "as_in": "" if earlier is variant else f"[{markdown_text(earlier.title)}](#gallery-{earlier.name})",
        "seen_by_test": saw.outcome == "passed",
        "stale": bool(old) or bool(changed),
        "known": old is not None and changed is not None,
    }
