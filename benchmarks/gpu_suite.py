"""Everything that wants a GPU, in one command of eight minutes: `python -m benchmarks.gpu_suite`.

First whether the kernels are right, then how fast they are, then whole models. Each step is a command of its own with
a time limit, and writes its records as it goes, so that neither a crash nor the end of a lease loses what was done.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click
import torch
from rich.table import Table

from benchmarks.gpu_steps import STEPS, GPUStep
from benchmarks.records import results_folder
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_seconds, setting
from cs336_systems.host.text import printable

ROOT = Path(__file__).resolve().parents[1]
# A command with a budget needs more: to start, measure the ceilings, and finish the shape that it has begun.
MARGIN = 20.0
LEAST = 15.0  # seconds for which no step is worth beginning
PATIENCE = 5  # seconds a shape
LAST_LINES = 15  # of the output of a step that went wrong


@dataclass(frozen=True)
class SuiteSettings:
    """Options of the command line, one field each."""

    minutes: float = setting(8.0, "Minutes for all; what does not fit is not begun.", type=click.FloatRange(0, 1e5))
    only: tuple[str, ...] = setting((), "Only this step; may be repeated.")
    logs: Path = setting(Path("runs/gpu_suite"), "Folder of the steps' output.")
    pack: Path | None = setting(None, "Also write records and logs as one .tar.gz file.")
    results: Path | None = setting(None, "Folder of the records.  [default: runs/results/<machine>]")
    machine: str | None = setting(None, "Name of this machine in the records.  [default: its device's]")
    commit: str | None = setting(None, "Commit to record, for a copy without its .git.")
    smoke: bool = setting(False, "Only show that it works: every benchmark with --smoke, on a CPU too, no record.")


@dataclass(frozen=True)
class Outcome:
    """How a step went."""

    step: GPUStep
    status: Literal["ok", "failed", "stopped", "left out"]
    seconds: float
    remark: str = ""


def arguments(step: GPUStep, settings: SuiteSettings, results: Path, seconds: float) -> list[str]:
    """The command line of a step that is stopped after these seconds."""
    module, *options = step.command
    if module == "pytest":
        # Hundreds of kernels have to be compiled, on a CPU core each, where pytest-xdist is there to use them.
        side_by_side = ["-n", "8"] if importlib.util.find_spec("xdist") else []
        return [sys.executable, "-m", module, "-p", "no:cacheprovider", *side_by_side, *options]
    if not step.records:
        return [sys.executable, "-m", module, *options, "--out", str(results / step.leaves)]
    if settings.smoke:
        return [sys.executable, "-m", module, *options, "--smoke"]
    options += ["--results", str(results)]
    options += ["--commit", settings.commit] if settings.commit else []
    options += ["--out", str(results / step.leaves)] if step.leaves else []
    if step.takes_budget:
        options += ["--budget", f"{max(1.0, seconds - MARGIN):.0f}", "--patience", str(PATIENCE)]
    return [sys.executable, "-m", module, *options]


def surroundings() -> list[str]:
    """Environment of a command: nothing is written into the tree, and kernels are compiled if there is a GPU."""
    compiled = ["-u", "TRITON_INTERPRET"] if torch.cuda.is_available() else []
    return ["env", *compiled, "PYTHONDONTWRITEBYTECODE=1", "PYTHONUNBUFFERED=1"]


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a step and all that it started, which may outlive it: ranks, compilers."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_step(step: GPUStep, settings: SuiteSettings, results: Path, seconds: float) -> Outcome:
    """Run one command, its output into a file of its own; it is stopped when its time is over."""
    log, start = log_of(step, settings), time.monotonic()
    command = arguments(step, settings, results, seconds)
    with log.open("w") as file:
        process = subprocess.Popen(
            [*surroundings(), *command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        status: Literal["ok", "failed", "stopped"] = "ok"
        remark = ""
        try:
            if code := process.wait(seconds):
                status, remark = "failed", f"exit code {code}, see {log}"
        except subprocess.TimeoutExpired:
            status, remark = "stopped", f"after {format_seconds(seconds)}; what it recorded until then is kept"
        finally:
            stop(process)
    if status != "ok":
        print("\n".join(map(printable, log.read_text(errors="replace").splitlines()[-LAST_LINES:])))
    return Outcome(step, status, time.monotonic() - start, remark)


def log_of(step: GPUStep, settings: SuiteSettings) -> Path:
    """Where a step's output goes."""
    return settings.logs / f"{step.name.replace(' ', '_')}.log"


