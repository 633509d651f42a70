"""Benchmarks of the catalogue, each a process of its own with a time limit, and a journal of what was measured."""

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import torch

from benchmarks.lib.options import RecordOptions
from cs336_systems.errors import UserError
from cs336_systems.host.console import format_seconds, os_errors, setting
from cs336_systems.host.text import printable, regular, strict_json

Edition = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class Benchmark:
    """The module that measures, its options, and the minutes that it takes, on a GPU at most."""

    name: str
    options: tuple[str, ...] = ()
    minutes: float = 1.0
    root: bool = False  # it makes network namespaces
    gpus: int = 0
    module: str = ""  # if that is not benchmarks.NAME
    takes_budget: bool = False  # stops by itself, given --budget
    leaves: str = ""  # a folder beside the records, for pictures and traces, or a file
    records: bool = True  # it leaves records; else only what `leaves` names

    @property
    def source(self) -> str:
        """The dotted name of the module whose imports are what the benchmark exercises."""
        return self.module or f"benchmarks.{self.name}"

    @property
    def command(self) -> str:
        """The command to type."""
        return shlex.join(("python", "-m", self.source, *self.options))


def listed(run: str, seconds: float = 0.0, minutes: float = 0.0, name: str = "", **more: Any) -> Benchmark:
    """A benchmark from its entry in the list."""
    module, *options = shlex.split(run)
    name = name or module.rpartition(".")[2].removesuffix("_run")
    return Benchmark(name, tuple(options), minutes or seconds / 60, module=module, **more)


_entries = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))
CPU = tuple(listed(**entry) for entry in _entries["cpu"])
GPU = tuple(listed(**{"gpus": 1, **entry}) for entry in _entries["gpu"])
EDITIONS: dict[Edition, tuple[Benchmark, ...]] = {"cpu": CPU, "gpu": GPU}


ROOT = Path(__file__).resolve().parents[2]
GPU_MINUTES = 8.0  # for all, unless --minutes says otherwise: GPU time is often limited
HOPELESS = 4.0  # a command on a CPU is stopped after this many times its expected time, and not before
LEAST_MINUTES = 10.0  # this
# A command with a budget needs more: to start, measure the ceilings, and finish the shape that it has begun.
MARGIN = 20.0
LEAST = 15.0  # seconds for which no benchmark is worth beginning
PATIENCE = 5  # seconds per shape, of a benchmark with a budget
GRACE = 10.0  # seconds that a command gets to end
LAST_LINES = 15  # of the output of a benchmark that went wrong


@dataclass(frozen=True)
class AllSettings(RecordOptions):
    """Options of the command line, one field each."""

    list: bool = setting(False, "Print what would be measured and how long it takes.")
    only: tuple[str, ...] = setting((), "Only this benchmark; may be repeated.")
    again: bool = setting(False, "Repeat measurements that were made at this commit.")
    minutes: float | None = setting(
        None, "Minutes for all; benchmarks that would not fit are skipped.  [default: no limit, on a GPU 8]",
        type=click.FloatRange(0, 1e5),
    )  # fmt: skip
    edition: Edition | None = setting(None, "Kind of machine to measure.  [default: gpu if there is one]")
    logs: Path = setting(Path("runs/all"), "Folder for the benchmarks' output.")
    smoke: bool = setting(False, "Test run: every benchmark with --smoke, also on a CPU, writes no record.")

    @property
    def seconds(self) -> float:
        """Seconds for all."""
        minutes = self.minutes if self.minutes is not None else GPU_MINUTES if self.edition == "gpu" else float("inf")
        return 60 * minutes


@dataclass(frozen=True)
class Outcome:
    """Outcome of a benchmark."""

    run: Benchmark
    status: Literal["ok", "failed", "stopped", "left out", "measured before", "to measure"]
    seconds: float = 0.0
    remark: str = ""


