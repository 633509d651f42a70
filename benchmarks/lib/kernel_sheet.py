"""The table of a benchmark of kernels: a row for each candidate and pass, and what is suspect or missing below it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.table import Table

from benchmarks.lib.contest import format_ms
from benchmarks.records import Record
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_count


@dataclass(frozen=True)
class Sheet:
    """The table of a benchmark: the shape of a record, and the columns besides median and prediction."""

    what: str  # a shape consists of
    shape: Callable[[Record], str]
    columns: Sequence[tuple[str, Callable[[Record], str]]]
    caption: str


def metric(key: str, form: Callable[[Any], str]) -> Callable[[Record], str]:
    """A column of one metric, which may be unknown; empty where a record lacks it."""

    def cell(record: Record) -> str:
        value = record.metrics.get(key, "")
        return value if value == "" else "unknown" if value is None else form(value)

    return cell


BEST_OTHER = ("/ best other", metric("ratio_median", "{:.2f}".format))
HOST = ("host", metric("host_us", lambda microseconds: format_ms(microseconds / 1e3)))
PEAK = ("peak", metric("peak_memory_bytes", format_bytes))
PLANNED_PEAK = (
    "predicted",
    lambda record: (
        format_bytes(record.predicted["peak_memory_bytes"]) if "peak_memory_bytes" in record.predicted else ""
    ),
)


def time_cells(record: Record) -> list[str]:
    """The median with its relative standard deviation, or why there is none, and the prediction."""
    metrics, predicted = record.metrics, format_ms(record.predicted["median_ms"])
    if record.status == "ok":
        spread = f"{format_ms(metrics['median_ms'])} ± {metrics['std_ms'] / metrics['mean_ms']:.0%}"
        return [spread, predicted]
    if record.status == "out-of-memory":
        return ["does not fit", predicted]
    known = [word for word in ("wrong result", "not installed") if word in record.flags[0]]
    return [*(known or [record.status]), predicted]


def ceilings(records: Sequence[Record]) -> str:
    """The rates that predictions were made with."""
    rates = {
        "Largest matrix products": ("peak_flops_per_s", "FLOP/s"), "Large copy": ("bandwidth_bytes_per_s", "B/s")
    }  # fmt: skip
    found = []
    for title, (key, unit) in rates.items():
        known = {r.config["dtype"]: f"{format_count(r.predicted[key])}{unit}" for r in records if key in r.predicted}
        alike = len(set(known.values())) == 1 and key == "bandwidth_bytes_per_s"
        words = list(known.values())[:1] if alike else [f"{dtype} {rate}" for dtype, rate in known.items()]
        found += [f"{title}: {', '.join(words)}."] if words else []
    return " ".join(found)


def show(records: Sequence[Record], sheet: Sheet) -> None:
    """Print the records as a table, those of one shape together, and below it what is suspect or missing.

    A candidate that was refused has one row for all passes that were refused alike.
    """
    stamp = records[0].environment
    title = f"{stamp['device']}, {stamp['threads']} threads, torch {stamp['torch']}, triton {stamp['triton']}"
    caption = f"{sheet.caption}\n{ceilings(records)}"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    columns = [(head, cell) for head, cell in sheet.columns if any(map(cell, records))]
    for number, head in enumerate((sheet.what, "pass", "median", "predicted", *(head for head, _ in columns))):
        table.add_column(head, justify="right" if number else "left", no_wrap=number == 0)
    remarks, above = dict[str, list[str]](), ""
    for (where, name, *_), alike in groupby(records, lambda each: _row_key(sheet, each)):
        same = list(alike)
        if where != above:
            table.add_section()
            table.add_row(where, style="bold")
            above = where
        passes = " and ".join(record.config["pass"].replace("forward-backward", "both") for record in same)
        cells = [*time_cells(same[-1]), *(cell(same[-1]) for _, cell in columns)]
        table.add_row(f"  {name}", passes, *cells, style=None if same[0].status == "ok" else "dim")
        for record in same:
            for flag in record.flags:
                if not flag.startswith("noisy") and not flag.endswith("is not installed"):  # the table shows these
                    remarks.setdefault(f"{name}: {flag}", []).append(f"{where}, {record.config['pass']}")
    out = console.console()
    out.print(table)
    for flag, places in remarks.items():
        shapes = list(dict.fromkeys(places))
        out.print(f"{flag} ({'; '.join(shapes) if len(shapes) <= 3 else f'{len(shapes)} shapes'})", markup=False)


def _row_key(sheet: Sheet, record: Record) -> tuple[str, ...]:
    """Key of the records of one row: a candidate that was refused has one row for all passes refused alike."""
    shape, name = sheet.shape(record), record.config["candidate"]
    return (
        (shape, name, record.config["pass"]) if record.status == "ok" else (shape, name, record.status, *record.flags)
    )
