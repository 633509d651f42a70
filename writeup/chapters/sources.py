"""Sources: the folder of the records, those who published the other figures, and the tests that are cited."""

import re
from typing import Any

from cs336_systems.host.text import markdown_code, markdown_text
from writeup.book import Book
from writeup.chapters.equality import provenance
from writeup.equality import cited
from writeup.proofs import COMMAND, STALE, Proof, Report, anchor, in_words, read_report, source_of
from writeup.publications import Source
from writeup.tables import markdown


def content(book: Book) -> dict[str, Any]:
    """The folder of the records, the published sources, and the cited tests by file and function with their runs."""
    report = read_report()
    functions: dict[str, list[Proof]] = {}
    for node in sorted(cited()):
        proof = report.proof(node)
        functions.setdefault(proof.function, []).append(proof)
    return {
        "machine": markdown_text(book.machine or ""),
        "records": len(book.everything),
        "published": markdown([_published(each) for each in book.published.sources.values()]),
        "functions": [_shown(report, function, proofs) for function, proofs in functions.items()],
        "count": len(functions),
        "runs": sum(map(len, functions.values())),
        "source": provenance(report),
        "command": markdown_code(COMMAND),
    }


def _published(source: Source) -> dict[str, str]:
    cells = {"source": f"{source.author}: {source.title}", "year": source.when, "hardware": source.hardware}
    return {f"<{head}": markdown_text(cell) for head, cell in (cells | {"where": source.where}).items()}


def _shown(report: Report, function: str, proofs: list[Proof]) -> dict[str, Any]:
    file, _, name = function.partition("::")
    first, source = proofs[0], source_of(function)
    return {
        "name": markdown_code(name),
        "anchor": anchor(function),
        "says": "" if first.says == in_words(name) else f"{markdown_text(first.says)} ",
        "file": markdown_code(f"{file}:{first.line}"),
        "runs": [_run(report, proof) for proof in proofs],
        "source": source,
        "fence": "~" * max(4, 1 + max(map(len, re.findall("~+", source)), default=0)),
    }


def _run(report: Report, proof: Proof) -> str:
    """`[sgd-2] passed, 1.3 s`, with an anchor where the function has parameters."""
    came = f"{proof.outcome}, {proof.seconds:.1f} s{STALE if report.changed([proof.node]) else ''}"
    return f"[{markdown_code(proof.parameters)}]{{#{proof.anchor}}} {came}" if proof.parameters else came
