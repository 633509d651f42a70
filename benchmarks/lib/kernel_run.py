"""Shared parts of the kernel benchmarks: options, the machine, records, a budget of time."""

import ctypes
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import click
import torch
from rich.table import Table

from benchmarks.harness import WrongResultError
from benchmarks.lib.contest import OURS, Patience, Refusal, Stopwatch, UnavailableError, format_ms
from benchmarks.lib.options import Recorder, RecordOptions
from benchmarks.lib.plan import measure_once
from benchmarks.records import Record
from cs336_systems.cost import Hardware
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_seconds, setting
from cs336_systems.host.machine import choose_device, environment, usable_memory
from cs336_systems.host.text import printable
from cs336_systems.model.precision import set_matmul_precision
from kernels.launch import INTERPRETED

DtypeName = Literal["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8}
INTERPRETER = "not timed on a CPU, where Triton has an interpreter only"

Shape = TypeVar("Shape")


@dataclass(frozen=True)
class KernelSettings(RecordOptions):
    """Options of a benchmark of kernels."""

    dtype: DtypeName | None = setting(None, "Dtype of the inputs.  [default: each shape's own]")
    forward: bool = setting(False, "Forward passes only.")
    backward: bool = setting(False, "Forward with backward passes only.")
    candidate: tuple[str, ...] = setting((), "Only this candidate; may be repeated.  [default: all]")
    rounds: int | None = setting(
        None, "Turns of each candidate.  [default: as the write-up needs]", type=click.IntRange(2)
    )
    patience: float = setting(
        20.0, "Seconds that one shape may take; candidates too slow for it are left out.", type=click.FloatRange(0)
    )
    budget: float | None = setting(None, "Seconds after which no further shape is measured.", type=click.FloatRange(0))
    device: Literal["cpu", "cuda"] | None = setting(None, "Device to run on.  [default: cuda if there is one]")

    def wants(self, what: str) -> bool:
        """True if a pass was asked for: both kinds, unless one of the flags is given."""
        return self.forward == self.backward or self.forward == (what == "forward")

    def chosen(self, candidates: Iterable[str]) -> list[str]:
        """The candidates that were asked for. Raises UserError for one that does not exist."""
        known = list(candidates)
        for name in self.candidate:
            if name not in known:
                raise UserError(f"no candidate {name!r}; choose from {', '.join(known)}")
        return [name for name in known if name in (self.candidate or known)]

    def left_out(self, device: torch.device) -> dict[str, str]:
        """Candidates that are not timed here, with the reason for each."""
        ours = {OURS: INTERPRETER} if device.type == "cpu" else {}
        return ours | ({"compiled": "left out of smoke runs, which it would make long"} if self.smoke else {})

    def timed(self, candidates: Iterable[str], device: torch.device) -> list[str]:
        """The candidates that were asked for and are timed here. Raises UserError for one that does not exist."""
        return [name for name in self.chosen(candidates) if name not in self.left_out(device)]

    def idle(self, candidates: Iterable[str], device: torch.device, present: Iterable[str], absent: str = "") -> str:
        """Reason why no candidate is timed, empty if one is; those that are not `present` are `absent`."""
        known, here, reasons = list(candidates), set(present), self.left_out(device)
        if here.intersection(self.timed(known, device)):
            return ""
        return "; ".join(f"{name} is {reasons[name] if name in here else absent}" for name in self.chosen(known))


@dataclass
class Session:
    """One command: its settings and machine, its records so far, and its remarks and faults for the end."""

    benchmark: str
    settings: KernelSettings
    device: torch.device
    clock: Stopwatch
    patience: Patience
    usable: int
    stamp: dict[str, Any]
    recorder: Recorder
    idle: str = ""  # why there is nothing to measure, if so
    notes: dict[str, list[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def hardware(self, dtype: DtypeName) -> Hardware:
        """This machine's ceilings, measured once."""
        return measure_once(self.device, dtype, 0.02 if self.settings.smoke else 0.3)

    @property
    def records(self) -> list[Record]:
        """The records so far."""
        return self.recorder.records

    def refused(self, name: str, refusal: Refusal, config: dict[str, Any], predicted: dict[str, Any]) -> None:
        """Keep the record of a candidate without a speed."""
        if refusal.fault:
            self.faults.append(refusal.reason if "wrong" in refusal.reason else f"{name}: {refusal.reason}")
        flags, status = [refusal.reason], refusal.status
        self.recorder.keep(Record(self.benchmark, config, self.stamp, [], {}, predicted, flags, status))

    def note(self, reason: str, where: str) -> None:
        """Add a remark for below the table, with the shapes to which it applies."""
        self.notes.setdefault(reason, []).append(where)


def open_session(benchmark: str, settings: KernelSettings, idle: str = "") -> Session:
    """Inspect the machine and open the file of records, unless a reason says that there will be none.

    Raises UserError for a missing device.
    """
    device = choose_device(settings.device)
    set_matmul_precision(device, "fp32")
    recorder = Recorder(None) if idle else settings.recorder(benchmark, device)
    stamp, patience = environment(device, settings.commit) | keep_pages(device), Patience(settings.patience)
    return Session(
        benchmark, settings, device, Stopwatch(device), patience, usable_memory(device), stamp, recorder, idle
    )


def keep_pages(device: torch.device) -> dict[str, bool]:
    """Let glibc keep freed memory, so that a CPU's kernel is not timed with Linux zeroing fresh pages for its outputs.

    Returns what to add to the records' environment: nothing on a GPU, or where there is no glibc.
    """
    if device.type != "cpu" or sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return {}
    m_trim_threshold, m_mmap_max = -1, -4
    return {"pages_kept": bool(libc.mallopt(m_mmap_max, 0) and libc.mallopt(m_trim_threshold, 2**31 - 1))}


def check_interpreted(session: Session, candidates: Iterable[str], check: Callable[[], str]) -> None:
    """On a CPU, check our kernel by `check`, which returns the shapes, and print that.

    A wrong result is added to the session's faults.
    """
    if OURS not in session.settings.chosen(candidates):
        return
    start = f"{OURS}: {INTERPRETER}"
    if not INTERPRETED:
        print(f"{start}; nor checked, because TRITON_INTERPRET=1 is not set")
        return
    try:
        print(f"{start}; gate: equals float64 {check()}")
    except UnavailableError as reason:
        print(printable(f"{start}; nor checked: {reason}"))
    except WrongResultError as wrong:
        session.faults.append(str(wrong))


def raise_faults(session: Session) -> None:
    """Raises WrongResultError if a result was wrong."""
    if session.faults:
        raise WrongResultError("; ".join(dict.fromkeys(session.faults)))


def hold_contests(
    session: Session,
    shapes: Sequence[Shape],
    expected: float,
    hold: Callable[[Session, Shape], None],
    show: Callable[[Session], None],
) -> None:
    """Hold a contest for each shape while the budget lasts, about `expected` seconds in all, then print.

    Raises WrongResultError in the end if a result was wrong, and UserError if there is nothing to measure.
    """
    if session.idle:
        raise_faults(session)
        raise UserError(f"nothing to measure: {session.idle}")
    budget, begun = session.settings.budget, time.monotonic()
    try:
        with console.progress(session.benchmark, len(shapes), expected) as advance:
            for shape in shapes:
                if budget is not None and time.monotonic() - begun >= budget:
                    session.note(f"not begun: the budget of {format_seconds(budget)} is used up", str(shape))
                    continue
                hold(session, shape)
                advance(str(shape))
    finally:
        if session.records:
            show(session)
        for reason, where in session.notes.items():
            console.console().print(f"{reason}: {'; '.join(where)}", markup=False)
    session.recorder.tell()
    raise_faults(session)


def time_cells(record: Record) -> list[str]:
    """The median with its relative standard deviation, or why there is none, and the prediction."""
    metrics, predicted = record.metrics, format_ms(record.predicted["median_ms"])
    if record.status == "ok":
        spread = f"{format_ms(metrics['median_ms'])} ± {metrics['std_ms'] / metrics['mean_ms']:.0%}"
        return [spread, predicted]
    if record.status == "out-of-memory":
        return ["does not fit", predicted]
    known = [word for word in ("wrong result", "not installed") if word in record.flags[0]]
    return [*(known or [record.status]), predicted]


def show_table(
    session: Session,
    columns: Sequence[str],
    caption: str,
    heading: Callable[[Record], str],
    cells: Callable[[Record], list[str]],
) -> None:
    """Print the records as a table, those of one heading together, and below it what is suspect or missing.

    Of a candidate that was refused, one record stands for all its passes.
    """
    stamp = session.stamp
    title = f"{stamp['device']}, {stamp['threads']} threads, torch {stamp['torch']}, triton {stamp['triton']}"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for number, head in enumerate(columns):
        table.add_column(head, justify="right" if number else "left", no_wrap=number == 0)
    shown: tuple[str, str] = ("", "")
    remarks: dict[str, list[str]] = {}
    for record in session.records:
        where, name = heading(record), record.config["candidate"]
        if where != shown[0]:
            table.add_section()
            table.add_row(where, style="bold")
        if record.status == "ok" or shown != (where, name):
            table.add_row(f"  {name}", *cells(record), style=None if record.status == "ok" else "dim")
        shown = (where, name)
        for flag in record.flags:
            if not flag.startswith("noisy") and not flag.endswith("is not installed"):  # which the table shows
                remarks.setdefault(f"{name}: {flag}", []).append(where)
    out = console.console()
    out.print(table)
    for flag, places in remarks.items():
        shapes = list(dict.fromkeys(places))
        out.print(f"{flag} ({'; '.join(shapes) if len(shapes) <= 3 else f'{len(shapes)} shapes'})", markup=False)
