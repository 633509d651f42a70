"""The other fused kernels: head with loss, gate, norm with addition, AdamW."""

from typing import Any

from benchmarks.records import Record
from cs336_systems.host.text import markdown_text
from writeup.book import Book, Citation
from writeup.cells import NONE, over, prediction, timing
from writeup.tables import Table
from writeup.words import error_of, faster, joined, pair_ratios

KERNELS = {
    "cross-entropy": "Head and loss",
    "swiglu": "SwiGLU's gate",
    "add-rmsnorm": "Addition and RMSNorm",
    "adamw": "AdamW's update",
}
SHAPE = ("tokens", "rows", "d_model", "columns", "vocab", "layers")
BASE = "torch"


def content(book: Book) -> dict[str, Any]:
    """A table for each kernel, and which candidate is the fastest where that can be told."""
    cited = {kernel: book.cite("fused", kernel=kernel) for kernel in KERNELS}
    return {
        "tables": [(name, table(book, cited[kernel])) for kernel, name in KERNELS.items()],
        "error": error_of([record for each in cited.values() for record in each]),
        "fastest": [line for kernel, name in KERNELS.items() for line in fastest(name, cited[kernel])],
        "measured": any(each.measured for each in cited.values()),
    }


def shape(record: Record) -> str:
    """`512 tokens, 16032 vocab`: the sizes that the record has."""
    return ", ".join(f"{record.config[name]} {name}" for name in SHAPE if record.config.get(name))


def group(record: Record) -> str:
    """Records of one interleaved comparison."""
    return f"{shape(record)}, {record.config['pass']}, {record.config['dtype']}"


def table(book: Book, cited: Citation) -> Table:
    """Every candidate, its time over that of plain torch turn by turn."""
    bases = {group(record): record for record in cited.measured if record.config["candidate"] in (BASE, "eager")}
    rows = []
    for record in cited.measured or cited:
        base = bases.get(group(record))
        beside = over(pair_ratios(record, base)) if base and record.status == "ok" else NONE
        words = [shape(record), f"{record.config['pass']}, {record.config['dtype']}", record.config["candidate"]]
        rows.append([*map(markdown_text, words), timing(book, record), prediction(record), beside])
    heads = ("<shape", "<pass", "<candidate", "median", "predicted (of measured)", "over plain torch")
    absent = sorted({markdown_text(str(record.config["candidate"])) for record in cited if record.status != "ok"})
    notes = [f"Not supported on this machine: {joined(absent)}."] if absent and cited.measured else []
    return Table(book, heads, rows, cited, notes)


def fastest(name: str, cited: Citation) -> list[str]:
    """For each pass at its largest shape: the fastest candidate that computes the same against the next."""
    said = []
    for each in dict.fromkeys(record.config["pass"] for record in cited.measured):
        last = list(cited.measured.only({"pass": each}))[-1]
        same = [record for record in cited.measured if group(record) == group(last)]
        real = [record for record in same if record.config["candidate"] not in ("copy", "matmuls")]
        ordered = sorted(real, key=lambda record: record.metrics["median_ms"])
        if len(ordered) > 1:
            first, second = ordered[:2]
            names = [markdown_text(str(record.config["candidate"])) for record in (first, second)]
            said.append(f"{name}, {each}: {faster(names[0], first, names[1], second)}")
    return said
