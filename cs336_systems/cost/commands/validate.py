"""`validate`: predicted beside measured, run by run and in total, for published runs or a file of one's own."""

from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

import click
from rich.console import Console

from cs336_systems.cost.commands.settings import FILE
from cs336_systems.cost.domain import time_range, warnings
from cs336_systems.cost.machines import GIB, load_constants
from cs336_systems.cost.plan_memory import peak_bytes, usable_memory
from cs336_systems.cost.runs import KEYS, PUBLISHED, TrainingRun, families, left_out_errors, read_runs, summed_up
from cs336_systems.cost.stacks import STACKS
from cs336_systems.cost.template import new_table, print_json
from cs336_systems.host.console import console, format_bytes

EPILOG = "\n\n".join(
    "\n".join(["\b", head, *(f"  {key}: {meaning}" for key, meaning in KEYS[part].items())])
    for part, head in KEYS["heads"].items()
)


@click.command("validate", epilog=EPILOG)
@click.argument("file", required=False, type=FILE)
@click.option("--constants", type=FILE, help="Constants in a file that `fit` wrote.  [default: those of this project]")
@click.option("--json", "as_json", is_flag=True, help="Print one list of predictions with their ranges instead.")
def command(file: Path | None, constants: Path | None, as_json: bool) -> None:
    """Predict time and memory of the runs in FILE, a JSON list, and compare them with what was measured.

    Without FILE, the published runs that this project keeps, by family. The range is where four of five runs of the
    stack fell when they were left out of the fit; "in range" counts predictions with the constants as they are.
    """
    runs = read_runs(file or PUBLISHED)
    if constants:
        runs = [run.under(load_constants(constants)) for run in runs]
    remarks, screen = console(stderr=True), console()
    for run in runs:
        for note in notes(run):
            remarks.print(f"note: {run.id}: {note}")
    if as_json:
        print_json([_record(run) for run in runs])
    elif file:
        _print_runs(screen, runs)
    else:
        _print_families(screen, runs)


def _record(run: TrainingRun) -> dict[str, Any]:
    step, need = run.step, sum(peak_bytes(run.config, run.plan, run.seq)[1].values()) / GIB
    (low, high), (least, most) = time_range(step), STACKS[run.plan.stack].bytes(need)
    return {
        "id": run.given["id"], "t_iter_s": run.seconds, "predicted_s": step.total, "low_s": low, "high_s": high,
        "mem_gib": run.gib, "predicted_gib": need, "low_gib": least, "high_gib": most, "stack": run.plan.stack,
        "warnings": warnings(run.config, run.plan, run.seq, run.system),
    }  # fmt: skip


def notes(run: TrainingRun) -> list[str]:
    """Assumptions about a run; for one that was not measured, also a note if it does not fit."""
    need, there = sum(peak_bytes(run.config, run.plan, run.seq)[1].values()), usable_memory(run.system)
    if run.seconds or need <= there:
        return list(run.notes)
    lacks = f"it needs {format_bytes(need)} on a rank, and {run.system.name} has {format_bytes(there)} of room"
    return [*run.notes, lacks]


def _print_runs(screen: Console, runs: list[TrainingRun]) -> None:
    rows = []
    for run in runs:
        step, off = run.step, "-" if run.error is None else run.error
        names, (low, high) = [run.id, f"{run.plan.ranks} {run.system.name}", run.plan.stack], time_range(step)
        rows.append(
            [*names, run.plan.short(), run.seconds or "-", step.total, f"{low:.4g} to {high:.4g}", off, step.mfu]
        )
    names = ["~run", "<machines", "<stack", "<plan"]
    screen.print(new_table([*names, "measured s:.4g", "predicted s:.4g", "range", "error:+.1%", "MFU:.1%"], rows))
    screen.print(_total("all runs", runs))


def _total(name: str, runs: list[TrainingRun]) -> str:
    measured = [run for run in runs if run.error is not None]
    if not measured:
        return f"{name}: nothing was measured, so nothing is compared"
    size, off, worst = summed_up(run.error for run in measured)
    return (
        f"{name}: {len(measured)} measured, error {size:.1%} on average, {worst:+.1%} at worst, {off:+.1%} with its "
        f"sign; {mean(run.in_range for run in measured):.0%} in range"
    )


def _print_families(screen: Console, runs: list[TrainingRun]) -> None:
    """A row for each family of published runs; "left out" are the errors by constants fitted without the family."""
    lines: list[list[Any] | None] = []
    for fitted, group in groupby(families(runs).items(), key=lambda each: each[0][0]):
        for (_, family, _, stack, machine), some in group:
            errors, (size, _, worst) = summed_up(run.error for run in some), summed_up(left_out_errors(some))
            names = [family, stack, machine, len(some), "yes" if fitted else "no"]
            lines.append([*names, *errors, mean(run.in_range for run in some), size, worst])
        lines.append(None)
    shown = ["mean |error|:.1%", "mean:+.1%", "worst:+.1%", "in range:.0%", "left out:.1%", "its worst:+.1%"]
    screen.print(new_table(["~family", "<stack", "<machine", "runs", "fitted", *shown], lines))
    for name, used in (("fitted", True), ("not fitted", False)):
        screen.print(_total(name, [run for run in runs if run.given["fitted"] == used]))
