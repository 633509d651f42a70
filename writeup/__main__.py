"""The write-up from records, as one HTML page and one PDF: `python -m writeup`."""

import sys
from importlib import import_module
from pathlib import Path

import click

from benchmarks.records import RESULTS
from cs336_systems.errors import UserError
from cs336_systems.host import console
from writeup.book import Book, choose_machine
from writeup.edition import parts

NEEDED = ("jinja2", "matplotlib", "pypandoc", "typst")


def require_extra() -> None:
    """Raises UserError that names what is not installed."""
    missing = []
    for name in NEEDED:
        try:
            import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise UserError(f"the write-up needs {', '.join(missing)}: pip install -e '.[writeup]'")


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("build/writeup"), show_default=True,
    help="Folder for index.html, writeup.pdf, writeup.md and figures/.",
)  # fmt: skip
@click.option("--machine", help="Machine to show, by part of its folder's name.  [default: the one with most records]")
@click.option(
    "--results",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of records, one subfolder per machine.  [default: the project's; with --run, runs/results]",
)
@click.option("--run", "run_first", is_flag=True, help="First run every benchmark that this machine can run.")
@click.option("--only", multiple=True, help="With --run: run only this benchmark; may be repeated.")
@click.option("--chapters", multiple=True, help="Write only this chapter, such as norms; may be repeated.")
@click.option(
    "--without-solutions", is_flag=True, help="Omit answers, derivations, changes of code and files of solutions."
)
def main(
    out: Path,
    machine: str | None,
    results: Path | None,
    run_first: bool,
    only: tuple[str, ...],
    chapters: tuple[str, ...],
    without_solutions: bool,
) -> None:
    """Write the write-up as one HTML page and one PDF; all its figures come from records."""
    require_extra()
    if only and not run_first:
        raise UserError("--only says what --run runs; without --run nothing is measured")
    parts(chapters)
    results = results or (Path("runs/results") if run_first else RESULTS)
    if not run_first and not results.is_dir():
        raise UserError(f"{results} is no folder of records; name one with --results, or measure first with --run")
    if run_first:
        from writeup.run import run_all

        machine = run_all(only, results, machine)
    from writeup.build import build

    build(Book(results, choose_machine(results, machine)), out, chapters, not without_solutions)


if __name__ == "__main__":
    sys.exit(console.run_command(main))
