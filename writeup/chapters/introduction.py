"""Introduction: the document's purpose, its machine and models, the age of its records, its predictions' errors."""

from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

from benchmarks.records import Record, read_records
from cs336_systems.cost.flops import count_parameters
from cs336_systems.host.console import format_count, format_seconds
from cs336_systems.host.text import markdown_code, markdown_text, printable
from cs336_systems.presets import COURSE_YEARS, course_sizes, preset
from writeup.book import BENCHMARKS, Book, Citation, machines
from writeup.cells import NONE, median_ms, predicted_ms, quartiles
from writeup.figures import Figure, draw, ratio_rows
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
        "short": sum(said < seen for pairs in times.values() for said, seen in pairs)
        / max(1, sum(map(len, times.values()))),
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
        ratios = {name: [said / seen for said, seen in pairs] for name, pairs in times.items()}
        style = {"marker": ".", "markersize": 4, "alpha": 0.6}
        ratio_rows(axes, ratios, "predicted / measured time", [style] * len(ratios), medians=True)
        axes.set_xscale("log")
        ticks = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.tick_params(axis="x", which="minor", bottom=False)

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
        link = f", {plain_link(config['link'])}" if config.get("link") else ""
        yield f"between {config['ranks']} ranks{link}", "B/s", known["link_bytes_per_s"]
        yield f"between {config['ranks']} ranks{link}", "latency", known["latency_ms"]


def plain_link(name: str) -> str:
    """Name of a record's link in the words of the text."""
    return markdown_text(printable(name.replace("1gbit tbf", "1 Gbit/s link")))


def rates_table(book: Book, records: Iterable[Record]) -> Table:
    """Table of the machine's rates, used by predictions: each the median over the runs, with their spread."""
    rows = []
    for what, which in sorted(machine_rates(records).items(), reverse=True):
        unit, values = next(iter(which.items()))
        low, high = (f"{format_count(each)}{unit}" for each in (min(values), max(values)))
        late = format_seconds(median(which["latency"]) / 1e3) if "latency" in which else NONE
        spread = f"{low} to {high}" if len(values) > 1 else NONE
        rows.append([what, f"{format_count(median(values))}{unit}", spread, late, str(len(values))])
    columns = ("<rate of this machine", "median of the runs", "least to greatest", "latency of a call", "runs")
    return Table(book, columns, rows)


def sizes_table(book: Book) -> Table:
    """Table of the models that tables name: their editions, parameters and shape."""
    first = COURSE_YEARS[0]
    shapes: dict[tuple[str, ...], list[tuple[str, str]]] = {_shape("tiny", first): [("this project's", _batch("tiny"))]}
    for year in COURSE_YEARS:
        for size in course_sizes(year):
            shapes.setdefault(_shape(size, year), []).append((str(year), _batch(size, year)))
    rows = []
    for (size, *shape), found in shapes.items():
        editions, batches = (", ".join(dict.fromkeys(column)) for column in zip(*found, strict=True))
        rows.append([size, editions, *shape, batches])
    return Table(book, ("<size", "<editions", "parameters", "layers", "width", "heads", "batch x context"), rows)


def _shape(size: str, year: int) -> tuple[str, ...]:
    model = preset(size, year).model
    parameters = format_count(sum(count_parameters(model).values()), "B")
    return size, parameters, str(model.num_layers), str(model.d_model), str(model.num_heads)


def _batch(size: str, year: int = COURSE_YEARS[0]) -> str:
    chosen = preset(size, year)
    return f"{chosen.batch_size} x {chosen.model.context_length}"
