"""The measured tables of the README and of docs/, from records: `python -m benchmarks.tables [--write README.md]`."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import click

from benchmarks import attention, checkpoints, fused, long_context, norms
from benchmarks.e2e import COLUMNS, label, row
from benchmarks.lib import memory_tables
from benchmarks.lib.cost_tables import cost_tables
from benchmarks.lib.expert_tables import expert_tables
from benchmarks.lib.parallel_tables import parallel_tables
from benchmarks.lib.scaling_tables import scaling_tables
from benchmarks.lib.sheets import day, groups, machine, pages
from benchmarks.lib.workload import PassSettings
from benchmarks.records import RESULTS, Record, shown
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.table import Table
from cs336_systems.host.text import markdown_text
from cs336_systems.presets import DEFAULT_YEAR, preset

BEGIN, END = "<!-- measured: begin (make readme writes this) -->", "<!-- measured: end -->"
LONG = re.compile(r"(?:^\|.*\n){28,}", re.MULTILINE)  # a table of 26 rows or more, below its heads
FIRST = {
    "kernels": "python -m benchmarks.norms",
    "memory": "python -m benchmarks.memory --all-sizes",
    "scaling": "python -m benchmarks.scaling",
    "checkpoints": "python -m benchmarks.checkpoints",
    "context": "python -m benchmarks.long_context",
}


def passes(records: list[Record]) -> list[Table]:
    """A table for each machine and state of the code, of the sizes as their presets have them: the write-up shows what
    was chosen otherwise. Flagged records explain themselves."""
    found = []
    for group in groups((each for each in records if not chosen(each)), machine):
        flagged = [f"{label(r)} {r.config['mode']} ({'; '.join(r.flags)})." for r in group if r.flags]
        note = "\n".join(["\\* flagged as hard to quote:", *map(markdown_text, flagged)]) if flagged else ""
        found.append(Table(f"{machine(group[0])}, {day(group)}", COLUMNS, [row(record) for record in group], note))
    return found


def chosen(record: Record) -> list[str]:
    """Options that differ from the size's preset."""
    config = record.config
    model = preset(config["size"], config["year"]).model
    usual = {"year": DEFAULT_YEAR, "precision": "fp32", "norm": model.norm, "attention": model.attention}
    usual["kernels"] = model.kernels
    usual |= {"compile": False, "recompute": "none", "warmup": PassSettings.warmup}
    return [f"{name} {config[name]}" for name in usual if config.get(name, usual[name]) != usual[name]]


def kernel_pages(results: Path) -> list[str]:
    """The Markdown tables of every machine's kernels."""
    sheets = {"norms": norms.SHEET, "attention": attention.SHEET, "fused": fused.SHEET}
    return [page for name, sheet in sheets.items() for page in pages(results, name, sheet.page)]


TABLES: dict[str, Callable[[Path], list[str]]] = {
    "e2e": lambda results: pages(results, "e2e", passes),
    "parallel": parallel_tables,
    "kernels": kernel_pages,
    "memory": lambda results: pages(results, "memory", memory_tables.sheets),
    "scaling": scaling_tables,
    "experts": expert_tables,
    "cost": cost_tables,
    "checkpoints": lambda results: pages(results, "checkpoints", checkpoints.sheets),
    "context": lambda results: pages(results, "long_context", long_context.sheets, shared=True),
}


def measured_tables(results: Path = RESULTS, what: str = "e2e") -> str:
    """Every machine's tables of one kind. Raises UserError if there is no record at all."""
    with shown(results):
        tables = TABLES[what](results)
    if tables:
        return "\n\n".join(tables)
    if what in FIRST:
        return f"Not measured yet: `{FIRST[what]}`, then `make readme`."
    raise UserError(
        f"no records under {results}; run python -m benchmarks.{'ddp' if what == 'parallel' else 'e2e'} first"
    )


def folded(tables: str) -> str:
    """The tables, long ones folded away below their titles."""
    fold = "<details>\n<summary>{} rows</summary>\n\n{}\n</details>\n"
    return LONG.sub(lambda rows: fold.format(rows[0].count("\n") - 2, rows[0]), f"{tables}\n").rstrip("\n")


def insert(text: str, tables: str) -> str:
    """The text with the tables between its two marks. Raises UserError if it lacks them."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise UserError(f"the file needs one line {BEGIN} and one line {END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{folded(tables)}\n\n{END}{rest.split(END)[1]}"


@click.command()
@click.option(
    "--write", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="File whose marked part is replaced."
)
@click.option(
    "--what",
    type=click.Choice(list(TABLES)),
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
