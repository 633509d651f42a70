"""Run every benchmark that the chapters cite, one after the other, before the write-up is made."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.gpu_suite import ended_politely
from benchmarks.records import machine_name
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_seconds
from cs336_systems.host.machine import choose_device
from cs336_systems.host.text import printable
from writeup.catalogue import GPU_SUITE, RUNS, Benchmark

HOPELESS = 4.0  # a command is stopped after so many times what it should take, and not before
LEAST_MINUTES = 10.0  # this
GRACE = 30.0  # seconds that a command gets to end


def run_all(only: Iterable[str], results: Path, machine: str | None) -> str:
    """Run the benchmarks, all or those named, and return the name of the folder that their records are in.

    One that fails is named at the end, and the others run all the same. Raises UserError for a name that no benchmark
    has, for another machine than this one, and if all failed.
    """
    folder, screen = own_folder(machine), console.console(stderr=True)
    runs, failed, pace, spent, foreseen = chosen(only), list[str](), 1.0, 0.0, 0.0
    for each in filter(why_not, runs):
        screen.print(printable(f"left out, since it {why_not(each)}: {each.command}"), soft_wrap=True)
    runs = tuple(each for each in runs if not why_not(each))
    for place, each in enumerate(runs):
        left = format_seconds(60 * pace * sum(run.minutes for run in runs[place:]))
        screen.print(printable(f"[{place + 1}/{len(runs)}] about {left} left: {each.command}"), soft_wrap=True)
        start = time.monotonic()
        said = measure(each, results / folder, max(LEAST_MINUTES, HOPELESS * max(1.0, pace) * each.minutes))
        if said:
            failed.append(f"{each.command}: {said}")
        else:  # what fails at once tells nothing of how fast the machine is
            spent, foreseen = spent + (time.monotonic() - start) / 60, foreseen + each.minutes
            pace = spent / foreseen
    for line in failed:
        screen.print(printable(f"not measured: {line}"), soft_wrap=True)
    if len(failed) == len(runs):
        raise UserError("no benchmark could be run, so there is nothing new; python -m writeup reports what was there")
    return folder


def own_folder(machine: str | None) -> str:
    """The name of this machine's records. Raises UserError if another machine is asked for."""
    own = machine_name(choose_device(None))
    if machine and machine.lower() not in own:
        raise UserError(f"--run measures this machine, whose records are in {own}, not {printable(machine)}")
    return own


def chosen(only: Iterable[str]) -> tuple[Benchmark, ...]:
    """The runs of these names, or all. Raises UserError for a name that no benchmark has."""
    names, runs = tuple(only), (*RUNS, GPU_SUITE)
    known = dict.fromkeys(run.name for run in runs)
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--only {printable(unknown[0])} is no benchmark; there are {', '.join(known)}")
    return tuple(run for run in runs if not names or run.name in names)


def why_not(run: Benchmark) -> str:
    """Requirement of a run that this machine lacks; nothing if it can run."""
    if run.gpu and not torch.cuda.is_available():
        return "needs a GPU"
    if run.root and (sys.platform != "linux" or os.geteuid() != 0):
        return "needs root on Linux, to make a network"
    return ""


def measure(run: Benchmark, folder: Path, minutes: float) -> str:
    """Run one command, whose output is shown; returns what went wrong, or nothing."""
    command = [sys.executable, "-m", run.source, *run.options, "--results", str(folder)]
    with ended_politely():
        process = subprocess.Popen(command, start_new_session=True)  # a group, since benchmarks start ranks
        try:
            code = process.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            return f"took more than {format_seconds(60 * minutes)}"
        finally:
            stop(process)
    return f"ended with exit code {code}" if code else ""


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a command, if it has not ended, and then whatever it started and left."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
