"""Basics before the first table: the machine's rates, the names of the models."""

from collections.abc import Iterable, Iterator
from statistics import median

from benchmarks.records import Record
from cs336_systems.cost.flops import count_parameters
from cs336_systems.host.console import format_count, format_seconds
from cs336_systems.host.text import markdown_text, printable
from cs336_systems.presets import COURSE_YEARS, course_sizes, preset
from writeup.book import Book
from writeup.cells import NONE
from writeup.tables import Table


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
