"""The equality matrix as a table: a tick for each test that proves a cell, and the reason for each empty cell."""

from typing import Any

from cs336_systems.host.text import markdown_code, markdown_text
from writeup.book import Book
from writeup.cells import NONE, joined
from writeup.equality import BITS, PROPERTIES, Row, matrix
from writeup.proofs import COMMAND, STALE, Report, read_report
from writeup.tables import markdown

TICK, FAILED, UNPROVEN = "✓", "✗", "○"
HEADS = {"norm": "gradient norm"}


def content(book: Book) -> dict[str, Any]:
    """The table with its notes, how many cells are filled, and what the report was made on."""
    report, rows = read_report(), matrix()
    notes: dict[str, list[str]] = {}
    lines = [
        {"<strategy": markdown_text(row.strategy)}
        | {f"<{HEADS.get(name, name)}": _cell(report, row, name, notes) for name in PROPERTIES}
        for row in rows
    ]
    cells = [cell for row in rows for cell in row.cells.values()]
    nodes = {node for cell in cells for node in cell.tests}
    files = {node.partition("::")[0] for node in nodes} | {file for row in rows for file in row.files}
    changed = report.changed(sorted(files))
    failed = [node for node, proof in report.proofs.items() if proof.outcome == "failed"]
    return {
        "table": markdown(lines),
        "notes": [
            f"{number}. {markdown_text(text[0].upper() + text[1:])} ({markdown_text('; '.join(where))})."
            for number, (text, where) in enumerate(notes.items(), 1)
        ],
        "proven": sum(bool(cell.tests) for cell in cells),
        "defined": sum(cell.is_defined for cell in cells),
        "unproven": sum(cell.is_defined and not cell.tests for cell in cells),
        "tests": len(nodes),
        "failed": [f"[{markdown_text(node)}](#{report.proofs[node].anchor})" for node in failed],
        "source": provenance(report),
        "command": markdown_code(COMMAND),
        "published": published(book),
        "stale": STALE,
        "known": changed is not None,  # None if git cannot tell
        "changed": [markdown_code(file) for file in changed or ()],
    }


def _cell(report: Report, row: Row, name: str, notes: dict[str, list[str]]) -> str:
    """Ticks, or the sign of the reason why there are none, and the number of the cell's note."""
    cell = row.cells[name]
    signs = [_tick(report, row, node) for node in cell.tests] or [UNPROVEN if cell.is_defined else NONE]
    signs += [BITS] * cell.note.startswith(BITS)
    text = cell.note.partition(": ")[2] if not cell.tests else cell.note
    if text:
        notes.setdefault(text, []).append(f"{row.strategy}, {HEADS.get(name, name)}")
        signs[-1] += f"^{list(notes).index(text) + 1}^"
    return " ".join(signs)


def _tick(report: Report, row: Row, node: str) -> str:
    proof = report.proof(node)
    old = report.changed([node, *row.files])
    return f"[{TICK if proof.outcome == 'passed' else FAILED}](#{proof.anchor}){STALE if old else ''}"


def published(book: Book) -> str:
    """Error of a student's FSDP against one GPU: a clause."""
    table = book.published.table("precipice-blades", "equality")
    found = joined(f"{row.values['difference'].text.split()[0]} on {row.keys['ranks']}" for row in table.rows)
    where = f"`{table.source.title}`, {table.source.year}, {markdown_text(table.hardware)}"
    return f"{found} GPUs as the largest difference from one GPU ({where})"


def provenance(report: Report) -> str:
    """Machine and versions of the report, in a line."""
    where = report.environment
    dirty = " with changes that are in no commit" if where["dirty"] else ""
    said = (
        f"{len(report.proofs)} tests in {report.seconds:.0f} s on {where['device']}, {where['cores']} cores; Python "
        f"{where['python']}, torch {where['torch']}; commit {str(where['commit'])[:7]}{dirty}, {where['date'][:10]}"
    )
    return markdown_text(said)
