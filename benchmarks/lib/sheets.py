"""Tables of records: the same on a terminal, when they have been measured, and on a page of docs/."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.lib.contest import format_ms
from benchmarks.records import Record, read_records
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_count, format_seconds
from cs336_systems.host.table import Table

Item = TypeVar("Item")
MOST_NAMES = 12  # before a remark


def machine(record: Record) -> str:
    """`AMD EPYC, 2 cores, torch 2.13.0, commit abcdef0`: where a record was measured."""
    where = record.environment
    commit = f"{str(where['commit'] or 'unknown')[:7]}{' with changes' if where['dirty'] else ''}"
    return f"{where['device']}, {where['cores']} cores, torch {where['torch']}, commit {commit}"


def day(records: Iterable[Record]) -> str:
    """The date of the latest record."""
    return max(str(record.environment["date"]) for record in records)[:10]


def groups(items: Iterable[Item], key: Callable[[Item], Any]) -> list[list[Item]]:
    """Records, or other items, of the same key together, in order."""
    found: dict[Any, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def median(record: Record) -> str:
    """The median and the standard deviation over the mean, with a mark if the record is flagged."""
    metrics = record.metrics
    return f"{time(metrics['median_ms'])} ± {metrics['std_ms'] / metrics['mean_ms']:.0%}" + "*" * bool(record.flags)


MARK = "\\*: flagged when it was measured, as noisy or on a busy machine: trust the ratios."


def time(milliseconds: float) -> str:
    """A time in the unit that suits it."""
    return format_seconds(milliseconds / 1e3)


def ratio(metrics: dict[str, Any], prefix: str = "") -> str:
    """`0.970 (0.95 to 0.99)`: the median of the ratios pair by pair, and their quartiles."""
    middle, low, high = (metrics[f"{prefix}ratio_{name}"] for name in ("median", "low", "high"))
    return f"{middle:.3f} ({low:.2f} to {high:.2f})"


def remarks(records: Sequence[Record], name: Callable[[Record], str]) -> list[str]:
    """Flags, each once, after the names of the records that have it; those that several records all have come last,
    without names."""
    found: dict[str, list[str]] = {}
    for record in records:
        for flag in record.flags:
            found.setdefault(flag, []).append(name(record))
    shared = [flag for flag, names in found.items() if 1 < len(names) == len(records)]
    who = {flag: ", ".join(names[:MOST_NAMES]) + ", ..." * (len(names) > MOST_NAMES) for flag, names in found.items()}
    return [*(f"{who[flag]}: {flag}" for flag in found if flag not in shared), *shared]


def show(tables: Iterable[Table]) -> None:
    """Print tables."""
    for table in tables:
        console.console().print(table.table())


def pages(
    results: Path, benchmark: str, sheets: Callable[[list[Record]], Sequence[Table]], shared: bool = False
) -> list[str]:
    """The tables of every machine's records as Markdown; a note that is `shared` stands below the last alone."""
    paths = sorted(results.glob(f"*/{benchmark}.jsonl"))
    tables = [table for path in paths for table in sheets(read_records(path))]
    last = {table.note: table for table in tables}
    kept = (table if last[table.note] is table or not shared else replace(table, note="") for table in tables)
    return [table.markdown(level=0).rstrip("\n") for table in kept]


Column = tuple[str, Callable[[Record], str]]


@dataclass(frozen=True)
class Sheet:
    """The table of a benchmark: the shape of a record, and the columns besides median and prediction."""

    what: str  # a shape consists of
    shape: Callable[[Record], str]
    columns: Sequence[Column]  # a page shows the first two
    caption: str
    whole: Callable[[dict[str, Any]], bool]  # configurations of whole passes, which alone are on a page

    def row(self, record: Record, columns: Sequence[Column]) -> list[str]:
        """The median with its relative standard deviation, or why there is none, the prediction, and other columns."""
        start, metrics = [self.shape(record), record.config["pass"], record.config["candidate"]], record.metrics
        if record.status != "ok":
            return [*start, record.flags[0] if record.flags else record.status, "", *[""] * len(columns)]
        median = f"{format_ms(metrics['median_ms'])} ± {metrics['std_ms'] / metrics['mean_ms']:.0%}"
        return [*start, median, format_ms(record.predicted["median_ms"]), *(cell(record) for _, cell in columns)]

    def table(self, records: Sequence[Record], columns: Sequence[Column], note: str = "") -> Table:
        """Some records of one machine."""
        where = records[-1].environment
        title = f"{where['device']}, {where['threads']} threads, torch {where['torch']}, {records[0].benchmark}"
        heads = (self.what, "pass", "candidate", "median", "predicted", *(head for head, _ in columns))
        return Table(title, heads, [self.row(record, columns) for record in records], note)

    def page(self, records: Sequence[Record]) -> list[Table]:
        """The whole passes, without the candidates that cannot do them."""
        shown = [record for record in records if record.status != "unsupported" and self.whole(record.config)]
        return [self.table(shown, self.columns[:2])] if shown else []

    def show(self, records: Sequence[Record]) -> None:
        """Print all passes, then the candidates that cannot do them and what is suspect."""
        if shown := [record for record in records if record.status != "unsupported"]:
            columns = [(head, cell) for head, cell in self.columns if any(map(cell, shown))]
            note = f"{self.caption}\n{ceilings(records)} triton: {records[0].environment['triton']}"
            show([self.table(shown, columns, note)])
        told = []
        for each in records:
            flags = each.flags[each.status == "out-of-memory" :]  # the table shows the others
            told.append(replace(each, flags=[flag for flag in flags if not flag.startswith("noisy")]))
        for line in remarks(told, lambda each: f"{self.shape(each)} {each.config['pass']} {each.config['candidate']}"):
            console.console().print(line, markup=False)


def metric(key: str, form: Callable[[Any], str], of: str = "metrics") -> Callable[[Record], str]:
    """A column of one metric, or of a prediction; it may be unknown, and is empty where a record lacks it."""

    def cell(record: Record) -> str:
        value = getattr(record, of).get(key, "")
        return value if value == "" else "unknown" if value is None else form(value)

    return cell


BEST_OTHER = ("/ best other", metric("ratio_median", "{:.2f}".format))
HOST = ("host", metric("host_us", lambda microseconds: format_ms(microseconds / 1e3)))
PEAKS = (
    ("peak", metric("peak_memory_bytes", format_bytes)),
    ("predicted", metric("peak_memory_bytes", format_bytes, "predicted")),
)


def ceilings(records: Sequence[Record]) -> str:
    """The rates that predictions were made with: of products by dtype, and of a large copy."""
    found: dict[str, dict[str, None]] = {"Largest matrix products": {}, "Large copy": {}}
    for record in records:
        products, copy = (record.predicted.get(rate) for rate in ("peak_flops_per_s", "bandwidth_bytes_per_s"))
        if products:
            found["Largest matrix products"][f"{record.config['dtype']} {format_count(products)}FLOP/s"] = None
        if copy:
            found["Large copy"][f"{format_count(copy)}B/s"] = None
    return " ".join(f"{title}: {', '.join(rates)}." for title, rates in found.items() if rates)
