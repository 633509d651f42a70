"""The table of the records of `benchmarks.checkpoints`, for a terminal and as Markdown."""

from pathlib import Path

from benchmarks.records import Record, read_records
from cs336_systems.host.console import format_bytes, format_seconds
from cs336_systems.host.table import Table

HEADS = ("candidate", "time", "predicted", "bytes/s", "/ DCP's", "quartiles")
NOTE = (
    "In the background: how long training stands still. Loads are from the page cache; ours compares every SHA-256. "
    "`torch.save` does not wait for the disk. The ratios are of pairs of turns: ours, and torch's, over DCP's."
)


def row(record: Record) -> list[str]:
    """One candidate."""
    metrics, mark = record.metrics, "*" if record.flags else ""
    time = f"{format_seconds(metrics['median_ms'] / 1e3)} ± {metrics['std_ms'] / metrics['mean_ms']:.0%}{mark}"
    predicted = format_seconds(record.predicted["mean_ms"] / 1e3) if record.predicted else ""
    speed = f"{format_bytes(metrics['bytes'] / metrics['median_ms'] * 1e3)}/s"
    quartiles = f"{metrics['ratio_low']:.2f} to {metrics['ratio_high']:.2f}"
    return [record.config["candidate"], time, predicted, speed, f"{metrics['ratio_median']:.2f}", quartiles]


def checkpoint_sheet(records: list[Record]) -> Table:
    """All candidates of one size and number of ranks."""
    where, config = records[0].environment, records[0].config
    commit = f"{str(where['commit'])[:7]}{' with changes' if where['dirty'] else ''}"
    title = (
        f"{config['size']}, {format_bytes(records[0].metrics['bytes'])} of weights and AdamW state, {config['ranks']} "
        f"ranks on {where['device']}, torch {where['torch']}, commit {commit}, {str(where['date'])[:10]}"
    )
    noisy = "\n\\*: noisy, trust the ratios." if any(record.flags for record in records) else ""
    return Table(title, HEADS, [row(record) for record in records], NOTE + noisy)


def checkpoint_tables(results: Path) -> list[str]:
    """A Markdown table for each machine, size and number of ranks that has records."""
    tables = []
    for path in sorted(results.glob("*/checkpoints.jsonl")):
        groups: dict[tuple[str, int], list[Record]] = {}
        for record in read_records(path):
            groups.setdefault((record.config["size"], record.config["ranks"]), []).append(record)
        tables += [checkpoint_sheet(records).markdown(level=0).strip() for records in groups.values()]
    return tables
