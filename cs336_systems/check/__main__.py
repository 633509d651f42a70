"""Check a parallel wrapper, optimizer or training step against one process: `python -m cs336_systems.check TARGET`."""

import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import click

from cs336_systems.check.targets import EXERCISES, KINDS, TYPED_RANKS, require_target
from cs336_systems.errors import UserError
from cs336_systems.host import console


def type_checks(target: str, kind: str | None, timeout: float) -> list[Callable[[], Any]]:
    """Checks of types alone: of the model that a function without parameters, or named `build`, returns, or of a
    data-parallel wrapper, as which `kind` marks any function."""
    from cs336_systems.check.candidates import load, load_file
    from cs336_systems.check.shadow import check_reduction
    from cs336_systems.check.types import check_model

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it did not end in {10 * timeout:g} s, ten times --timeout")

    signal.signal(signal.SIGALRM, stop)  # after the imports, which take seconds
    signal.setitimer(signal.ITIMER_REAL, 10 * timeout, 10 * timeout)
    click.get_current_context().call_on_close(partial(signal.setitimer, signal.ITIMER_REAL, 0))
    path, _, name = target.partition(":")
    build = getattr(load_file(Path(path)), name, None) if path.endswith(".py") and name else None
    if callable(build) and (not signature(build).parameters or (name == "build" and kind is None)):
        try:
            signature(build).bind()
        except TypeError as error:
            todo = "give each parameter a default, or add --as ddp if it wraps a module"
            raise UserError(f"{target} is called without arguments: {error}; {todo}") from None
        return [partial(check_model, build, target)]
    return [partial(check_reduction, each) for each in load(target, kind)[0]]


def number_checks(
    target: str, kind: str | None, only: tuple[str, ...], exercise: str | None, tests: str | None, **options: Any
) -> list[Callable[[], Any]]:
    """Comparisons of candidates with one process, or the grading of an exercise."""
    if exercise:
        if ignored := [name for name, value in (("--as", kind), ("--only", only)) if value]:
            raise UserError(f"an exercise says what is checked: drop {' and '.join(ignored)}")
        from cs336_systems.check.exercises import grade

        return [partial(grade, exercise, Path(target), tests=Path(tests) if tests else None, **options)]
    from cs336_systems.check.candidates import load
    from cs336_systems.check.report import check

    candidates, build = load(target, kind)
    return [partial(check, each, build, only=only, **options) for each in candidates]


@click.command()
@click.argument("target", default="")
@click.option("--as", "kind", type=click.Choice(KINDS), help="Kind of TARGET.  [default: from its name and bases]")
@click.option("--ranks", type=click.IntRange(2, 16), default=2, show_default=True, help="Ranks; wrappers take 2 to 4.")
@click.option("--timeout", type=console.PATIENCE, default=5.0, show_default=True, callback=console.finite,
              help="Seconds that ranks wait for each other.")  # fmt: skip
@click.option("--strict", is_flag=True, help="Exit with code 1 also for verdicts weak, refused or not offered.")
@click.option("--only", multiple=True, metavar="PROPERTY", help="Check only this property; may be repeated.")
@click.option("--types", is_flag=True, help=f"Check only types, on {TYPED_RANKS} simulated ranks.")
@click.option("--exercises", is_flag=True, help="List the exercises that these checks grade.")
@click.option("--exercise", type=click.Choice(list(EXERCISES)), metavar="NAME", help="Print its file, or grade TARGET.")
@click.option("--tests", metavar="FILE", help="With --exercise: tests, which broken variants of TARGET must fail.")
def main(
    target: str, kind: str | None, ranks: int, timeout: float, strict: bool, only: tuple[str, ...], types: bool,
    exercises: bool, exercise: str | None, tests: str | None,
) -> None:  # fmt: skip
    """Compare TARGET on several ranks with one process, property by property.

    TARGET is FILE.py or FILE.py:NAME (a wrapper, a sharded optimizer, a training step, or the course's adapters),
    torch:ddp, torch:fsdp2, torch:zero, ours:ddp-naive ... ours:zero3, or accelerate. A function build()
    in the file gives the model; with --types TARGET may be FILE.py:build itself, which returns a split model and
    its inputs. Exit code: 0 right, 1 wrong numbers, 2 it could not run.
    """
    if tests and not (exercise and target):
        raise UserError("--tests needs --exercise NAME and TARGET, the file that the tests are of")
    if exercises or (exercise and not target):
        lines = [f"{name:<{max(map(len, EXERCISES))}}  {each['title']}" for name, each in EXERCISES.items()]
        click.echo("\n".join(lines) if exercises else EXERCISES[exercise or ""]["file"].strip())
        return
    if not target:
        raise UserError("nothing to check: name a TARGET, as in python -m cs336_systems.check torch:ddp")
    require_target(target)
    if types:
        given = {"--exercise": exercise, "--only": only, "--tests": tests, "--ranks": ranks != 2}
        if ignored := [name for name, value in given.items() if value]:
            raise UserError(f"--types has checks of its own, on {TYPED_RANKS} ranks: drop {' and '.join(ignored)}")
        checks = type_checks(target, kind, timeout)
    else:
        checks = number_checks(target, kind, only, exercise, tests, ranks=ranks, timeout=timeout)
    codes = []
    for each in checks:
        start = time.monotonic()
        report = each()
        click.echo(f"{report} in {time.monotonic() - start:.1f} s")
        codes.append(report.exit_code(strict))
    sys.exit(max(codes))


if __name__ == "__main__":
    sys.exit(console.run_command(main))
