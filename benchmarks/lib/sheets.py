"""Tables of records: the same on a terminal, when they have been measured, and on a page of docs/."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.records import Record, read_records
from cs336_systems.host import console
from cs336_systems.host.console import format_seconds
from cs336_systems.host.table import Table

Item = TypeVar("Item")


def machine(record: Record) -> str:
    """`AMD EPYC, 2 cores, torch 2.13.0, commit abcdef0`: where a record was measured."""
    where = record.environment
    commit = f"{str(where['commit'])[:7]}{' with changes' if where['dirty'] else ''}"
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
    return [*(f"{', '.join(names)}: {flag}" for flag, names in found.items() if flag not in shared), *shared]


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
