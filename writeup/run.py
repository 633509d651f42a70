"""Run every benchmark that the chapters cite, one after the other, before the write-up is made."""

import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.records import machine_name
from cs336_systems import console
from cs336_systems.console import format_seconds
from cs336_systems.errors import UserError
from cs336_systems.machine import choose_device
from cs336_systems.text import printable
from writeup.catalogue import RUNS, Benchmark

HOPELESS = 4.0  # a command is stopped after so many times what it should take, and not before
LEAST_MINUTES = 10.0  # this


def run_all(only: Iterable[str], results: Path, machine: str | None) -> str:
    """Run the benchmarks, all or those named, and return the name of the folder that their records are in.

    One that fails is named at the end, and the others run all the same. Raises UserError for a name that no benchmark
    has, and if all failed.
    """
    runs, folder = chosen(only), machine_name(choose_device(None), machine)
    screen, failed, pace, spent = console.console(stderr=True), list[str](), 1.0, 0.0
    for place, each in enumerate(runs):
        left = format_seconds(60 * pace * sum(run.minutes for run in runs[place:]))
        screen.print(f"[{place + 1}/{len(runs)}] about {left} left: {each.command}", soft_wrap=True)
        start = time.monotonic()
        if said := measure(each, results / folder, max(LEAST_MINUTES, HOPELESS * pace * each.minutes)):
            failed.append(f"{each.command}: {said}")
        spent += (time.monotonic() - start) / 60
        pace = spent / sum(run.minutes for run in runs[: place + 1])
    for line in failed:
        screen.print(printable(f"not measured: {line}"), soft_wrap=True)
    if len(failed) == len(runs):
        raise UserError("no benchmark could be run, so there is nothing new; python -m writeup reports what was there")
    return folder


def chosen(only: Iterable[str]) -> tuple[Benchmark, ...]:
    """The runs of these names, or all. Raises UserError for a name that no benchmark has."""
    names, known = tuple(only), dict.fromkeys(run.name for run in RUNS)
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--only {unknown[0]} is no benchmark; there are {', '.join(known)}")
    return tuple(run for run in RUNS if not names or run.name in names)


def measure(run: Benchmark, folder: Path, minutes: float) -> str:
    """Run one command, whose output is shown; returns what went wrong, or nothing."""
    command = [sys.executable, "-m", run.source, *run.options, "--results", str(folder)]
    with subprocess.Popen(command) as process:
        try:
            code = process.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            return f"took more than {format_seconds(60 * minutes)}"
        except BaseException:  # Ctrl-C reaches both: what runs ends first
            process.terminate()
            process.wait()
            raise
    return f"ended with exit code {code}" if code else ""
