"""Tables of records: the same on a terminal, when they have been measured, and on a page of docs/."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.records import Record, read_records
from cs336_systems.host import console
from cs336_systems.host.console import format_seconds
from cs336_systems.host.table import Table


def machine(record: Record) -> str:
    """`AMD EPYC, 2 cores, torch 2.13.0, commit abcdef0, 2026-01-02`: where and when a record was measured."""
    where = record.environment
    commit = f"{str(where['commit'])[:7]}{' with changes' if where['dirty'] else ''}"
    return (
        f"{where['device']}, {where['cores']} cores, torch {where['torch']}, commit {commit}, {str(where['date'])[:10]}"
    )


def groups(records: Iterable[Record], key: Callable[[Record], Any]) -> list[list[Record]]:
    """Records of the same key together, in order."""
    found: dict[Any, list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return list(found.values())


def median(record: Record) -> str:
    """The median and the standard deviation over the mean, with a mark if that is large."""
    metrics = record.metrics
    return f"{time(metrics['median_ms'])} ± {metrics['std_ms'] / metrics['mean_ms']:.0%}" + "*" * bool(record.flags)


def time(milliseconds: float) -> str:
    """A time in the unit that suits it."""
    return format_seconds(milliseconds / 1e3)


def ratio(metrics: dict[str, Any], prefix: str = "") -> str:
    """`0.970 (0.950 to 0.990)`: the median of the ratios pair by pair, and their quartiles."""
    middle, low, high = (metrics[f"{prefix}ratio_{name}"] for name in ("median", "low", "high"))
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def show(tables: Iterable[Table]) -> None:
    """Print tables."""
    for table in tables:
        console.console().print(table.table())


def pages(results: Path, benchmark: str, sheets: Callable[[list[Record]], Sequence[Table]]) -> list[str]:
    """The tables of every machine's records as Markdown; a note that several tables share stands below the last."""
    paths = sorted(results.glob(f"*/{benchmark}.jsonl"))
    tables = [table for path in paths for table in sheets(read_records(path))]
    last = {table.note: table for table in tables}
    return [
        (table if last[table.note] is table else replace(table, note="")).markdown(level=0).rstrip("\n")
        for table in tables
    ]
