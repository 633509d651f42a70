"""Introduction: the document's purpose, its machine, the age of its records, and the errors of its predictions."""

from collections.abc import Iterable
from statistics import median
from typing import Any

from benchmarks.records import Record, read_records
from cs336_systems.host.text import markdown_code, markdown_text
from writeup.basis import rates_table, sizes_table
from writeup.book import BENCHMARKS, Book, Citation, machines
from writeup.cells import NONE, median_ms, predicted_ms, quartiles
from writeup.figures import COLOURS, Figure, draw
from writeup.publications import ORIGINAL
from writeup.tables import Table

COLUMNS = ("<benchmark", "records", "<commits", "<dates", "time (predicted / measured)", "memory")
BOUNDS = ("norms", "attention", "fused")  # whose "predictions" are lower bounds
MEMORY = ("peak_memory_bytes", "peak_bytes")
Pair = tuple[float, float]  # predicted, measured


def content(book: Book) -> dict[str, Any]:
    """The overview of all benchmarks, and the values that its sentences quote."""
    cited = {name: book.cite(name) for name in BENCHMARKS}
    records = [record for citation in cited.values() for record in citation]
    timed = {name: found for name, found in cited.items() if name not in BOUNDS}
    times = {name: pairs for name, found in timed.items() if (pairs := time_pairs(found))}
    return {
        "count": len(records),
        "where": [f"{markdown_text(place)}: {count} records" for place, count in book.places.items()],
        "dates": dates(records),
        "overview": Table(book, COLUMNS, [_row(book, name, found) for name, found in cited.items() if found], []),
        "picture": picture(times) if times else None,
        "between": between(book.between_runs),
        "missing": [markdown_code(found.command) for found in cited.values() if not found],
        "gpu": gpu(records, elsewhere(book)),
        "rates": rates_table(book, records),
        "sizes": sizes_table(book),
        "original": book.published.sources[ORIGINAL],
    }


def dates(records: Iterable[Record]) -> tuple[str, str] | None:
    """The days of the first and the last measurement."""
    days = sorted(str(each.environment["date"])[:10] for each in records if "date" in each.environment)
    return (days[0], days[-1]) if days else None


def time_pairs(records: Iterable[Record]) -> list[Pair]:
    """Predicted and measured milliseconds of the records that have both."""
    both = ((predicted_ms(each), each) for each in records if each.status == "ok" and "median_ms" in each.metrics)
    return [(said, median_ms(each)) for said, each in both if said]


def memory_pairs(records: Iterable[Record]) -> list[Pair]:
    """Predicted and measured bytes at the peak, of the records that have both."""
    return [
        (float(record.predicted[name]), float(record.metrics[name]))
        for record in records
        for name in MEMORY
        if record.status == "ok" and record.predicted.get(name) and record.metrics.get(name)
    ]


def shares(pairs: list[Pair]) -> str:
    """`0.87 (0.77 to 0.89)`: median and quartiles of predicted over measured."""
    found = [said / seen for said, seen in pairs]
    if not found:
        return NONE
    low, high = quartiles(found)
    return f"{median(found):.2f} ({low:.2f} to {high:.2f})"


def _row(book: Book, name: str, found: Citation) -> list[str]:
    commits = dict.fromkeys(str(record.environment.get("commit"))[:7] for record in found)
    dates = sorted({str(record.environment.get("date"))[:10] for record in found})
    last = dates[-1].removeprefix(dates[0][:8])  # the day alone, within a month
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {last}"
    cells = [", ".join(map(markdown_text, commits)), markdown_text(span)]
    return [name, str(len(found)), *cells, shares(time_pairs(found)), shares(memory_pairs(found))]


def picture(times: dict[str, list[Pair]]) -> Figure:
    """Every prediction of time as a point, by benchmark, on a logarithmic scale."""

    def into(axes: Any) -> None:
        for place, pairs in enumerate(times.values()):
            found = sorted(said / seen for said, seen in pairs)
            # Points of one benchmark are spread by rank, so that none hides another.
            heights = [place + 0.5 * (rank + 0.5) / len(found) - 0.25 for rank in range(len(found))]
            axes.plot(found, heights, ".", color=COLOURS[0], markersize=4, alpha=0.6)
            axes.plot([median(found)], [place], "|", color=COLOURS[1], markersize=18, markeredgewidth=2.5)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log")
        ticks = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.tick_params(axis="x", which="minor", bottom=False)
        axes.set_yticks(range(len(times)), list(times))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("predicted / measured time")

    return draw(
        "introduction-predictions",
        "Every predicted time over its measurement, a point a record; the line is the benchmark's median.",
        "Points of predicted over measured time on a logarithmic scale, a row for each benchmark",
        into, height=0.9 + 0.3 * len(times),
    )  # fmt: skip


def between(ratios: list[float]) -> dict[str, str]:
    """Highest over lowest median of settings measured in several runs: how many, the middle and the worst."""
    if not ratios:
        return {}
    return {"count": str(len(ratios)), "middle": f"{median(ratios):.2f}", "worst": f"{max(ratios):.0f}"}


def elsewhere(book: Book) -> list[Record]:
    """The records of all machines."""
    paths = [path for name in machines(book.results) for path in sorted((book.results / name).glob("*.jsonl"))]
    return [record for path in paths for record in read_records(path)]


def gpu(records: list[Record], everywhere: list[Record]) -> str:
    """Sentence about GPUs, from the devices in the records."""

    def on_gpu(found: list[Record]) -> int:
        return sum(record.environment.get("device_type") == "cuda" for record in found)

    if count := on_gpu(records):
        return f"{count} of these {len(records)} records were measured on a GPU."
    if count := on_gpu(everywhere):
        return f"No record of this machine is from a GPU; {count} of other machines are, which `--machine` chooses."
    return (
        "No record of any machine is from a GPU: figures of GPUs here are published by others, or predicted. The "
        "kernels in Triton were tested in its interpreter and compiled for a GPU, but not timed."
    )
