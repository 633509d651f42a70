"""A transformer's step: its passes, its operators, its first pass, and 16-bit numbers."""

from dataclasses import replace
from statistics import median
from typing import Any

from matplotlib.ticker import StrMethodFormatter

from benchmarks.records import Record
from cs336_systems.cost.machines import system_preset
from cs336_systems.host.console import format_seconds
from cs336_systems.host.text import markdown_text
from cs336_systems.presets import model_preset
from writeup import profiles
from writeup.book import Book, Citation, facts, sections
from writeup.cells import (
    FEW,
    NONE,
    joined,
    mean_and_deviation,
    median_ms,
    pair_ratios,
    predicted_ms,
    prediction,
    quartiles,
    quoted,
    timing,
)
from writeup.chapters import mixed_precision, operators
from writeup.errors import Unmeasured
from writeup.figures import Figure, draw
from writeup.model_pairs import COMMAND, WARM, as_preset, in_turn, original_seconds, pass_seconds
from writeup.publications import ORIGINAL, PublishedTable
from writeup.tables import Table

PASSES = ("forward", "backward", "forward-backward")
MODES = (*PASSES, "step")
PLAIN = {"year": 2024, "precision": "fp32", "norm": "rmsnorm", "compile": False, "recompute": "none"}
COLD = "benchmarking, no warm-up"


def content(book: Book) -> dict[str, Any]:
    """Tables with and without warm-up, operators, 16-bit numbers, and the values that its sentences quote."""
    command = "python -m benchmarks.e2e"
    warm = as_preset(book.cite("e2e", PLAIN, warmup=2, mode=MODES, command=f"{command} --all-sizes"))
    cold = as_preset(book.cite("e2e", PLAIN, warmup=0, mode=MODES, command=f"{command} --size small --warmup 0"))
    return sections(book, operators, mixed_precision) | {
        "f": facts(lambda: spoken(book)),
        "warm": passes(book, warm, WARM),
        "cold": passes(book, cold, COLD),
        "picture": picture(warm) if warm.measured else None,
        "cold_published": cold_published(book),
        "students": students(book),
        "students_setup": students_setup(book),
        "widest": {"cold": widest(book, COLD), "warm": widest(book, WARM)},
    }


def spoken(book: Book) -> dict[str, Any]:
    """Numbers of `small` that the chapter's sentences name."""
    e2e = book.cite("e2e", PLAIN, size="small")
    step, forward, backward = (e2e.need(mode=mode, warmup=2) for mode in ("step", "forward", "backward"))
    warm = as_preset(book.cite("e2e", PLAIN, warmup=2, mode=MODES)).measured
    sizes = {size: book.cite("e2e", PLAIN, size=size, warmup=0) for size in ("tiny", "small")}
    cold = {size: cited.need(mode="forward-backward").samples_ms for size, cited in sizes.items()}
    profile = profiles.largest(book.cite("profiling", size="small", wrapper="none", attention="naive").measured)
    if profile is None:
        raise Unmeasured(profiles.COMMAND)
    pairs = in_turn(book.cite("compare"), mixed_precision.BF16)
    ratios = {size: pair_ratios(*pair) for (size, _), pair in pairs.items()}
    for size in sorted(sizes.keys() - ratios.keys()):
        raise Unmeasured(COMMAND.replace("small", size))
    return {
        "seconds": median_ms(step) / 1e3,
        "predicted": share(step),
        "products": step.predicted["ms_by_kind"]["matrix products"] / median_ms(step),
        "shares": {size: [share(each) for each in warm.only(size=size)] for size in warm.values("size")},
        "backward": median_ms(backward) / median_ms(forward),
        "first": {size: samples[0] / median(samples[1:]) for size, samples in cold.items()},
        "matmuls": profile.metrics["share_matrix_products"],
        "half": median(ratios["small"]),
        "tiny": median(ratios["tiny"]),
        "turns": all(each > 1 for size in sizes for each in ratios[size]),
    }


def share(record: Record) -> float:
    """Predicted over measured time."""
    return (predicted_ms(record) or 0.0) / median_ms(record)


def passes(book: Book, cited: Citation, table: str) -> Table:
    """Every size and pass: ours with the prediction, the original's beside it with one of its own."""
    rows = []
    for record in cited:
        size, mode = record.config["size"], record.config["mode"]
        theirs = book.published.value(ORIGINAL, table, size=size, pass_=mode)
        wanted = f" ({format_seconds(original_seconds(size, mode))})" if theirs else ""
        rows.append({
            "<size": markdown_text(size), "<pass": mode, "n": f"{len(record.samples_ms) or NONE}",
            "mean ± deviation": mean_and_deviation(book, record), "median": timing(book, record),
            "predicted (of measured)": prediction(record),
            "2024, one GPU (predicted)": quoted(book, theirs, "ms") + wanted,
        })  # fmt: skip
    note = (
        f"n: samples; fewer than {FEW} have no deviation. 2024's cells are predicted by the cost model for large runs, "
        "for an H100 with products in TF32."
    )
    return Table(book, rows, cited, [note])


def cold_published(book: Book) -> Table:
    """The published times without warm-up beside those with it, every size and pass."""
    rows = []
    for each in book.published.table(ORIGINAL, COLD).rows:
        row = {"<size": str(each.keys["size"]), "<pass": str(each.keys["pass"])}
        for name, what, end in ((COLD, "no warm-up", ""), (WARM, "one step", " ")):
            found = [book.published.value(ORIGINAL, name, column, **each.keys) for column in ("mean", "std")]
            row |= dict(zip((f"{what}, mean", f"deviation{end}"), (quoted(book, v, "ms") for v in found), strict=True))
        rows.append(row)
    return Table(book, rows)


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
            said = f"{format_seconds(wanted)} ({wanted / found.value:.2f})" if wanted else NONE
            rows.append({
                "<who": markdown_text(table.source.id), "<edition": str(table.source.year),
                "<hardware": markdown_text(table.hardware),
                **{f"<{name}": str(keys.get(name, NONE)) for name in ("size", "pass", "precision")},
                "published": quoted(book, found, "ms"),
                "predicted (of published)": said,
            })  # fmt: skip
    return Table(book, rows)


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


def widest(book: Book, name: str) -> dict[str, Any]:
    """The largest deviation of the original's times in a table, as a share of the mean, with its size and pass."""
    rows = book.published.table(ORIGINAL, name).rows
    shares = {row.values["std"].value / row.values["mean"].value: row.keys for row in rows}
    return {"share": max(shares), **shares[max(shares)]}
