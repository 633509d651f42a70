"""Introduction: the document's purpose, its machine and models, the age of its records, its predictions' errors."""

from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

from benchmarks.records import Record
from cs336_systems.cost.flops import count_parameters
from cs336_systems.host.console import format_count, format_seconds
from cs336_systems.host.text import markdown_code, markdown_text, printable
from cs336_systems.presets import COURSE_YEARS, course_sizes, preset
from writeup.book import BENCHMARKS, Book, Citation
from writeup.cells import NONE, median_ms, predicted_ms, quartiles
from writeup.publications import ORIGINAL
from writeup.tables import Table

BATCH = "batch x context"
BOUNDS = ("norms", "attention", "fused")  # whose "predictions" are lower bounds
MEMORY = ("peak_memory_bytes", "peak_bytes")
Pair = tuple[float, float]  # predicted, measured


def content(book: Book) -> dict[str, Any]:
    """The overview of all benchmarks, and the values that its sentences quote."""
    cited = {name: book.cite(name) for name in BENCHMARKS}
    records = [record for citation in cited.values() for record in citation]
    timed = time_pairs(record for record in records if record.benchmark not in BOUNDS)
    return {
        "count": len(records),
        "where": [f"{markdown_text(place)}: {count} records" for place, count in book.places.items()],
        "dates": dates(records),
        "overview": Table(book, [_row(name, found) for name, found in cited.items() if found]),
        "short": sum(said < seen for said, seen in timed) / max(1, len(timed)),
        "between": between(book.between_runs),
        "missing": [markdown_code(found.command) for found in cited.values() if not found],
        "gpu": sum(record.environment.get("device_type") == "cuda" for record in records),
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


def _row(name: str, found: Citation) -> dict[str, str]:
    commits = dict.fromkeys(str(record.environment.get("commit"))[:7] for record in found)
    first, last = dates(found) or ("", "")
    later = last.removeprefix(first[:8])  # the day alone, within a month
    return {
        "<benchmark": name, "records": str(len(found)), "<commits": ", ".join(map(markdown_text, commits)),
        "<dates": markdown_text(first if first == last else f"{first} to {later}"),
        "time (predicted / measured)": shares(time_pairs(found)), "memory": shares(memory_pairs(found)),
    }  # fmt: skip


def between(ratios: list[float]) -> dict[str, Any]:
    """Highest over lowest median of settings measured in several runs: how many, the middle and the worst."""
    return {"count": len(ratios), "middle": median(ratios), "worst": max(ratios)} if ratios else {}


def machine_rates(records: Iterable[Record]) -> dict[str, dict[str, list[float]]]:
    """All rates of a machine that runs measured, by subject and kind; each run measures a rate once."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for record in records:
        run = f"{record.benchmark} {record.environment.get('date')}"
        for what, which, value in _rates_of(record):
            found.setdefault(what, {}).setdefault(which, {})[run] = value
    return {what: {each: list(runs.values()) for each, runs in which.items()} for what, which in found.items()}


def _rates_of(record: Record) -> Iterator[tuple[str, str, float]]:
    config, known = record.config, {**record.predicted, **record.metrics}
    if "peak_flops_per_s" in known:
        yield f"products in {config.get('precision') or config.get('dtype')}", "FLOP/s", known["peak_flops_per_s"]
    if "bandwidth_bytes_per_s" in known:
        yield "copies, read and written", "B/s", known["bandwidth_bytes_per_s"]
    if "link_bytes_per_s" in known:
        link = markdown_text(printable(config.get("link", "").replace("1gbit tbf", "1 Gbit/s link")))
        what = f"between {config['ranks']} ranks{', ' * bool(link)}{link}"
        yield what, "B/s", known["link_bytes_per_s"]
        yield what, "latency", known["latency_ms"]


def rates_table(book: Book, records: Iterable[Record]) -> Table:
    """Table of the machine's rates, used by predictions: each the median over the runs, with their spread."""
    rows = []
    for what, which in sorted(machine_rates(records).items(), reverse=True):
        unit, values = next(iter(which.items()))
        low, high = (f"{format_count(each)}{unit}" for each in (min(values), max(values)))
        rows.append({
            "<rate of this machine": what, "median of the runs": f"{format_count(median(values))}{unit}",
            "least to greatest": f"{low} to {high}" if len(values) > 1 else NONE,
            "latency of a call": format_seconds(median(which["latency"]) / 1e3) if "latency" in which else NONE,
            "runs": str(len(values)),
        })  # fmt: skip
    return Table(book, rows)


def sizes_table(book: Book) -> Table:
    """Table of the models that tables name: their editions, parameters and shape."""
    first = COURSE_YEARS[0]
    named = [("tiny", first, "this project's"), *((s, y, str(y)) for y in COURSE_YEARS for s in course_sizes(y))]
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for size, year, edition in named:
        chosen = preset(size, year)
        model, batch = chosen.model, f"{chosen.batch_size} x {chosen.model.context_length}"
        parameters = format_count(sum(count_parameters(model).values()), "B")
        shape = {"parameters": parameters, "layers": model.num_layers, "width": model.d_model, "heads": model.num_heads}
        row = {"<size": size, "<editions": "", **{head: str(value) for head, value in shape.items()}, BATCH: ""}
        row = found.setdefault((size, *row.values()), row)
        for head, value in (("<editions", edition), (BATCH, batch)):
            if value not in row[head].split(", "):
                row[head] = f"{row[head]}, {value}".removeprefix(", ")
    return Table(book, [*found.values()])
