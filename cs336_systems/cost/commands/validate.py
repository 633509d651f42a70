"""`validate`: predicted beside measured, run by run and in total, for published runs or a file of one's own."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from cs336_systems import console
from cs336_systems.console import format_bytes, options
from cs336_systems.cost.commands.request import ConstantSettings
from cs336_systems.cost.fitting.constants_file import load_constants
from cs336_systems.cost.large.plan_memory import fits, peak_bytes, room
from cs336_systems.cost.large.run_rows import DEFAULTS, REQUIRED
from cs336_systems.cost.large.runs import PUBLISHED, Run, read_runs
from cs336_systems.cost.large.settings import take
from cs336_systems.cost.large.step_time import CONSTANTS, StepTime, step_time

KEYS = "\b\n" + "\n".join(
    ["Required keys of a run:"]
    + [f"  {key}: {meaning}" for key, meaning in REQUIRED.items()]
    + ["", "\b", "Others, and what is taken where they are absent, null, 0 or not understood:"]
    + [f"  {key}: {meaning}" for key, meaning in DEFAULTS.items()]
)


@click.command("validate", epilog=KEYS)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@options(ConstantSettings)
@click.option("--json", "as_json", is_flag=True, help="Print one list of {id, t_iter_s, predicted_s} instead.")
def command(file: Path | None, as_json: bool, **given: Any) -> None:
    """Predict the step time of the runs in FILE, a JSON list, and compare it with what was measured.

    Without FILE, the published runs that this project keeps, by family, those that constants were fitted to apart.
    """
    chosen = take(ConstantSettings, given).constants
    constants = load_constants(chosen) if chosen else CONSTANTS
    runs = read_runs(file or PUBLISHED)
    steps = [step_time(run.config, run.plan, run.seq, run.system, constants) for run in runs]
    remarks = console.console(stderr=True)
    for run in runs:
        for note in notes(run):
            remarks.print(f"note: {run.id}: {note}")
    if as_json:
        rows = [
            {"id": run.key, "t_iter_s": run.seconds, "predicted_s": step.total}
            for run, step in zip(runs, steps, strict=True)
        ]
        click.echo(json.dumps(rows, indent=1, allow_nan=False))
        return
    screen = console.console()
    if file:
        screen.print(_table(runs, steps))
        screen.print(_total("all runs", runs, steps))
    else:
        _print_families(screen, runs, steps)


def notes(run: Run) -> list[str]:
    """What was not understood of a run; and of one that nobody measured, that it does not fit."""
    found = list(run.notes)
    if run.seconds is None and not fits(run.config, run.plan, run.seq, run.system):
        need, there = sum(peak_bytes(run.config, run.plan, run.seq)[1].values()), room(run.system)
        found.append(
            f"it needs {format_bytes(need)} on a rank, and {run.system.name} has {format_bytes(there)} of room"
        )
    return found


def error(run: Run, step: StepTime) -> float | None:
    """Predicted over measured, less one; None for a run that was not measured."""
    return step.total / run.seconds - 1 if run.seconds else None


def _table(runs: list[Run], steps: list[StepTime]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("machines", no_wrap=True)
    table.add_column("plan", no_wrap=True)
    for name in ("measured s", "predicted s", "error", "MFU"):
        table.add_column(name, justify="right", no_wrap=True)
    for run, step in zip(runs, steps, strict=True):
        off = error(run, step)
        table.add_row(
            run.id,
            f"{run.plan.ranks} {run.system.name}",
            run.plan.short(),
            "-" if run.seconds is None else f"{run.seconds:.4g}",
            f"{step.total:.4g}",
            "-" if off is None else f"{off:+.1%}",
            f"{step.mfu:.1%}",
        )
    return table


def _total(name: str, runs: list[Run], steps: list[StepTime]) -> str:
    errors = [off for run, step in zip(runs, steps, strict=True) if (off := error(run, step)) is not None]
    if not errors:
        return f"{name}: nothing was measured, so nothing is compared"
    worst = max(errors, key=abs)
    return (
        f"{name}: {len(errors)} measured, error {mean(map(abs, errors)):.1%} on average, {worst:+.1%} at worst, "
        f"{mean(errors):+.1%} with its sign"
    )


def _print_families(screen: Console, runs: list[Run], steps: list[StepTime]) -> None:
    """A row for each family of published runs."""
    rows = {row["id"]: row for row in json.loads(PUBLISHED.read_text())}
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("family", "machine", "runs", "fitted", "mean |error|", "mean", "worst"):
        table.add_column(name, justify="left" if name in ("family", "machine") else "right")
    families: dict[tuple[bool, str, str], list[float]] = {}
    for run, step in zip(runs, steps, strict=True):
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
        own = [place for place, run in enumerate(runs) if rows[run.id]["fitted"] == fitted]
        screen.print(_total(name, [runs[place] for place in own], [steps[place] for place in own]))
