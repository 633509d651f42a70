"""The appendix of tests: the source of each cited test, and its outcome."""

import re
from typing import Any

from cs336_systems.host.text import markdown_code, markdown_text
from writeup.book import Book
from writeup.chapters.equality import provenance
from writeup.equality import cited
from writeup.freshness import STALE
from writeup.proofs import COMMAND, Proof, Report, anchor, in_words, read_report, source_of


def content(book: Book) -> dict[str, Any]:
    """The cited tests by file and function, each with its runs."""
    report = read_report()
    functions: dict[str, list[Proof]] = {}
    for node in sorted(cited()):
        proof = report.proof(node)
        functions.setdefault(proof.function, []).append(proof)
    return {
        "functions": [_shown(report, function, proofs) for function, proofs in functions.items()],
        "count": len(functions),
        "runs": sum(map(len, functions.values())),
        "source": provenance(report),
        "command": markdown_code(COMMAND),
    }


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
    came = f"{proof.outcome}, {proof.seconds:.1f} s{STALE if report.older([proof.node]) else ''}"
    return f"[{markdown_code(proof.parameters)}]{{#{proof.anchor}}} {came}" if proof.parameters else came
