"""Times of a forward pass, a backward pass and a step, with and without warm-up."""

from dataclasses import replace
from typing import Any

from matplotlib.ticker import StrMethodFormatter

from benchmarks.records import Record
from cs336_systems.cost.machines import system_preset
from cs336_systems.host.console import format_seconds
from cs336_systems.host.text import markdown_text
from cs336_systems.presets import model_preset
from writeup.book import Book, Citation, metric
from writeup.ceilings import original_seconds, pass_seconds
from writeup.cells import (
    NONE,
    STATUS,
    marks,
    mean_and_deviation,
    median_ms,
    predicted_ms,
    prediction,
    quartiles,
    quoted,
    timing,
)
from writeup.figures import Figure, draw
from writeup.model_pairs import as_preset, setup
from writeup.publications import ORIGINAL, PublishedTable
from writeup.tables import Table
from writeup.words import joined

PASSES = ("forward", "backward", "forward-backward")
MODES = (*PASSES, "step")
PLAIN = {"year": 2024, "precision": "fp32", "norm": "rmsnorm", "compile": False, "recompute": "none"}
SOURCE, WARM, COLD = ORIGINAL, "benchmarking, 1 warm-up step", "benchmarking, no warm-up"
FEW = 3  # samples below which a deviation says nothing


def content(book: Book) -> dict[str, Any]:
    """The tables with and without warm-up, the predictions' error, and the values of the commentary."""
    command = "python -m benchmarks.e2e"
    warm = as_preset(book.cite("e2e", PLAIN, warmup=2, mode=MODES, command=f"{command} --all-sizes"))
    cold = as_preset(book.cite("e2e", PLAIN, warmup=0, mode=MODES, command=f"{command} --size small --warmup 0"))
    return {
        "warm": passes(book, warm, WARM),
        "cold_setup": setup(cold),
        "cold": passes(book, cold, COLD),
        "picture": picture(warm) if warm.measured else None,
        "cold_published": cold_published(book),
        "students": students(book),
        "students_setup": students_setup(book),
        "rod_cold": original_cold(book),
    }


def passes(book: Book, cited: Citation, table: str) -> Table:
    """Every size and pass: ours with the prediction, the original's beside it with one of its own."""
    rows = []
    for record in cited:
        size, mode = record.config["size"], record.config["mode"]
        theirs = book.published.value(SOURCE, table, size=size, pass_=mode)
        wanted = f" ({format_seconds(original_seconds(size, mode))})" if theirs else ""
        what = [markdown_text(size), mode, f"{len(record.samples_ms) or NONE}"]
        cells = [mean(book, record), timing(book, record), prediction(record)]
        rows.append([*what, *cells, quoted(book, theirs, "ms") + wanted])
    columns = ("<size", "<pass", "n", "mean ± deviation", "median", "predicted (of measured)")
    notes = [
        f"n: samples; fewer than {FEW} have no deviation. 2024's cells are predicted by the cost model for large runs, "
        "for an H100 with products in TF32."
    ]
    return Table(book, (*columns, "2024, one GPU (predicted)"), rows, cited, notes=notes if rows else [])


def cold_published(book: Book) -> Table:
    """The published times without warm-up beside those with it, every size and pass."""
    rows = []
    for row in book.published.table(SOURCE, COLD).rows:
        tables = [book.published.table(SOURCE, name) for name in (COLD, WARM)]
        both = [table.value(column, **row.keys) for table in tables for column in ("mean", "std")]
        rows.append([str(row.keys["size"]), str(row.keys["pass"]), *(quoted(book, each, "ms") for each in both)])
    heads = ("<size", "<pass", "no warm-up, mean", "deviation", "one step, mean", "deviation")
    return Table(book, heads, rows)


def mean(book: Book, record: Record) -> str:
    """Mean and deviation, as the course asks for them; of very few samples the mean alone."""
    if record.status != "ok":
        return STATUS[record.status]
    if len(record.samples_ms) >= FEW:
        return mean_and_deviation(book, record)
    return format_seconds(metric(record, "mean_ms") / 1e3) + marks(book, record)


def spread(records: list[Record]) -> list[list[float]]:
    """Distances of the quartiles from the medians; with fewer than 5 samples, of the least and the most."""
    bounds = [
        (min(r.samples_ms), max(r.samples_ms)) if len(r.samples_ms) < 5 else quartiles(r.samples_ms) for r in records
    ]
    middles = [median_ms(r) for r in records]
    return [
        [max(0.0, middle - low) for middle, (low, _) in zip(middles, bounds, strict=True)],
        [max(0.0, high - middle) for middle, (_, high) in zip(middles, bounds, strict=True)],
    ]


