"""The measured tables of the README and of docs/, from records: `python -m benchmarks.tables [--write README.md]`."""

import sys
from pathlib import Path

import click

from benchmarks.checkpoint_tables import checkpoint_tables
from benchmarks.cost_tables import cost_tables
from benchmarks.expert_tables import expert_tables
from benchmarks.kernel_tables import goals_table, kernel_tables
from benchmarks.lib.plan import PassSettings
from benchmarks.lib.scaling_tables import scaling_tables
from benchmarks.long_context import context_tables
from benchmarks.memory_tables import memory_tables
from benchmarks.parallel_tables import parallel_tables
from benchmarks.records import RESULTS, Record, read_records, shown
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_count, format_seconds
from cs336_systems.host.text import markdown_row, markdown_text
from cs336_systems.presets import DEFAULT_YEAR, preset

BEGIN, END = "<!-- measured: begin (make readme writes this) -->", "<!-- measured: end -->"
FIRST = {
    "kernels": "python -m benchmarks.norms",
    "memory": "python -m benchmarks.memory --all-sizes",
    "scaling": "python -m benchmarks.scaling",
    "checkpoints": "python -m benchmarks.checkpoints",
    "context": "python -m benchmarks.long_context",
}
COLUMNS = ("size", "pass", "measured", "predicted", "tokens/s", "MFU", "peak memory", "predicted")


def end_to_end(path: Path) -> list[str]:
    """One Markdown table for each state of the code and the machine that a file of records comes from, of the sizes as
    their presets have them: the write-up shows what was chosen otherwise."""
    groups: dict[str, list[Record]] = {}
    for record in (each for each in read_records(path) if not chosen(each)):
        where = record.environment
        commit = f"{str(where['commit'])[:7]}{' with changes' if where['dirty'] else ''}"
        about = markdown_text(f"{where['cores']} cores, torch {where['torch']}, commit {commit}")
        groups.setdefault(f"**{markdown_text(where['device'])}**, {about}", []).append(record)
    return [table(machine, records) for machine, records in groups.items()]


def table(machine: str, records: list[Record]) -> str:
    """The records of one machine and commit, under what they were measured on; flagged ones explain themselves."""
    date = max(str(record.environment["date"]) for record in records)[:10]
    lines = [f"{machine}, {markdown_text(date)}:", "", f"| {' | '.join(COLUMNS)} |"]
    lines.append(f"|{' --- |' * 2}{' --: |' * (len(COLUMNS) - 2)}")
    lines += [markdown_row(row(record)) for record in records]
    if any(record.flags for record in records):
        lines += ["", "\\* flagged as hard to quote:"]
        quoted = [f"{label(r)} {r.config['mode']} ({'; '.join(r.flags)})." for r in records if r.flags]
        lines += map(markdown_text, quoted)
    return "\n".join(lines)


def chosen(record: Record) -> list[str]:
    """Options that differ from the size's preset."""
    config = record.config
    model = preset(config["size"], config["year"]).model
    usual = {"year": DEFAULT_YEAR, "precision": "fp32", "norm": model.norm, "attention": model.attention}
    usual["kernels"] = model.kernels
    usual |= {"compile": False, "recompute": "none", "warmup": PassSettings.warmup}
    return [f"{name} {config[name]}" for name in usual if config.get(name, usual[name]) != usual[name]]


def label(record: Record) -> str:
    """The size, and what one pass takes."""
    config = record.config
    return f"{config['size']} {config['batch_size']} x {config['context']}"


def row(record: Record) -> list[str]:
    """One record as cells; what did not fit shows what it would have needed."""
    metrics, predicted = record.metrics, record.predicted
    time, memory = format_seconds(predicted["mean_ms"] / 1e3), format_bytes(predicted["peak_memory_bytes"])
    start = [label(record), str(record.config["mode"])]
    if record.status != "ok":
        return [*start, "does not fit", time, "", "", "", memory]
    spread = f"{format_seconds(metrics['median_ms'] / 1e3)} ± {metrics['std_ms'] / metrics['mean_ms']:.0%}"
    peak = "unknown" if metrics["peak_memory_bytes"] is None else format_bytes(metrics["peak_memory_bytes"])
    mark = "*" if record.flags else ""
    return [*start, spread + mark, time, format_count(metrics["tokens_per_s"]), f"{metrics['mfu']:.0%}", peak, memory]


def measured_tables(results: Path = RESULTS, what: str = "e2e") -> str:
    """Every machine's tables of passes, several ranks, kernels, memory, layouts, experts, checkpoints or long
    sequences, or those of the cost model; with passes, the kernels' goals.

    Raises UserError if there is no record at all.
    """
    make = {
        "parallel": parallel_tables, "kernels": kernel_tables, "memory": memory_tables, "scaling": scaling_tables,
        "experts": expert_tables, "cost": cost_tables, "checkpoints": checkpoint_tables, "context": context_tables,
        "e2e": lambda results: [table for path in sorted(results.glob("*/e2e.jsonl")) for table in end_to_end(path)],
    }[what]  # fmt: skip
    with shown(results):
        tables = make(results)
    if not tables and what in FIRST:
        return f"Not measured yet: `{FIRST[what]}`, then `make readme`."
    if not tables:
        raise UserError(
            f"no records under {results}; run python -m benchmarks.{'ddp' if what == 'parallel' else 'e2e'} first"
        )
    return "\n\n".join([*tables, goals_table(results)] if what == "e2e" else tables)


def insert(text: str, tables: str) -> str:
    """The text with the tables between its two marks. Raises UserError if it lacks them."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise UserError(f"the file needs one line {BEGIN} and one line {END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{rest.split(END)[1]}"


@click.command()
@click.option(
    "--write", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="File whose marked part is replaced."
)
@click.option(
    "--what",
    type=click.Choice(["e2e", "parallel", "kernels", "memory", "scaling", "experts", "cost", "checkpoints", "context"]),
    default="e2e",
    help="Whole passes (e2e), several ranks (parallel), layouts (scaling), long sequences (context), or as named.",
)
@click.option(
    "--results",
    type=click.Path(path_type=Path, file_okay=False),
    default=RESULTS,
    help="Folder of records, one subfolder per machine, such as runs/results.  [default: the project's]",
)
def main(write: Path | None, what: str, results: Path) -> None:
    """Print the measured tables as Markdown, or write them into a file."""
    if write is None:
        print(measured_tables(results, what))
    else:
        try:
            text = write.read_text()
        except UnicodeDecodeError as error:
            raise UserError(f"{write} is not UTF-8 text at byte {error.start}") from None
        write.write_text(insert(text, measured_tables(results, what)))


if __name__ == "__main__":
    sys.exit(console.run_command(main))
