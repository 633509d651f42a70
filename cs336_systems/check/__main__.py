"""Check a parallel wrapper, optimizer or training step against one process: `python -m cs336_systems.check TARGET`."""

import sys
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

import click

from cs336_systems.check.candidates import load, load_file
from cs336_systems.check.cases import KINDS
from cs336_systems.check.exercises import EXERCISES, grade
from cs336_systems.check.exercises import exercise as find_exercise
from cs336_systems.check.report import check
from cs336_systems.errors import UserError
from cs336_systems.host import console


def check_types(target: str) -> NoReturn:
    """Check the types of what a function of the user's returns, and end with the exit code."""
    from cs336_systems.check.types import type_check  # which loads models

    file, _, name = target.rpartition(":")
    if not callable(build := getattr(load_file(Path(file)), name, None)):
        raise UserError(f"{target}: name a function that returns a module and its inputs, as FILE.py:build")
    refusals = type_check(build)
    click.echo("\n".join(map(str, refusals)) or f"{target}: types accepted on 64 ranks")
    sys.exit(bool(refusals))


@click.command()
@click.argument("target", default="")
@click.option("--as", "kind", type=click.Choice(KINDS), help="Kind of TARGET; by default what its name and bases tell.")
@click.option("--ranks", type=click.IntRange(2, 16), default=2, show_default=True, help="Ranks, as forked processes.")
@click.option(
    "--timeout",
    type=console.PATIENCE,
    default=5.0,
    show_default=True,
    callback=console.finite,
    help="Seconds to wait for a rank.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 also for what is weak, refused or not offered.")
@click.option("--only", multiple=True, metavar="PROPERTY", help="Check only this property; may be repeated.")
@click.option("--types", is_flag=True, help="Check types alone: TARGET is FILE:NAME, a function like build() in docs.")
@click.option("--exercises", is_flag=True, help="List exercises, which are graded by these checks.")
@click.option("--exercise", metavar="NAME", help="Print an exercise's file to fill in; grade TARGET if it is given.")
@click.option("--tests", metavar="FILE", help="With --exercise: tests that pass on TARGET and fail where it is broken.")
def main(
    target: str,
    kind: str | None,
    ranks: int,
    timeout: float,
    strict: bool,
    only: tuple[str, ...],
    types: bool,
    exercises: bool,
    exercise: str | None,
    tests: str | None,
) -> None:
    """Compare TARGET on several ranks with one process, property by property.

    TARGET is FILE.py or FILE.py:NAME (a wrapper, a sharded optimizer, a training step, or the course's adapters),
    torch:ddp, torch:fsdp2, torch:zero, ours:ddp-naive ... ours:zero3, or accelerate. A function build()
    in the file gives the model. Exit code: 0 right, 1 wrong numbers, 2 it could not run.
    """
    if tests and not (exercise and target):
        raise UserError("--tests needs --exercise NAME and TARGET, the file that the tests are of")
    if exercises or (exercise and not target):
        lines = [f"{name:<{max(map(len, EXERCISES))}}  {each['title']}" for name, each in EXERCISES.items()]
        click.echo("\n".join(lines) if exercises else find_exercise(exercise or "")["file"].strip())
        return
    if not target:
        raise UserError("nothing to check: name a TARGET, as in python -m cs336_systems.check torch:ddp")
    if types:
        check_types(target)
    candidates, build = ([], None) if exercise else load(target, kind)
    checks = [partial(check, each, build, ranks=ranks, timeout=timeout, only=only) for each in candidates]
    if exercise:
        checks = [partial(grade, exercise, Path(target), ranks, timeout, tests=Path(tests) if tests else None)]
    codes = []
    for each in checks:
        start = time.monotonic()
        report = each()
        click.echo(f"{report} in {time.monotonic() - start:.1f} s")
        codes.append(report.exit_code(strict))
    sys.exit(max(codes))


if __name__ == "__main__":
    sys.exit(console.run_command(main))
