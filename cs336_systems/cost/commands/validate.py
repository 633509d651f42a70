"""`validate`: predicted beside measured, run by run and in total, for published runs or a file of one's own."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from cs336_systems.cost.commands.output import new_table, print_json
from cs336_systems.cost.commands.request import ConstantOptions
from cs336_systems.cost.machines import CONSTANTS, load_constants
from cs336_systems.cost.options import take
from cs336_systems.cost.plan_memory import fits, peak_bytes, usable_memory
from cs336_systems.cost.runs import DEFAULTS, PUBLISHED, REQUIRED, TrainingRun, read_runs
from cs336_systems.cost.step_time import StepTime, step_time
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, options

KEYS = "\b\n" + "\n".join(
    ["Required keys of a run:"]
    + [f"  {key}: {meaning}" for key, meaning in REQUIRED.items()]
    + ["", "\b", "Others, and what is taken where they are absent, null, 0 or not understood:"]
    + [f"  {key}: {meaning}" for key, meaning in DEFAULTS.items()]
)


@click.command("validate", epilog=KEYS)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@options(ConstantOptions)
@click.option("--json", "as_json", is_flag=True, help="Print one list of {id, t_iter_s, predicted_s} instead.")
def command(file: Path | None, as_json: bool, **given: Any) -> None:
    """Predict the step time of the runs in FILE, a JSON list, and compare it with what was measured.

    Without FILE, the published runs that this project keeps, by family, those that constants were fitted to apart.
    """
    chosen = take(ConstantOptions, given).constants
    constants = load_constants(chosen) if chosen else CONSTANTS
    runs = read_runs(file or PUBLISHED)
    steps = [step_time(run.config, run.plan, run.seq, run.system, constants) for run in runs]
    remarks, pairs = console.console(stderr=True), list(zip(runs, steps, strict=True))
    for run in runs:
        for note in notes(run):
            remarks.print(f"note: {run.id}: {note}")
    if as_json:
        print_json([{"id": run.key, "t_iter_s": run.seconds, "predicted_s": step.total} for run, step in pairs])
    elif file:
        console.console().print(_table(pairs))
        console.console().print(_total("all runs", pairs))
    else:
        _print_families(console.console(), pairs)


def notes(run: TrainingRun) -> list[str]:
    """Assumptions about a run; of one that was not measured also that it does not fit."""
    found = list(run.notes)
    if run.seconds is None and not fits(run.config, run.plan, run.seq, run.system):
        need, there = sum(peak_bytes(run.config, run.plan, run.seq)[1].values()), usable_memory(run.system)
        found.append(
            f"it needs {format_bytes(need)} on a rank, and {run.system.name} has {format_bytes(there)} of room"
        )
    return found


def error(run: TrainingRun, step: StepTime) -> float | None:
    """Predicted over measured, less one; None for a run that was not measured."""
    return step.total / run.seconds - 1 if run.seconds else None


def _table(pairs: list[tuple[TrainingRun, StepTime]]) -> Table:
    table = new_table(["~run", "<machines", "<plan", "measured s", "predicted s", "error", "MFU"])
    for run, step in pairs:
        off = error(run, step)
        measured = "-" if run.seconds is None else f"{run.seconds:.4g}"
        errors = "-" if off is None else f"{off:+.1%}"
        machines = f"{run.plan.ranks} {run.system.name}"
        table.add_row(run.id, machines, run.plan.short(), measured, f"{step.total:.4g}", errors, f"{step.mfu:.1%}")
    return table


def _total(name: str, pairs: list[tuple[TrainingRun, StepTime]]) -> str:
    errors = [off for run, step in pairs if (off := error(run, step)) is not None]
    if not errors:
        return f"{name}: nothing was measured, so nothing is compared"
    worst = max(errors, key=abs)
    return (
        f"{name}: {len(errors)} measured, error {mean(map(abs, errors)):.1%} on average, {worst:+.1%} at worst, "
        f"{mean(errors):+.1%} with its sign"
    )


def _print_families(screen: Console, pairs: list[tuple[TrainingRun, StepTime]]) -> None:
    """A row for each family of published runs."""
    rows = {row["id"]: row for row in json.loads(PUBLISHED.read_text())}
    table = new_table(["family", "<machine", "runs", "fitted", "mean |error|", "mean", "worst"])
    families: dict[tuple[bool, str, str], list[float]] = {}
    for run, step in pairs:
        row, off = rows[run.id], error(run, step)
        if off is not None:
            families.setdefault((row["fitted"], row["family"], run.system.name), []).append(off)
    for fitted in (True, False):
        for (used, family, machine), found in families.items():
            if used == fitted:
                shown = f"{mean(map(abs, found)):.1%}", f"{mean(found):+.1%}", f"{max(found, key=abs):+.1%}"
                table.add_row(family, machine, str(len(found)), "yes" if fitted else "no", *shown)
        table.add_section()
    screen.print(table)
    for name, fitted in (("fitted", True), ("not fitted", False)):
        screen.print(_total(name, [pair for pair in pairs if rows[pair[0].id]["fitted"] == fitted]))
