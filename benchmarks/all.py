"""All measurements that the write-up needs from this machine, in one command that can be stopped and continued:
`python -m benchmarks.all`.

Each benchmark writes its records as it goes. `commands.json` beside the records says what was run, at which commit, and
how long it took. On a GPU the edition for GPUs is measured, in eight minutes at most.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace

import torch

from benchmarks.lib import sheets
from benchmarks.lib.options import command
from benchmarks.lib.running import (
    EDITIONS,
    AllSettings,
    Benchmark,
    Journal,
    Outcome,
    ended_politely,
    measure_all,
    skipped,
)
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_seconds, os_errors
from cs336_systems.host.machine import environment
from cs336_systems.host.table import Table
from cs336_systems.host.text import printable


def chosen(settings: AllSettings) -> list[Benchmark]:
    """The benchmarks that were asked for. Raises UserError for one that does not exist, or if none is left."""
    runs = EDITIONS[settings.edition or "cpu"]
    known = list(dict.fromkeys(run.name for run in runs))
    for name in settings.only:
        if name not in known:
            raise UserError(f"--only {name} is no benchmark; there are {', '.join(known)}")
    found = [run for run in runs if run.name in (settings.only or known)]
    if settings.smoke:
        found = [run for run in found if run.source != "pytest" and run.records and run.gpus < 2 and not run.root]
    if not found:
        raise UserError(f"--smoke leaves out {', '.join(settings.only)}: it is for benchmarks on one device")
    return found


def show(outcomes: Iterable[Outcome], head: str) -> None:
    """Print a table of benchmarks: the state of each, under the heading `head`, and its duration."""
    found = list(outcomes)
    columns = ["command", head, "time", *["remark"] * any(done.remark for done in found)]
    cells = [
        (done.run.command.removeprefix("python -m "), done.status, format_seconds(done.seconds), done.remark)
        for done in found
    ]
    sheets.show([Table("", columns, [row[: len(columns)] for row in cells])])


def plan(runs: Iterable[Benchmark], settings: AllSettings, journal: Journal) -> None:
    """Print which benchmarks will be measured, how long they take, and which are left out."""
    planned = [
        replace(skipped(run, settings, journal) or Outcome(run, "to measure"), seconds=journal.seconds(run))
        for run in runs
    ]
    todo = [each.seconds for each in planned if each.status == "to measure"]
    show(planned, "plan")
    expected = format_seconds(min(sum(todo), settings.seconds))
    print(f"{len(todo)} of {len(planned)} commands to measure, about {expected}", flush=True)


def measure_here(settings: AllSettings) -> list[Outcome]:
    """Plan, measure and show how everything went; with --list only plan, which returns nothing.

    Raises UserError for what cannot be run, and if nothing was measured now or before.
    """
    has_gpu = torch.cuda.is_available()
    settings = replace(settings, edition=settings.edition or ("gpu" if has_gpu else "cpu"))
    if settings.edition == "gpu" and not (has_gpu or settings.smoke or settings.list):
        raise UserError("--edition gpu needs a CUDA device, and torch finds none here; --smoke shows that it works")
    runs, device = chosen(settings), torch.device("cuda" if has_gpu else "cpu")
    results = settings.records_folder(device).resolve()
    journal = Journal(results, environment(device, settings.commit))
    plan(runs, settings, journal)
    if settings.list:
        return []
    settings = replace(settings, logs=settings.logs.resolve())
    for folder, option in ((settings.logs, "--logs"), (results, "--results"))[: 1 if settings.smoke else 2]:
        with os_errors(f"write {folder}", f"choose another {option}"):
            folder.mkdir(parents=True, exist_ok=True)
    rest = "goes on" if journal.known else "begins anew, as the code has changes or no commit"
    print(printable(f"records in {results}, output in {settings.logs}; ^C stops, the same command {rest}"), flush=True)
    with ended_politely():
        outcomes = measure_all(runs, settings, results, journal)
    show(outcomes, "outcome")
    if all(done.status == "left out" for done in outcomes):
        raise UserError(f"nothing to measure: {'; '.join(dict.fromkeys(done.remark for done in outcomes))}")
    return outcomes


@command(AllSettings)
def main(settings: AllSettings) -> None:
    """Measure everything that the write-up needs on this machine; first print how long that takes.

    Skip what has been measured at this commit. On a GPU, check the kernels first.
    """
    outcomes = measure_here(settings)
    if wrong := [f"{done.run.command} ({done.status})" for done in outcomes if done.status in ("failed", "stopped")]:
        raise UserError(f"{len(wrong)} of {len(outcomes)} commands went wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    sys.exit(console.run_command(main))
