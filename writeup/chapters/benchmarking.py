"""How long a forward pass, a backward pass and a step take, with and without warm-up."""

from typing import Any

from cs336_systems.console import format_seconds
from writeup.book import Book, Citation, metric
from writeup.cells import mean_and_deviation, median_ms, predicted_ms, prediction, quoted, timing
from writeup.figures import Figure, draw
from writeup.tables import Table
from writeup.words import joined, prediction_error, times

MODES = ("forward", "backward", "forward-backward")
PLAIN = {"year": 2024, "precision": "fp32", "norm": "rmsnorm", "compile": False, "recompute": "none"}
SOURCE = "rod-2024"


def content(book: Book) -> dict[str, Any]:
    """The tables with and without warm-up, the predictions' error, and what the commentary is made of."""
    warm = book.cite("e2e", PLAIN, warmup=2, mode=MODES, command="python -m benchmarks.e2e --all-sizes")
    cold = book.cite("e2e", PLAIN, warmup=0, mode=MODES, command="python -m benchmarks.e2e --size small --warmup 0")
    return {
        "warm": passes(book, warm, "benchmarking, 1 warm-up step"),
        "cold": passes(book, cold, "benchmarking, no warm-up"),
        "picture": picture(warm) if warm.measured else None,
        "error": prediction_error([(predicted_ms(r) or 0.0, median_ms(r)) for r in warm.measured])
        if warm.measured
        else "",
        "backward": backward(warm),
        "first": first_steps(cold),
    }


def passes(book: Book, cited: Citation, table: str) -> Table:
    """Every size and pass: ours with the prediction, the original's beside it."""
    rows = []
    for record in cited:
        size, mode = record.config["size"], record.config["mode"]
        theirs = book.published.value(SOURCE, table, size=size, **{"pass": mode})
        cells = [mean_and_deviation(book, record), timing(book, record), prediction(record)]
        rows.append([size, mode, *cells, quoted(book, theirs, "ms")])
    columns = ("<size", "<pass", "mean ± deviation", "median (quartiles)", "predicted (of measured)", "Rød, one GPU")
    return Table(book, columns, rows, cited)


def picture(cited: Citation) -> Figure:
    """Measured over predicted time, by size."""

    def into(axes: Any) -> None:
        sizes = cited.measured.values("size")
        for mode in MODES:
            records = list(cited.measured.only(mode=mode))
            places = [sizes.index(record.config["size"]) for record in records]
            axes.plot(places, [median_ms(r) / (predicted_ms(r) or 1.0) for r in records], "o-", label=mode)
        axes.set_xticks(range(len(sizes)), sizes)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("measured / predicted time")
        axes.legend()

    return draw(
        "benchmarking-error", "Measured over predicted time. At 1 the prediction is right.",
        "Lines of measured over predicted time for three passes over the model sizes", into,
    )  # fmt: skip


def backward(cited: Citation) -> str:
    """How many forward passes a backward pass takes, by size."""
    shares = []
    for size in cited.measured.values("size"):
        one, other = (cited.measured.one(size=size, mode=mode) for mode in ("forward", "backward"))
        if one and other:
            shares.append(f"{times(median_ms(other) / median_ms(one))} at {size}")
    return joined(shares) if shares else ""


def first_steps(cited: Citation) -> list[str]:
    """For each size without warm-up: the first sample of a whole pass against the median of those after it."""
    said = []
    for record in cited.measured.only(mode="forward-backward"):
        first, rest = record.samples_ms[0], sorted(record.samples_ms[1:])
        later = rest[len(rest) // 2]
        deviation = metric(record, "std_ms") / metric(record, "mean_ms")
        said.append(f"{record.config['size']}: {_first(first, later)}; the deviation is {deviation:.0%} of the mean")
    return said


def _first(first: float, later: float) -> str:
    said = f"the first pass took {format_seconds(first / 1e3)}, later ones {format_seconds(later / 1e3)}"
    return f"{said}, {times(first / later)} as long" if first > later else f"{said}: no warm-up to see"
