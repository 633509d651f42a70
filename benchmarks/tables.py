"""The README's measured tables, from the committed records: `python -m benchmarks.tables [--write README.md]`."""

import sys
from pathlib import Path

import click

from benchmarks.records import RESULTS, Record, read_records
from cs336_systems import console
from cs336_systems.console import format_bytes, format_count, format_seconds
from cs336_systems.errors import UserError

BEGIN, END = "<!-- measured: begin (make readme writes this) -->", "<!-- measured: end -->"
HEADS = ("size", "pass", "measured", "predicted", "tokens/s", "MFU", "peak memory", "predicted")


def end_to_end(path: Path) -> str:
    """The Markdown table of one machine's end-to-end records, newest first, with what it was measured on."""
    records = read_records(path)
    newest = max(records, key=lambda record: str(record.environment["date"])).environment
    where = f"**{newest['device']}**, {newest['cores']} cores, torch {newest['torch']}"
    when = f"commit {str(newest['commit'])[:7]}, {str(newest['date'])[:10]}"
    title = f"{where}, {when} (mean ± standard deviation; predicted by [`cost/`](cs336_systems/cost))"
    lines = [title, "", f"| {' | '.join(HEADS)} |", f"|{' --- |' * 2}{' --: |' * (len(HEADS) - 2)}"]
    return "\n".join(lines + [f"| {' | '.join(row(record))} |" for record in records])


def row(record: Record) -> list[str]:
    """One record as cells; what did not fit shows what it would have needed."""
    config, metrics, predicted = record.config, record.metrics, record.predicted
    time, memory = format_seconds(predicted["mean_ms"] / 1e3), format_bytes(predicted["peak_memory_bytes"])
    kind = "" if config["precision"] == "fp32" else f" ({config['precision']})"
    start = [f"{config['size']}{kind}, {config['batch_size']} x {config['context']}", str(config["mode"])]
    if record.status != "ok":
        return [*start, "does not fit", time, "", "", "", memory]
    spread = f"{format_seconds(metrics['mean_ms'] / 1e3)} ± {metrics['std_ms'] / metrics['mean_ms']:.0%}"
    peak = "unknown" if metrics["peak_memory_bytes"] is None else format_bytes(metrics["peak_memory_bytes"])
    return [*start, spread, time, format_count(metrics["tokens_per_s"]), f"{metrics['mfu']:.0%}", peak, memory]


def measured_tables(results: Path = RESULTS) -> str:
    """Every machine's table. Raises UserError if there is no record at all."""
    paths = sorted(results.glob("*/e2e.jsonl"))
    if not paths:
        raise UserError(f"no records under {results}; run python -m benchmarks.e2e first")
    return "\n\n".join(end_to_end(path) for path in paths)


def insert(text: str, tables: str) -> str:
    """The text with the tables between its two marks. Raises UserError if it lacks them."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise UserError(f"the file needs one line {BEGIN} and one line {END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{rest.split(END)[1]}"


@click.command()
@click.option("--write", type=click.Path(path_type=Path, exists=True), help="File whose marked part is replaced.")
def main(write: Path | None) -> None:
    """Print the measured tables as Markdown, or write them into a file."""
    if write is None:
        print(measured_tables())
    else:
        write.write_text(insert(write.read_text(), measured_tables()))


if __name__ == "__main__":
    sys.exit(console.run_command(main))
