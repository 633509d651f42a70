"""The table of a benchmark of kernels: a row for each candidate and pass, and what is suspect or missing below it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """A column of one metric; empty where a record lacks it."""
    return lambda record: "" if record.metrics.get(key) is None else form(record.metrics[key])


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
        known = {r.config["dtype"]: r.predicted[key] for r in records if key in r.predicted}
        if known:
            found.append(f"{title}: {', '.join(f'{name} {format_count(rate)}{unit}' for name, rate in known.items())}.")
    return " ".join(found)


def show(records: Sequence[Record], sheet: Sheet) -> None:
    """Print the records as a table, those of one shape together, and below it what is suspect or missing.

    Of a candidate that was refused, one record stands for all its passes.
    """
    stamp = records[0].environment
    title = f"{stamp['device']}, {stamp['threads']} threads, torch {stamp['torch']}, triton {stamp['triton']}"
    caption = f"{sheet.caption}\n{ceilings(records)}"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for number, head in enumerate((sheet.what, "pass", "median", "predicted", *(head for head, _ in sheet.columns))):
        table.add_column(head, justify="right" if number else "left", no_wrap=number == 0)
    shown: tuple[str, str] = ("", "")
    remarks: dict[str, list[str]] = {}
    for record in records:
        where, name = sheet.shape(record), record.config["candidate"]
        if where != shown[0]:
            table.add_section()
            table.add_row(where, style="bold")
        if record.status == "ok" or shown != (where, name):
            cells = [*time_cells(record), *(cell(record) for _, cell in sheet.columns)]
            what = record.config["pass"].replace("forward-backward", "both")
            table.add_row(f"  {name}", what, *cells, style=None if record.status == "ok" else "dim")
        shown = (where, name)
        for flag in record.flags:
            if not flag.startswith("noisy") and not flag.endswith("is not installed"):  # which the table shows
                remarks.setdefault(f"{name}: {flag}", []).append(where)
    out = console.console()
    out.print(table)
    for flag, places in remarks.items():
        shapes = list(dict.fromkeys(places))
        out.print(f"{flag} ({'; '.join(shapes) if len(shapes) <= 3 else f'{len(shapes)} shapes'})", markup=False)