def chosen(settings: SuiteSettings) -> list[GPUStep]:
    """The steps that were asked for. Raises UserError for one that does not exist, or if none is left."""
    known = [step.name for step in STEPS]
    for name in settings.only:
        if name not in known:
            raise UserError(f"no step {name!r}; choose from {', '.join(known)}")
    steps = [step for step in STEPS if step.name in (settings.only or known)]
    if settings.smoke:
        steps = [step for step in steps if step.command[0] != "pytest" and step.gpus == 1]
    if not steps:
        raise UserError(f"--smoke leaves out {', '.join(settings.only)}: it is for benchmarks on one device")
    return steps


def run_steps(steps: Iterable[GPUStep], settings: SuiteSettings, results: Path) -> list[Outcome]:
    """Run the steps in order, as long as there is time, and say how each went."""
    deadline, outcomes = time.monotonic() + 60 * settings.minutes, []
    for step in steps:
        seconds = min(step.seconds, deadline - time.monotonic())
        if torch.cuda.device_count() < step.gpus and not settings.smoke:
            reason = f"needs {step.gpus} GPUs, {torch.cuda.device_count()} here"
            outcomes.append(Outcome(step, "left out", 0.0, reason))
        elif seconds < min(step.seconds, LEAST):
            outcomes.append(Outcome(step, "left out", 0.0, f"the {settings.minutes:g} minutes are used up"))
        else:
            print(f"{step.name}: at most {format_seconds(seconds)} ...", flush=True)
            outcomes.append(run_step(step, settings, results, seconds))
        done = outcomes[-1]
        print(f"{step.name}: {done.status} ({format_seconds(done.seconds)}) {done.remark}".rstrip(), flush=True)
    return outcomes


def show(outcomes: Sequence[Outcome]) -> None:
    """How every step went, as a table."""
    table = Table(title="gpu_suite", title_justify="left")
    columns = ["step", "outcome", "time", *["remark"] * any(done.remark for done in outcomes)]
    for column in columns:
        table.add_column(column, justify="right" if column == "time" else "left")
    for done in outcomes:
        cells = (done.step.name, done.status, format_seconds(done.seconds), done.remark)
        table.add_row(*cells[: len(columns)])
    console.console().print(table, markup=False)


def prepare_folders(settings: SuiteSettings) -> None:
    """Make the folder of logs, and see whether the archive can be written. Raises UserError before anything is run."""
    for place, option in ((settings.logs, "--logs"), (settings.pack and settings.pack.parent, "--pack")):
        try:
            if place:
                place.mkdir(parents=True, exist_ok=True)
            if option == "--pack" and settings.pack:
                settings.pack.open("ab").close()
        except OSError as error:
            raise UserError(f"cannot write {error.filename}: {error.strerror}; choose another {option}") from None


def pack(target: Path, results: Path, logs: Iterable[Path]) -> None:
    """Records and the logs of this run as one file, for machines that give few back."""
    with tarfile.open(target, "w:gz") as archive:
        if results.exists():
            archive.add(results, arcname=f"results/{results.name}")
        for log in filter(Path.exists, logs):
            archive.add(log, arcname=f"logs/{log.name}")
    print(printable(f"packed into {target}"))


@contextmanager
def ended_politely() -> Iterator[None]:
    """SIGTERM, with which schedulers end a job, becomes an exception, so that the step under way is stopped, too."""

    def leave(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.command()
@console.options(SuiteSettings)
def main(**options: Any) -> None:
    """Check and measure on a GPU all that this project has, in a few minutes, recording after every step."""
    settings = SuiteSettings(**options)
    if not torch.cuda.is_available() and not settings.smoke:
        raise UserError("gpu_suite needs a CUDA device, and torch finds none here; --smoke shows that it works")
    steps = chosen(settings)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = results_folder(settings.results, settings.machine, device).resolve()
    settings = replace(settings, logs=settings.logs.resolve())
    prepare_folders(settings)
    total = min(60 * settings.minutes, sum(step.seconds for step in steps))
    print(f"{len(steps)} steps, at most {format_seconds(total)}; output in {settings.logs}", flush=True)
    try:
        with ended_politely():
            outcomes = run_steps(steps, settings, results)
    finally:
        if settings.pack:
            pack(settings.pack, results, (log_of(step, settings) for step in steps))
    show(outcomes)
    if all(done.status == "left out" for done in outcomes):
        raise UserError(f"nothing to measure: {'; '.join(dict.fromkeys(done.remark for done in outcomes))}")
    if wrong := [f"{done.step.name} ({done.status})" for done in outcomes if done.status in ("failed", "stopped")]:
        raise UserError(f"{len(wrong)} of {len(outcomes)} steps went wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    sys.exit(console.run_command(main))
