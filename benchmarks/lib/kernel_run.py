"""The runner of all benchmarks of kernels: options, the machine, turns of the candidates, records, the table."""

import ctypes
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import click
import torch

from benchmarks.harness import WrongResultError, ratios, summarise, suspicions
from benchmarks.lib.contest import OURS, UNTIMED, Contest, Entry, Patience, Refusal, Stopwatch, UnavailableError, refuse
from benchmarks.lib.kernel import DtypeName, Kernel, Task
from benchmarks.lib.kernel_sheet import Sheet, show
from benchmarks.lib.options import Recorder, RecordOptions
from benchmarks.lib.plan import measure_once
from benchmarks.records import Record
from cs336_systems.cost import Hardware
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_seconds, setting
from cs336_systems.host.machine import choose_device, environment, usable_memory
from cs336_systems.host.text import printable
from cs336_systems.model.precision import set_matmul_precision
from kernels.launch import INTERPRETED

INTERPRETER = "not timed on a CPU, where Triton has an interpreter only"

Work = Sequence[tuple[Kernel[Any], Any]]  # kernels with their tasks, in the order in which they are timed


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
    known: list[str]  # candidates of all kernels of the benchmark
    notes: dict[str, list[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def hardware(self, dtype: DtypeName) -> Hardware:
        """This machine's ceilings, measured once."""
        return measure_once(self.device, dtype, 0.02 if self.settings.smoke else 0.3)

    def names(self, kernel: Kernel[Any]) -> list[str]:
        """The kernel's candidates that are wanted and that run on this device."""
        wanted = self.settings.timed(self.known, self.device)
        return [name for name in kernel.candidates if name in wanted]

    def note(self, reason: str, where: str) -> None:
        """Add a remark for below the table, with the shapes to which it applies."""
        self.notes.setdefault(reason, []).append(where)


def keep_pages(device: torch.device) -> dict[str, bool]:
    """Let glibc keep freed memory, so that a CPU's kernel is not timed with Linux zeroing fresh pages for its outputs.

    Returns what to add to the records' environment: nothing on a GPU, or where there is no glibc.
    """
    if device.type != "cpu" or sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return {}
    m_trim_threshold, m_mmap_max = -1, -4
    return {"pages_kept": bool(libc.mallopt(m_mmap_max, 0) and libc.mallopt(m_trim_threshold, 2**31 - 1))}


def predict(session: Session, kernel: Kernel[Any], task: Task, name: str, what: str) -> dict[str, Any]:
    """Time and peak memory under the names of the metrics, and what the time is made of: products at the rate of the
    largest that was measured, and bytes at the rate of a large copy. A floor of products moves no bytes."""
    flops = kernel.flops(task, what)
    moved = 0 if flops and name == kernel.floor else kernel.moved(task, session.device)
    predicted, seconds, terms = dict[str, Any](), 0.0, []
    for unit, amount, rate, value in (
        ("flops", flops, "peak_flops_per_s", lambda: session.hardware(task.dtype).matmul_flops),
        ("bytes", moved, "bandwidth_bytes_per_s", lambda: session.hardware("fp32").bandwidth),
    ):
        if amount:
            predicted |= {unit: amount, rate: (per_second := value())}
            seconds += amount / per_second
            terms.append(f"{unit} / {rate}")
    predicted = {"median_ms": 1e3 * seconds} | predicted | {"formula": " + ".join(terms)}
    peak = None if name == kernel.floor else kernel.peak_bytes(name, task)
    return predicted if peak is None else predicted | {"peak_memory_bytes": peak}


def seconds_of(session: Session, kernel: Kernel[Any], task: Task) -> float:
    """The predicted seconds of one call of all passes, of the floor if there is one."""
    return float(predict(session, kernel, task, kernel.floor, kernel.passes(task)[-1])["median_ms"]) / 1e3


def pace(name: str, kernel: Kernel[Any], task: Task) -> str:
    """Name under which `Patience` remembers how slow a candidate is."""
    return f"{name} {kernel.name} {task.dtype}"


def compare(session: Session, kernel: Kernel[Any], task: Task) -> None:
    """Gate, time and record every candidate on one shape."""
    contest, playing, inputs = Contest(session.clock), [], None
    seconds = seconds_of(session, kernel, task)
    for name in session.names(kernel):
        if (need := kernel.bytes_needed(name, task)) > session.usable:
            reason = f"needs {format_bytes(need)}, {format_bytes(session.usable)} usable"
            contest.refusals[name] = Refusal("out-of-memory", reason)
        elif objection := session.patience.objection(pace(name, kernel, task), seconds):
            session.note(f"{name} left out, too slow for --patience", f"{task}, {objection}")
        else:
            try:
                inputs = inputs or kernel.inputs(task, session.device)
            except RuntimeError as error:
                contest.refusals[name] = refuse(name, error)
                continue
            contest.enter(name, partial(kernel.prepare, session.clock, name, task, inputs))
            playing.append(pace(name, kernel, task))
    if contest.entries:
        if kernel.floor:
            whole, make = kernel.passes(task)[-1], partial(kernel.make_floor, task, session.device)
            contest.enter(kernel.floor, lambda: Entry({whole: make()}, 0.0))
        contest.play(session.patience.rounds(playing, seconds, session.settings.rounds or kernel.rounds))
    for name in dict.fromkeys((*kernel.candidates, *filter(None, [kernel.floor]))):
        for what in filter(session.settings.wants, kernel.passes(task)):
            if name in contest.entries:
                session.recorder.keep(measured(session, contest, kernel, task, name, what))
            elif name in contest.refusals:
                session.recorder.keep(refused(session, contest.refusals[name], kernel, task, name, what))


def measured(session: Session, contest: Contest, kernel: Kernel[Any], task: Task, name: str, what: str) -> Record:
    """The record of a candidate that took its turns."""
    entry, predicted = contest.entries[name], predict(session, kernel, task, name, what)
    samples, whole = entry.samples[what], what == kernel.passes(task)[-1]
    metrics: dict[str, Any] = summarise(samples) | entry.metrics
    if whole:
        session.patience.learn(pace(name, kernel, task), predicted["median_ms"] / 1e3, metrics["median_ms"] / 1e3)
    for unit in ("flops", "bytes"):
        if unit in predicted:
            metrics |= {unit: predicted[unit], f"{unit}_per_s": 1e3 * predicted[unit] / metrics["median_ms"]}
    if "flops" in predicted:
        metrics["mfu"] = metrics["flops_per_s"] / predicted["peak_flops_per_s"]
    metrics["calls"] = entry.calls
    if name != kernel.floor:
        metrics |= {"gate_error": entry.gate_error} | contest.against_others(name, what, ignored=[kernel.floor])
        if kernel.floor in contest.entries:
            floors = contest.entries[kernel.floor].samples[what]
            metrics["floor"] = kernel.floor
            for ratio, pair in (("floor_ratio", (samples, floors)), (kernel.fraction, (floors, samples))):
                metrics |= {key.replace("ratio", ratio): value for key, value in ratios(*pair).items()}
    if whole:
        metrics |= kernel.published(task)
    hardware = session.hardware(task.dtype if "flops" in predicted else "fp32")
    flags = suspicions(metrics, predicted.get("flops", 0.0), predicted.get("bytes", 0.0), hardware)
    config = kernel.config(name, task, what)
    return Record(session.benchmark, config, session.stamp, samples, metrics, predicted, flags)


def refused(session: Session, refusal: Refusal, kernel: Kernel[Any], task: Task, name: str, what: str) -> Record:
    """The record of a candidate without a speed."""
    if refusal.fault:
        session.faults.append(refusal.reason if "wrong" in refusal.reason else f"{name}: {refusal.reason}")
    config, predicted = kernel.config(name, task, what), predict(session, kernel, task, name, what)
    return Record(session.benchmark, config, session.stamp, [], {}, predicted, [refusal.reason], refusal.status)


def check_interpreted(session: Session, work: Work) -> None:
    """On a CPU, check our kernels on small shapes, and print the errors.

    A wrong result is added to the session's faults.
    """
    if OURS not in session.settings.chosen(session.known):
        return
    said, passed, shapes = [f"{OURS}: {INTERPRETER}"], dict[str, float](), dict[str, dict[str, None]]()
    few = dict.fromkeys((kernel, kernel.few(task)) for kernel, task in work if OURS in kernel.candidates)
    for kernel, task in few if INTERPRETED else ():
        try:
            function = kernel.candidates[OURS](task, session.device)
            error = kernel.gate(OURS, function, task, kernel.inputs(task, session.device))
            passed[kernel.name] = max(error, passed.get(kernel.name, 0.0))
            shapes.setdefault(kernel.name, {})[task.shape] = None
        except UnavailableError as reason:
            said.append(f"not checked: {reason}")
        except WrongResultError as wrong:
            session.faults.append(f"{kernel.name}: {wrong}")
    found = (f"{name} within {error:.1e} ({', '.join(shapes[name])})" for name, error in passed.items())
    said += [f"gate: equals float64, {', '.join(found)}"] if passed else []
    said += [] if INTERPRETED else ["not checked, because TRITON_INTERPRET=1 is not set"]
    print(printable("; ".join(dict.fromkeys(said))))


def raise_faults(session: Session) -> None:
    """Raises WrongResultError if a result was wrong."""
    if session.faults:
        raise WrongResultError("; ".join(dict.fromkeys(session.faults)))


def run_kernels(
    benchmark: str, settings: KernelSettings, known: Iterable[str], work: Work, sheet: Sheet, idle: str, remark: str
) -> list[Record]:
    """Let the candidates for each shape take turns while the budget lasts, and print and record the results; `idle`
    says why there is nothing to measure, `remark` what is different on a CPU.

    Raises WrongResultError in the end if a result was wrong, and UserError if there is nothing to measure.
    """
    device = choose_device(settings.device)
    set_matmul_precision(device, "fp32")
    recorder = Recorder(None) if idle else settings.recorder(benchmark, device)
    stamp, patience = environment(device, settings.commit) | keep_pages(device), Patience(settings.patience)
    session = Session(
        benchmark, settings, device, Stopwatch(device), patience, usable_memory(device), stamp, recorder, list(known)
    )
    if work and device.type == "cpu":
        check_interpreted(session, work)
        print(remark, end="\n" if remark else "")
    if idle:
        raise_faults(session)
        raise UserError(f"nothing to measure: {idle}")
    take_turns(session, work, sheet)
    session.recorder.tell()
    raise_faults(session)
    return session.recorder.records


def take_turns(session: Session, work: Work, sheet: Sheet) -> None:
    """Compare the candidates shape by shape while the budget lasts, and print the results."""
    settings = session.settings
    calls = [(settings.rounds or kernel.rounds) + UNTIMED for kernel, _ in work]
    each = [
        min(settings.patience, count * (len(session.names(kernel)) + 1) * seconds_of(session, kernel, task))
        for count, (kernel, task) in zip(calls, work, strict=True)
    ]
    begun = time.monotonic()
    try:
        with console.progress(session.benchmark, len(work), sum(each)) as advance:
            for kernel, task in work:
                if settings.budget is not None and time.monotonic() - begun >= settings.budget:
                    session.note(f"not begun: the budget of {format_seconds(settings.budget)} is used up", str(task))
                    continue
                compare(session, kernel, task)
                advance(str(task))
    finally:
        if session.recorder.records:
            show(session.recorder.records, sheet)
        for reason, where in session.notes.items():
            console.console().print(f"{reason}: {'; '.join(where)}", markup=False)