def picture(cited: Citation) -> Figure:
    """Times with their spread, and predicted over measured time, by size."""
    sizes = cited.measured.values("size")

    def into(axes: Any) -> None:
        left, right = axes
        most = 1.0
        for mode in MODES:
            records = list(cited.measured.only(mode=mode))
            places = [sizes.index(record.config["size"]) + 0.08 * (MODES.index(mode) - 1.5) for record in records]
            left.errorbar(places, [median_ms(r) for r in records], yerr=spread(records), fmt="o", capsize=2, label=mode)
            known = [(p, e / median_ms(r)) for p, r in zip(places, records, strict=True) if (e := predicted_ms(r))]
            right.plot([place for place, _ in known], [share for _, share in known], "o")
            most = max([most, *(share for _, share in known)])
        left.set_yscale("log")
        left.set_ylabel("ms")
        left.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        left.legend()
        right.axhline(1.0, color="black", linewidth=0.8)
        right.set_ylim(0, 1.1 * most)
        right.set_ylabel("predicted / measured time")
        for each in axes:
            each.set_xticks(range(len(sizes)), sizes)

    return draw(
        "benchmarking-times", "Left, the median of each pass with its quartiles, or the range of fewer than 5 samples. "
        "Right, predicted over measured time: at 1 the prediction is right.",
        "Points of time, and of predicted over measured time, for each pass over the model sizes", into,
        columns=2, width=9.0, height=3.4,
    )  # fmt: skip


def student_tables(book: Book) -> list[PublishedTable]:
    """Times of whole passes that students published."""
    return [table for (_, name), table in book.published.tables.items() if name == "end to end" and table.system]


def students(book: Book) -> Table:
    """Students' passes at a longer context, with the prediction for their GPU."""
    rows = []
    for table in student_tables(book):
        for row, wanted in zip(table.rows, expected(table), strict=True):
            keys, found = {**table.fixed, **row.keys}, row.values["mean"]
            what = [str(keys.get(name, NONE)) for name in ("size", "pass", "precision")]
            who = [markdown_text(table.source.id), str(table.source.year), markdown_text(table.hardware)]
            prognosis = f"{format_seconds(wanted)} ({wanted / found.value:.2f})" if wanted else NONE
            rows.append([*who, *what, quoted(book, found, "ms"), prognosis])
    heads = ("<who", "<edition", "<hardware", "<size", "<pass", "<precision", "published", "predicted (of published)")
    return Table(book, heads, rows)


def students_setup(book: Book) -> str:
    """The batch and the context of these tables."""
    fixed = [table.fixed for table in student_tables(book)]
    said = [
        f"{what} {joined(dict.fromkeys(str(each[key]) for each in fixed if key in each), last='or')}"
        for key, what in (("batch_size", "batch"), ("context", "context"))
    ]
    return joined(said)


def expected(table: PublishedTable) -> list[float | None]:
    """The predicted seconds of each row of a student's table, on the table's system, where it says what was run."""
    found: list[float | None] = []
    for row in table.rows:
        keys = {**table.fixed, **row.keys}
        if not {"size", "pass", "precision", "batch_size", "context"} <= keys.keys():
            found.append(None)
            continue
        batch, seq = int(keys["batch_size"]), int(keys["context"])
        config = replace(model_preset(str(keys["size"]), table.source.year), context_length=seq)
        system = system_preset(table.system)
        found.append(pass_seconds(config, batch, seq, str(keys["precision"]), str(keys["pass"]), system))
    return found


def original_cold(book: Book) -> str:
    """The largest deviation of the original's times, as a share of the mean, without warm-up and with: a sentence."""
    most, share = [], 0.0
    for name in (COLD, WARM):
        rows = book.published.table(SOURCE, name).rows
        shares = {row.values["std"].value / row.values["mean"].value: row.keys for row in rows}
        share = max(shares)
        most.append(f"{share:.0%} of the mean ({shares[share]['pass']} at `{shares[share]['size']}`)")
    return (
        f"In the original, without warm-up, the deviation is at most {most[0]}; after its one warm-up step, still "
        f"{most[1]}." + " One pass is too little of a warm-up there." * (share > 0.5)
    )