class Journal:
    """The commands that were measured into a folder of records: the seconds, commit, device and date of each's last."""

    def __init__(self, folder: Path, stamp: dict[str, Any]) -> None:
        self.path = folder / "commands.json"
        self.stamp = {name: stamp[name] for name in ("commit", "dirty", "device", "date")}
        self.known = stamp["commit"] is not None and not stamp["dirty"]  # what code this is
        self.found: dict[str, dict[str, Any]] = {}
        if not self.path.exists():
            return
        with os_errors(f"read {self.path}"):
            text = regular(self.path).read_text("utf-8", errors="replace")
        try:
            self.found = strict_json(text)
            sum(float(each["seconds"]) for each in self.found.values())
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(f"{self.path} is no list of commands with their seconds; delete it") from None

    def seconds(self, run: Benchmark) -> float:
        """Expected seconds of a command: as last time, or by the catalogue."""
        return max(0.1, self.found[run.command]["seconds"]) if run.command in self.found else 60 * run.minutes

    def has(self, run: Benchmark) -> bool:
        """True if a command was measured on this device at this commit, without changes then or now."""
        last, keys = self.found.get(run.command, {}), ("commit", "dirty", "device")
        return self.known and all(last.get(key) == self.stamp[key] for key in keys)

    def add(self, run: Benchmark, seconds: float) -> None:
        """Note that a command has been measured. The file is replaced as a whole."""
        self.found[run.command] = {"seconds": round(seconds, 1), **self.stamp}
        with os_errors(f"write {self.path}", "name another folder with --results DIR"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(self.found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            part.replace(self.path)


def arguments(run: Benchmark, settings: AllSettings, results: Path, seconds: float) -> list[str]:
    """The command line of a benchmark that is stopped after these seconds."""
    start = [sys.executable, "-m", run.source]
    if run.source == "pytest":
        # Hundreds of kernels have to be compiled, on a CPU core each, where pytest-xdist is there to use them.
        side_by_side = ["-n", "8"] if importlib.util.find_spec("xdist") else []
        return [*start, "-p", "no:cacheprovider", *side_by_side, *run.options]
    if not run.records:
        return [*start, *run.options, "--out", str(results / run.leaves)]
    if settings.smoke:
        return [*start, *run.options, "--smoke"]
    options = [*run.options, "--results", str(results)]
    options += ["--commit", settings.commit] if settings.commit else []
    options += ["--out", str(results / run.leaves)] if run.leaves else []
    if run.takes_budget:
        options += ["--budget", f"{max(1.0, seconds - MARGIN):.0f}", "--patience", str(PATIENCE)]
    return [*start, *options]


def surroundings() -> list[str]:
    """Environment of a command: nothing is written into the tree, and kernels are compiled if there is a GPU."""
    compiled = ["-u", "TRITON_INTERPRET"] if torch.cuda.is_available() else []
    return ["env", *compiled, "PYTHONDONTWRITEBYTECODE=1", "PYTHONUNBUFFERED=1"]


def stop(process: subprocess.Popen[Any]) -> None:
    """End a command as ^C does, if it has not ended, and then all processes that it left: ranks, compilers."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # to it alone: its ranks end with it
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
    finally:  # also after a second ^C
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure(run: Benchmark, settings: AllSettings, results: Path, seconds: float) -> Outcome:
    """Run one command, its output into a file of its own; it is stopped when its time is over."""
    number, start = EDITIONS[settings.edition or "cpu"].index(run) + 1, time.monotonic()
    log = settings.logs / f"{number:02}_{run.name}.log"
    status: Literal["ok", "failed", "stopped"] = "ok"
    remark = ""
    with ended_politely(), log.open("w") as file:
        process = subprocess.Popen(
            [*surroundings(), *arguments(run, settings, results, seconds)],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            if code := process.wait(seconds):
                status, remark = "failed", f"exit code {code}, see {log}"
        except subprocess.TimeoutExpired:
            status, remark = "stopped", f"after {format_seconds(seconds)}; what it recorded until then is kept"
        finally:
            stop(process)
    if status != "ok":
        print("\n".join(map(printable, log.read_text(errors="replace").splitlines()[-LAST_LINES:])))
    return Outcome(run, status, time.monotonic() - start, remark)


def measure_all(runs: Sequence[Benchmark], settings: AllSettings, results: Path, journal: Journal) -> list[Outcome]:
    """Measure in order, as long as there is time; print the outcome of each and the time that the rest takes."""
    deadline, outcomes, pace, spent, foreseen = time.monotonic() + settings.seconds, list[Outcome](), 1.0, 0.0, 0.0
    todo = [run for run in runs if not skipped(run, settings, journal)]
    for run in runs:
        if outcome := skipped(run, settings, journal):
            outcomes.append(outcome)
            continue
        expected, place = journal.seconds(run), todo.index(run)
        limit = 60 * run.minutes if run.gpus else max(60 * LEAST_MINUTES, HOPELESS * max(1.0, pace) * expected)
        seconds = min(limit, deadline - time.monotonic())
        if seconds < min(limit, LEAST if run.gpus else expected):
            outcomes.append(Outcome(run, "left out", 0.0, f"the {settings.seconds / 60:g} minutes do not suffice"))
        else:
            left = format_seconds(min(pace * sum(map(journal.seconds, todo[place:])), deadline - time.monotonic()))
            print(printable(f"[{place + 1}/{len(todo)}] about {left} left: {run.command}"), flush=True)
            outcomes.append(measure(run, settings, results, seconds))
        done = outcomes[-1]
        print(printable(f"  {done.status} ({format_seconds(done.seconds)}) {done.remark}".rstrip()), flush=True)
        if done.status == "ok":  # a command that fails at once says nothing about the machine's speed
            spent, foreseen = spent + done.seconds, foreseen + expected
            pace = spent / foreseen
            if not settings.smoke:
                journal.add(run, done.seconds)
    return outcomes


def skipped(run: Benchmark, settings: AllSettings, journal: Journal) -> Outcome | None:
    """The outcome of a benchmark that is not begun, since this machine lacks what it needs or it has been measured;
    None for one that is."""
    if run.gpus > (here := torch.cuda.device_count()) and not settings.smoke:
        return Outcome(run, "left out", 0.0, f"needs {run.gpus} GPU{'s' * (run.gpus > 1)}, {here} here")
    if run.root and (sys.platform != "linux" or os.geteuid() != 0):
        return Outcome(run, "left out", 0.0, "needs root on Linux, to make a network")
    if not settings.again and not settings.smoke and journal.has(run):
        return Outcome(run, "measured before", journal.seconds(run), "at this commit; --again measures it once more")
    return None


@contextmanager
def ended_politely() -> Iterator[None]:
    """Turn SIGTERM, by which schedulers end a job, into an exception, so that the running command is stopped, too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
