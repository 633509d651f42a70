"""Errors of sums in half precision, the dtype of every part of a model under autocast, and the time it saves."""

from statistics import median
from typing import Any

from benchmarks.records import Record
from cs336_systems.host.console import format_seconds
from cs336_systems.host.text import markdown_text
from writeup.book import Book, Citation, metric
from writeup.cells import NONE, pair_ratios, quoted
from writeup.model_pairs import Pairs, cite, in_turn, original_seconds, predicted_ratio, published_pairs
from writeup.model_pairs import table as turns_table
from writeup.publications import ORIGINAL
from writeup.tables import Table

LESSONS = "python -m benchmarks.mixed_precision {lesson}"
TOY, OURS = "toy model of the course", "transformer of this project"
# The original's name of a part of the toy model, that of the record, and which way.
TOY_PARTS = {
    "parameters": ("parameters", "forward"),
    "fc1": ("fc1 (Linear)", "forward"),
    "layer norm": ("ln (LayerNorm)", "forward"),
    "logits": ("fc2 (Linear)", "forward"),
    "loss": ("loss", "forward"),
    "gradients": ("parameters", "backward"),
}
LARGEST_FP16, STEPS_FP16 = (2 - 2**-10) * 2**15, 2**10  # and how many numbers lie between two powers of 2
STEPS_BF16 = 2**7
SOURCE, STUDENT = ORIGINAL, "brandon-snider"
BF16 = "precision=bf16"


def content(book: Book) -> dict[str, Any]:
    """Sums, dtypes, timings, and the values of the commentary."""
    sums = book.cite("mixed_precision", lesson="accumulation", command=LESSONS.format(lesson="accumulation"))
    dtypes = book.cite("mixed_precision", lesson="dtypes", command=LESSONS.format(lesson="dtypes"))
    toy = dtypes.one(model=TOY, precision="fp16")
    return {
        "sums": accumulation(book, sums),
        "toy": toy_table(book, dtypes, toy),
        "differ": differing(book, toy) if toy else None,
        "parts": transformer(book, dtypes),
        "turns": turns_table(book, BF16, ("fp32", "bf16")),
        "published": published(book),
        "expected": expected(in_turn(cite(book, BF16), BF16)),
        "limits": {"largest": f"{LARGEST_FP16:,.0f}", "root": f"{LARGEST_FP16**0.5:.0f}", "fp16": f"{STEPS_FP16:,}",
                   "bf16": STEPS_BF16},
    }  # fmt: skip


def accumulation(book: Book, cited: Citation) -> Table:
    """The sums, their errors, and where these come from."""
    rows = [
        {
            "<sum += term": markdown_text(name), "sum": f"{found['sum']:.7g}", "error": f"{found['error']:.2g}",
            "of the term": f"{found['error_of_term']:.2g}", "of additions": f"{found['error_of_additions']:.2g}",
            "<why": markdown_text(found["why"]),
        }
        for record in cited
        for name, found in metric(record, "sums").items()
    ]  # fmt: skip
    return Table(book, rows, cited)


def toy_table(book: Book, cited: Citation, record: Record | None) -> Table:
    """The parts of the toy model: the original's, ours, and what torch documents for a GPU."""
    rows = []
    for theirs, (part, way) in TOY_PARTS.items() if record else ():
        documented = record.metrics["documented_for_cuda"].get(part) if record and way == "forward" else None
        rows.append({
            "<part, autocast to fp16": theirs,
            "here": markdown_text(record.metrics["parts"][part][way] if record else NONE),
            "a GPU, by torch's lists": markdown_text(documented or NONE),
            "2024, one GPU": published_dtype(book, theirs),
        })  # fmt: skip
    return Table(book, rows, cited.only(model=TOY, precision="fp16"))


def published_dtype(book: Book, part: str) -> str:
    """The original's dtype for a part of the toy model."""
    found = book.published.value(SOURCE, "toy model", part=part)
    return found.text if found else NONE


def differing(book: Book, record: Record) -> dict[str, tuple[str, str]]:
    """Parts in which the original differs from torch's lists or, where these say nothing, from our run: both dtypes."""
    found = {}
    for theirs, (part, way) in TOY_PARTS.items():
        documented = record.metrics["documented_for_cuda"].get(part) if way == "forward" else None
        printed, ours = published_dtype(book, theirs), documented or record.metrics["parts"][part][way]
        if printed != ours:
            found[theirs] = printed, ours
    return found


def transformer(book: Book, cited: Citation) -> Table:
    """The parts of this project's model, forward / gradient, for each precision; those of one block."""
    mine = cited.only(model=OURS, precision=("bf16", "fp16"))
    parts = {f"autocast to {record.config['precision']}": record.metrics["parts"] for record in mine}
    names = dict.fromkeys(name for each in parts.values() for name in each)
    rows = [
        {"<part": markdown_text(name)} | {head: ways(each.get(name)) for head, each in parts.items()} for name in names
    ]
    return Table(book, rows, mine)


def ways(part: dict[str, str] | None) -> str:
    """`bf16 / bf16`: the output's dtype and its gradient's; one where nothing has a gradient."""
    return markdown_text(" / ".join(each for each in (part or {}).values() if each) or NONE)


def expected(both: Pairs) -> dict[str, float]:
    """Predicted over measured speed-up of every pair that has a prediction, by size."""
    return {
        size: wanted / median(pair_ratios(high, low))
        for (size, _), (high, low) in both.items()
        if (wanted := predicted_ratio(high, low))
    }


def published(book: Book) -> Table:
    """Times of the original and of a student in both precisions, with the prediction for the original."""
    pairs = {("2024", *where): both for where, both in published_pairs(book, BF16).items()}
    theirs = book.published.table(STUDENT, "mixed precision")
    for keys in (row.keys for row in theirs.rows if row.keys["precision"] == "bf16"):
        high, low = (theirs.value("", **(keys | {"precision": name})) for name in ("fp32", "bf16"))
        if high and low:
            pairs[STUDENT, str(keys["size"]), str(keys["pass"])] = high, low
    rows = []
    for (who, size, what), both in pairs.items():
        wanted = [NONE] * 3
        if who != STUDENT:
            seconds = [original_seconds(size, what, precision) for precision in ("fp32", "bf16")]
            wanted = [*map(format_seconds, seconds), f"{seconds[0] / seconds[1]:.2f}"]
        cells = [*(quoted(book, each, "ms") for each in both), f"{both[0].value / both[1].value:.2f}"]
        heads = ("fp32 (predicted)", "bf16 (predicted)", "fp32 / bf16 (predicted)")
        found = {head: f"{cell} ({wish})" for head, cell, wish in zip(heads, cells, wanted, strict=True)}
        rows.append({"<who": who, "<size": size, "<pass": what} | found)
    hardware = markdown_text(book.published.sources[STUDENT].hardware)
    note = (
        "Predicted by the large cost model, for an H100 with fp32 in TF32. "
        f"{STUDENT}: {hardware}; batch and context are not published, so nothing is predicted."
    )
    return Table(book, rows, notes=[note])
