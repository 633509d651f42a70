"""Errors of sums in half precision, the dtype of every part of a model under autocast, and the time it saves."""

from statistics import median
from typing import Any

from benchmarks.records import Record
from cs336_systems.host.console import format_seconds
from cs336_systems.host.text import markdown_text
from writeup.book import Book, Citation, metric
from writeup.ceilings import original_seconds
from writeup.cells import NONE, quoted
from writeup.model_pairs import Pairs, cite, in_turn, predicted_ratio
from writeup.model_pairs import table as turns_table
from writeup.publications import ORIGINAL, Published
from writeup.tables import Table
from writeup.words import joined, pair_ratios

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
Times = tuple[Published | None, Published | None]  # in fp32, in bf16


def content(book: Book) -> dict[str, Any]:
    """Sums, dtypes, timings, and the values of the commentary."""
    sums = book.cite("mixed_precision", lesson="accumulation", command=LESSONS.format(lesson="accumulation"))
    dtypes = book.cite("mixed_precision", lesson="dtypes", command=LESSONS.format(lesson="dtypes"))
    compared = cite(book, "precision=bf16")
    pairs = in_turn(compared, "precision=bf16")
    toy = dtypes.one(model=TOY, precision="fp16")
    return {
        "sums": accumulation(book, sums),
        "toy": toy_table(book, dtypes, toy),
        "verdicts": verdicts(book, toy) if toy else [],
        "parts": transformer(book, dtypes),
        "turns": turns_table(book, compared, pairs, ("fp32", "bf16"), original_shares(book)),
        "published": published(book),
        "expected": expected(pairs),
        "limits": {"largest": f"{LARGEST_FP16:,.0f}", "root": f"{LARGEST_FP16**0.5:.0f}", "fp16": f"{STEPS_FP16:,}",
                   "bf16": STEPS_BF16},
    }  # fmt: skip


def accumulation(book: Book, cited: Citation) -> Table:
    """The sums, their errors, and where these come from."""
    rows = []
    for record in cited:
        for name, found in metric(record, "sums").items():
            errors = (found[key] for key in ("error", "error_of_term", "error_of_additions"))
            cells = [f"{found['sum']:.7g}", *(f"{each:.2g}" for each in errors)]
            rows.append([markdown_text(name), *cells, markdown_text(found["why"])])
    columns = ("<sum += term", "sum", "error", "of the term", "of additions", "<why")
    return Table(book, columns, rows, cited)


def toy_table(book: Book, cited: Citation, record: Record | None) -> Table:
    """The parts of the toy model: the original's, ours, and what torch documents for a GPU."""
    rows = []
    for theirs, (part, way) in TOY_PARTS.items() if record else ():
        documented = record.metrics["documented_for_cuda"].get(part) if record and way == "forward" else None
        ours = record.metrics["parts"][part][way] if record else NONE
        cells = [markdown_text(ours), markdown_text(documented or NONE), published_dtype(book, theirs)]
        rows.append([theirs, *cells])
    columns = ("<part, autocast to fp16", "here", "a GPU, by torch's lists", "2024, one GPU")
    return Table(book, columns, rows, cited.only(model=TOY, precision="fp16"))


def published_dtype(book: Book, part: str) -> str:
    """The original's dtype for a part of the toy model."""
    found = book.published.value(SOURCE, "toy model", part=part)
    return found.text if found else NONE


def verdicts(book: Book, record: Record) -> list[str]:
    """Remarks on parts in which the original differs from torch's lists or, where these say nothing, from our run."""
    said = []
    for theirs, (part, way) in TOY_PARTS.items():
        ours = record.metrics["parts"][part][way]
        documented = record.metrics["documented_for_cuda"].get(part) if way == "forward" else None
        printed = published_dtype(book, theirs)
        if printed == (documented or ours):
            continue
        also = f"; torch's lists say {documented} for a GPU as well" if documented == ours else ""
        said.append(
            f"the original has the {theirs} in {printed}; here {verb(theirs)} {ours}{also}. {REASONS.get(theirs, '')}"
        )
    return [line.strip() for line in said]


