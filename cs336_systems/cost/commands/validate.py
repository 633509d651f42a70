"""`validate`: predicted beside measured, run by run and in total, for published runs or a file of one's own."""

import json
from pathlib import Path
from statistics import mean

import click
from rich.console import Console

from cs336_systems.cost.commands.output import new_table, print_json
from cs336_systems.cost.commands.request import FILE
from cs336_systems.cost.machines import CONSTANTS, load_constants
from cs336_systems.cost.plan_memory import fits, peak_bytes, usable_memory
from cs336_systems.cost.runs import DEFAULTS, PUBLISHED, REQUIRED, TrainingRun, read_runs
from cs336_systems.cost.step_time import StepTime
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes

KEYS = "\b\n" + "\n".join(
    ["Required keys of a run:"]
    + [f"  {key}: {meaning}" for key, meaning in REQUIRED.items()]
    + ["", "\b", "Others, and what is taken where they are absent, null, 0 or not understood:"]
    + [f"  {key}: {meaning}" for key, meaning in DEFAULTS.items()]
)


@click.command("validate", epilog=KEYS)
@click.argument("file", required=False, type=FILE)
@click.option("--constants", type=FILE, help="Constants in a file that `fit` wrote.  [default: those of this project]")
@click.option("--json", "as_json", is_flag=True, help="Print one list of {id, t_iter_s, predicted_s} instead.")
def command(file: Path | None, constants: Path | None, as_json: bool) -> None:
    """Predict the step time of the runs in FILE, a JSON list, and compare it with what was measured.

    Without FILE, the published runs that this project keeps, by family, those that constants were fitted to apart.
    """
    used, runs = load_constants(constants) if constants else CONSTANTS, read_runs(file or PUBLISHED)
    pairs = [(run, run.under(used).step()) for run in runs]
    remarks, screen = console.console(stderr=True), console.console()
    for run in runs:
        for note in notes(run):
            remarks.print(f"note: {run.id}: {note}")
    if as_json:
        print_json([{"id": run.key, "t_iter_s": run.seconds, "predicted_s": step.total} for run, step in pairs])
    elif file:
        _print_runs(screen, pairs)
    else:
        _print_families(screen, pairs)


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


def _print_runs(screen: Console, pairs: list[tuple[TrainingRun, StepTime]]) -> None:
    rows = []
    for run, step in pairs:
        off = error(run, step)
        measured = "-" if run.seconds is None else f"{run.seconds:.4g}"
        names = [run.id, f"{run.plan.ranks} {run.system.name}", run.plan.short(), measured, f"{step.total:.4g}"]
        rows.append([*names, "-" if off is None else f"{off:+.1%}", f"{step.mfu:.1%}"])
    screen.print(new_table(["~run", "<machines", "<plan", "measured s", "predicted s", "error", "MFU"], rows))
    screen.print(_total("all runs", pairs))


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
    families: dict[tuple[bool, str, str], list[float]] = {}
    for run, step in pairs:
        row, off = rows[run.id], error(run, step)
        if off is not None:
            families.setdefault((row["fitted"], row["family"], run.system.name), []).append(off)
    lines: list[list[str] | None] = []
    for fitted in (True, False):
        for (used, family, machine), found in families.items():
            if used == fitted:
                shown = f"{mean(map(abs, found)):.1%}", f"{mean(found):+.1%}", f"{max(found, key=abs):+.1%}"
                lines.append([family, machine, str(len(found)), "yes" if fitted else "no", *shown])
        lines.append(None)
    screen.print(new_table(["family", "<machine", "runs", "fitted", "mean |error|", "mean", "worst"], lines))
    for name, fitted in (("fitted", True), ("not fitted", False)):
        screen.print(_total(name, [pair for pair in pairs if rows[pair[0].id]["fitted"] == fitted]))
