"""The table of the records of `benchmarks.checkpoints`, for a terminal and as Markdown."""

from benchmarks.lib.sheets import MARK, day, groups, machine, median
from benchmarks.records import Record
from cs336_systems.host.console import format_bytes, format_seconds
from cs336_systems.host.table import Table

HEADS = ("candidate", "time", "predicted", "bytes/s", "/ DCP's", "quartiles")
NOTE = (
    "In the background: how long training stands still. Loads are from the page cache; ours compares every SHA-256. "
    "`torch.save` does not wait for the disk. The ratios are of pairs of turns: ours, and torch's, over DCP's."
)


def row(record: Record) -> list[str]:
    """One candidate."""
    metrics = record.metrics
    predicted = format_seconds(record.predicted["mean_ms"] / 1e3) if record.predicted else ""
    speed = f"{format_bytes(metrics['bytes'] / metrics['median_ms'] * 1e3)}/s"
    quartiles = f"{metrics['ratio_low']:.2f} to {metrics['ratio_high']:.2f}"
    return [record.config["candidate"], median(record), predicted, speed, f"{metrics['ratio_median']:.2f}", quartiles]


def sheets(records: list[Record]) -> list[Table]:
    """A table for each size, number of ranks and machine, with all candidates."""
    found = []
    for group in groups(records, title):
        noisy = f"\n{MARK}" if any(record.flags for record in group) else ""
        found.append(Table(f"{title(group[0])}, {day(group)}", HEADS, [row(record) for record in group], NOTE + noisy))
    return found


def title(record: Record) -> str:
    """The state that is saved, and the machine."""
    config, size = record.config, format_bytes(record.metrics["bytes"])
    return f"{config['size']}, {size} of weights and AdamW state, {config['ranks']} ranks; {machine(record)}"