REASONS = {
    "loss": "Cross-entropy is on autocast's list of what runs in fp32, since it exponentiates and adds up.",
    "gradients": "A `.grad` has the dtype of its parameter: the gradient of the cast is cast back at once.",
}


def verb(part: str) -> str:
    """`they are` or `it is`."""
    return "they are" if part in ("parameters", "gradients", "logits") else "it is"


def transformer(book: Book, cited: Citation) -> Table:
    """The parts of this project's model, forward / gradient, for each precision; those of one block."""
    mine = cited.only(model=OURS, precision=("bf16", "fp16"))
    records = {record.config["precision"]: record for record in mine}
    names = dict.fromkeys(name for record in mine for name in record.metrics["parts"])
    rows = [
        [markdown_text(name), *(ways(record.metrics["parts"].get(name)) for record in records.values())]
        for name in names
    ]
    return Table(book, ("<part", *(f"autocast to {name}" for name in records)), rows, mine)


def ways(part: dict[str, str] | None) -> str:
    """`bf16 / bf16`: the output's dtype and its gradient's; one where nothing has a gradient."""
    return markdown_text(" / ".join(each for each in (part or {}).values() if each) or NONE)


def expected(both: Pairs) -> str:
    """Predicted over measured factor of every pair, as a sentence; nothing without a prediction."""
    ratios = {
        where: wanted / median(pair_ratios(high, low))
        for where, (high, low) in both.items()
        if (wanted := predicted_ratio(high, low))
    }
    named = [f"{ratio:.2f} for {mode} at `{size}`" for (size, mode), ratio in ratios.items()]
    return f"The predicted speed-up over the measured one is {joined(named)}." if named else ""


def original_times(book: Book) -> dict[tuple[str, str], Times]:
    """The original's times in both precisions, by size and pass."""
    high, low = (book.published.table(SOURCE, name) for name in ("benchmarking, 1 warm-up step", "mixed precision"))
    cells = [(str(row.keys["size"]), str(row.keys["pass"])) for row in low.rows]
    return {cell: (high.value(size=cell[0], pass_=cell[1]), low.value(size=cell[0], pass_=cell[1])) for cell in cells}


def student_times(book: Book) -> dict[tuple[str, str], Times]:
    """A student's times in both precisions, by size and pass."""
    table = book.published.table(STUDENT, "mixed precision")
    cells = dict.fromkeys((str(row.keys["size"]), str(row.keys["pass"])) for row in table.rows)
    return {
        (size, what): (
            table.value(size=size, pass_=what, precision="fp32"),
            table.value(size=size, pass_=what, precision="bf16"),
        )
        for size, what in cells
    }


def factor(both: Times) -> float | None:
    """The time in fp32 over that in bf16."""
    return both[0].value / both[1].value if both[0] and both[1] else None


def original_shares(book: Book) -> dict[tuple[str, str], str]:
    """The original's fp32 over bf16 as cells, by size and pass."""
    return {where: f"{found:.2f}" for where, both in original_times(book).items() if (found := factor(both))}


def published(book: Book) -> Table:
    """Times of the original and of a student in both precisions, with the prediction for the original."""
    rows = []
    for who, times_of in (("2024", original_times(book)), (STUDENT, student_times(book))):
        for (size, what), both in times_of.items():
            found, wanted = factor(both), [NONE] * 3
            if who != STUDENT:
                seconds = [original_seconds(size, what, precision) for precision in ("fp32", "bf16")]
                wanted = [*map(format_seconds, seconds), f"{seconds[0] / seconds[1]:.2f}"]
            cells = [f"{quoted(book, cell, 'ms')} ({wish})" for cell, wish in zip(both, wanted, strict=False)]
            rows.append([who, size, what, *cells, f"{f'{found:.2f}' if found else NONE} ({wanted[2]})"])
    heads = ("<who", "<size", "<pass", "fp32 (predicted)", "bf16 (predicted)", "fp32 / bf16 (predicted)")
    hardware = markdown_text(book.published.sources[STUDENT].hardware)
    note = (
        "Predicted by the large cost model, for an H100 with fp32 in TF32. "
        f"{STUDENT}: {hardware}; batch and context are not published, so nothing is predicted."
    )
    return Table(book, heads, rows, notes=[note])
