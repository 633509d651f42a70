"""The runner of all benchmarks of kernels: options, the machine, turns of the candidates, records, the table."""

import ctypes
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import click
import torch

from benchmarks.harness import WrongResultError, ratios, summarise, suspicions
from benchmarks.lib.contest import OURS, SAMPLE_MS, Contest, Entry, Stopwatch, format_ms
from benchmarks.lib.kernel import DtypeName, Kernel
from benchmarks.lib.options import DeviceOptions, Recorder
from benchmarks.lib.sheets import Sheet
from benchmarks.lib.workload import measure_once
from benchmarks.records import Record
from cs336_systems.cost import Hardware
from cs336_systems.errors import UserError
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_seconds, setting
from cs336_systems.host.machine import environment, usable_memory
from cs336_systems.model.precision import set_matmul_precision

ONE_CANDIDATE = "Only this candidate; may be repeated.  [default: all]"
INTERPRETER = "not timed on a CPU, where Triton has an interpreter only, in which tests/kernels check it"
UNTIMED = 4  # calls before the first sample: the gate, a look at memory, what launching takes, how long a call is
FEWEST_ROUNDS = 3  # unless --rounds asks for fewer
LATENCY_MS = 1.0  # of a call, that a larger shape does not lengthen

Work = Sequence[tuple[Kernel, Any]]  # kernels with their tasks, in the order in which they are timed


@dataclass(frozen=True)
class KernelSettings(DeviceOptions):
    """Options of a benchmark of kernels."""

    dtype: DtypeName | None = setting(None, "Dtype of the inputs.  [default: each shape's own]")
    candidate: tuple[str, ...] = setting((), ONE_CANDIDATE)
    rounds: int | None = setting(
        None, "Turns of each candidate.  [default: as the write-up needs]", type=click.IntRange(2)
    )
    patience: float = setting(
        20.0, "Seconds that one shape may take; candidates too slow for it are left out.", type=click.FloatRange(0)
    )
    budget: float | None = setting(None, "Seconds after which no further shape is measured.", type=click.FloatRange(0))

    def chosen(self, known: Iterable[str]) -> list[str]:
        """The candidates that were asked for."""
        return [name for name in known if name in self.candidate or not self.candidate]

    def left_out(self, device: torch.device) -> dict[str, str]:
        """Candidates that are not timed here, with the reason for each."""
        ours = {OURS: INTERPRETER} if device.type == "cpu" else {}
        return ours | ({"compiled": "left out of smoke runs, which it would make long"} if self.smoke else {})


def keep_pages(device: torch.device) -> dict[str, bool]:
    """Let glibc keep freed memory, so that a CPU's kernel is not timed with Linux zeroing fresh pages for its outputs.

    Returns what to add to the records' environment: nothing on a GPU, or where there is no glibc.
    """
    if device.type != "cpu" or sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return {}
    m_trim_threshold, m_mmap_max = -1, -4
    return {"pages_kept": bool(libc.mallopt(m_mmap_max, 0) and libc.mallopt(m_trim_threshold, 2**31 - 1))}


