"""The other fused kernels: head with loss, gate, norm with addition, AdamW."""

from dataclasses import replace
from typing import Any

from benchmarks.records import Record
from writeup.book import Book, Citation
from writeup.cells import NONE, over, timing
from writeup.tables import Table
from writeup.words import pair_ratios

KERNELS = {
    "cross-entropy": "Head and loss",
    "swiglu": "SwiGLU's gate",
    "add-rmsnorm": "Addition and RMSNorm",
    "adamw": "AdamW's update",
}
SHAPE = ("tokens", "rows", "d_model", "columns", "vocab", "layers")
BASE = "torch"


def content(book: Book) -> dict[str, Any]:
    """A table for each kernel, and the largest shape of each in one."""
    cited = {kernel: book.cite("fused", kernel=kernel) for kernel in KERNELS}
    return {"all": largest(book, list(cited.values()))}


def shape(record: Record) -> str:
    """`512 tokens, 16032 vocab`: the sizes that the record has."""
    return ", ".join(f"{record.config[name]} {name}" for name in SHAPE if record.config.get(name))


def group(record: Record) -> str:
    """Records of one interleaved comparison."""
    return f"{shape(record)}, {record.config['pass']}, {record.config['dtype']}"


def largest(book: Book, citations: list[Citation]) -> Table:
    """Row for each kernel, at its last shape with every pass: plain torch, the others' time over it, and its bound."""
    rows, used = [], []
    for cited, name in zip(citations, KERNELS.values(), strict=True):
        for each in dict.fromkeys(record.config["pass"] for record in cited.measured):
            last = list(cited.measured.only({"pass": each}))[-1]
            same = {str(r.config["candidate"]): r for r in cited.measured if group(r) == group(last)}
            base, floor = same.get(BASE) or same.get("eager"), same.get("matmuls") or same.get("copy")
            fast = same.get("compiled")
            if base and floor:
                used += [base, floor, *([fast] if fast else [])]
                rows.append({
                    "<kernel": name, "<shape": shape(last), "<pass": each, "written out": timing(book, base),
                    "over compiled": over(pair_ratios(base, fast)) if fast else NONE,
                    "over its bound": over(pair_ratios(base, floor)),
                })  # fmt: skip
    one = replace(citations[0], records=tuple(used)) if used else citations
    note = (
        "Ratios are of the time written out, in turn. Its bound: the matrix products alone or, without any, a copy of "
        "the same bytes."
    )
    return Table(book, rows, one, [note])