class Session:
    """One command: its settings and machine, its records so far, and its remarks and faults for the end."""

    def __init__(self, benchmark: str, settings: KernelSettings, recorder: Recorder, device: torch.device) -> None:
        self.benchmark, self.settings, self.recorder, self.device = benchmark, settings, recorder, device
        self.stamp = environment(device, settings.commit) | keep_pages(device)
        self.clock, self.usable = Stopwatch(device), usable_memory(device)
        self.slowness: dict[tuple[str, str, str], float] = {}  # a candidate's last time over its prediction
        self.notes: dict[str, list[str]] = {}  # shapes by the remark below the table that applies to them
        self.faults: list[str] = []

    def hardware(self, dtype: DtypeName) -> Hardware:
        """This machine's ceilings, measured once."""
        return measure_once(self.device, dtype, 0.02 if self.settings.smoke else 0.3)

    def names(self, kernel: Kernel) -> list[str]:
        """The kernel's candidates that are wanted and that run on this device."""
        left_out = self.settings.left_out(self.device)
        return [name for name in self.settings.chosen(kernel.candidates) if name not in left_out]

    def predict(self, kernel: Kernel, task: Any, name: str, what: str) -> dict[str, Any]:
        """Time and peak memory under the names of the metrics, and what the time is made of: products at the rate of
        the largest that was measured, and bytes at the rate of a large copy. A floor of products moves no bytes."""
        flops = kernel.flops(task, what)
        moved = 0 if flops and name == kernel.floor else kernel.moved(task, self.device)
        predicted: dict[str, Any] = {"median_ms": 0.0}
        for unit, amount, rate, value in (
            ("flops", flops, "peak_flops_per_s", lambda: self.hardware(task.dtype).matmul_flops),
            ("bytes", moved, "bandwidth_bytes_per_s", lambda: self.hardware("fp32").bandwidth),
        ):
            if amount:
                predicted |= {unit: amount, rate: (per_second := value())}
                predicted["median_ms"] += 1e3 * amount / per_second
        if name != kernel.floor and kernel.predicts_peak:
            predicted["peak_memory_bytes"] = kernel.peak_bytes(name, task)
        return predicted

    def seconds_of(self, kernel: Kernel, task: Any, name: str = "") -> float:
        """Expected seconds of a candidate's call of all passes: as predicted for the lower bound, or for one without,
        times as long as the candidate's last shape took over its prediction."""
        predicted = self.predict(kernel, task, kernel.floor, kernel.passes(task)[-1])["median_ms"] / 1e3
        return float(predicted * self.slowness.get((name, kernel.name, task.dtype), 1.0))

    def compare(self, kernel: Kernel, task: Any) -> None:
        """Gate, time and record every candidate on one shape."""
        contest, inputs = Contest(self.clock, self.faults), cache(partial(kernel.inputs, task, self.device))
        a_round, patience = 0.0, self.settings.patience
        for name in self.names(kernel):
            expected = self.seconds_of(kernel, task, name)
            if (need := kernel.bytes_needed(name, task)) > self.usable:
                reason = f"needs {format_bytes(need)}, {format_bytes(self.usable)} usable"
                contest.refusals[name] = "out-of-memory", reason
            elif (UNTIMED + FEWEST_ROUNDS) * expected > patience:
                objection = f"{task}, about {format_ms(1e3 * expected)} a call"
                self.notes.setdefault(f"{name} left out, too slow for --patience", []).append(objection)
            else:
                contest.enter(name, lambda: kernel.prepare(self.clock, name, task, inputs()))  # noqa: B023
                a_round += max(expected, SAMPLE_MS / 1e3)
        if contest.entries:
            if kernel.floor:
                whole = kernel.passes(task)[-1]
                contest.enter(kernel.floor, lambda: Entry({whole: kernel.make_floor(task, self.device)}))
            wanted = self.settings.rounds or kernel.rounds
            contest.play(min(wanted, max(FEWEST_ROUNDS, int(patience / a_round))))
        for name in filter(None, dict.fromkeys((*kernel.candidates, kernel.floor))):
            for what in kernel.passes(task):
                if name in contest.entries or name in contest.refusals:
                    self.recorder.keep(self.record(contest, kernel, task, name, what))

    def record(self, contest: Contest, kernel: Kernel, task: Any, name: str, what: str) -> Record:
        """The record of a candidate that took its turns, or has no speed."""
        predicted = self.predict(kernel, task, name, what)
        blank = Record(self.benchmark, kernel.config(name, task, what), self.stamp, predicted=predicted)
        if name in contest.refusals:
            status, reason = contest.refusals[name]
            return replace(blank, flags=[reason], status=status)
        entry = contest.entries[name]
        samples, metrics = entry.samples[what], dict[str, Any]()
        metrics |= summarise(samples) | entry.metrics | {"calls": entry.calls}
        if what == kernel.passes(task)[-1]:
            slowness = (metrics["median_ms"] - LATENCY_MS) / predicted["median_ms"]
            self.slowness[name, kernel.name, task.dtype] = max(1.0, slowness)
        for unit in ("flops", "bytes"):
            if unit in predicted:
                metrics |= {unit: predicted[unit], f"{unit}_per_s": 1e3 * predicted[unit] / metrics["median_ms"]}
        if "flops" in predicted:
            metrics["mfu"] = metrics["flops_per_s"] / predicted["peak_flops_per_s"]
        if name != kernel.floor:
            metrics |= contest.against_others(name, what, ignored=kernel.floor)
            if kernel.floor in contest.entries:
                floors = contest.entries[kernel.floor].samples[what]
                metrics["floor"] = kernel.floor
                for ratio, pair in (("floor_ratio", (samples, floors)), (kernel.fraction, (floors, samples))):
                    metrics |= {key.replace("ratio", ratio): value for key, value in ratios(*pair).items()}
        hardware = self.hardware(task.dtype if "flops" in predicted else "fp32")
        flags = suspicions(metrics, predicted.get("flops", 0.0), predicted.get("bytes", 0.0), hardware)
        return replace(blank, samples_ms=samples, metrics=metrics, flags=flags)

    def take_turns(self, work: Work) -> None:
        """Compare the candidates shape by shape while the budget lasts."""
        settings, begun, expected = self.settings, time.monotonic(), 0.0
        for kernel, task in work:
            calls = ((settings.rounds or kernel.rounds) + UNTIMED) * (len(self.names(kernel)) + 1)
            expected += min(settings.patience, calls * self.seconds_of(kernel, task))
        with console.progress(self.benchmark, len(work), expected) as advance:
            for kernel, task in work:
                if settings.budget is not None and time.monotonic() - begun >= settings.budget:
                    reason = f"not begun: the budget of {format_seconds(settings.budget)} is used up"
                    self.notes.setdefault(reason, []).append(str(task))
                    continue
                self.compare(kernel, task)
                advance(str(task))


def run_kernels(benchmark: str, settings: KernelSettings, work: Work, sheet: Sheet, remark: str = "") -> None:
    """Let the candidates for each shape take turns while the budget lasts, and print and record the results; `remark`
    tells what is different on a CPU.

    Raises WrongResultError in the end if a result was wrong, and UserError if there is nothing to measure.
    """
    device = settings.on
    kernels, out = dict.fromkeys(kernel for kernel, _ in work), settings.left_out(device)
    names = dict.fromkeys(name for kernel in kernels for name in settings.chosen(kernel.candidates))
    if names.keys() <= out.keys():
        absent = f"{', '.join(settings.candidate)} is no candidate for {', '.join(kernel.name for kernel in kernels)}"
        reasons = "; ".join(f"{name} is {out[name]}" for name in names)
        raise UserError(f"nothing to measure: {reasons or absent}")
    if device.type == "cpu":
        for line in filter(None, (remark, f"{OURS}: {INTERPRETER}" if OURS in names else "")):
            print(line)
    set_matmul_precision(device, "fp32")
    session = Session(benchmark, settings, settings.recorder(benchmark, device), device)
    try:
        session.take_turns(work)
    finally:
        if session.recorder.records:
            sheet.show(session.recorder.records)
        for reason, where in session.notes.items():
            console.console().print(f"{reason}: {'; '.join(where)}", markup=False)
    session.recorder.tell()
    if session.faults:
        raise WrongResultError("; ".join(dict.fromkeys(session.faults)))
