"""Times of fused kernels beside a copy, or beside matrix products alone: `python -m benchmarks.fused`."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import click
import torch

from benchmarks.harness import WrongResultError, ratios, summarise, suspicions
from benchmarks.lib.contest import OURS, Contest, Refusal, format_ms, refuse
from benchmarks.lib.fused_candidates import KERNELS, prepare, prepare_floor
from benchmarks.lib.fused_rows import FusedTask
from benchmarks.lib.kernel_run import (
    KernelSettings,
    Session,
    check_interpreted,
    hold_contests,
    open_session,
    show_table,
    time_cells,
)
from benchmarks.lib.norm_candidates import BOTH
from benchmarks.records import Record
from cs336_systems.host import console
from cs336_systems.host.console import format_bytes, format_count, setting
from cs336_systems.host.machine import choose_device

ROUNDS = 15
COLUMNS = (
    "sizes, pass", "median", "predicted", "rate", "of floor", "/ best other", "host", "peak", "predicted",
)  # fmt: skip
CAPTION = (
    "of floor: the time of the floor, in turn with the candidates, over the candidate's. The floor is a copy of as many"
    " bytes, for cross-entropy (tokens x d_model x vocab) the matrix products alone, of which 80% are the goal. "
    "rate: counts no more than what the floor does, bytes or FLOPs. adamw (layers x d_model x vocab of a GPT-2): one "
    "step of all its parameters. predicted: FLOPs / the rate of the largest product "
    "+ bytes / the rate of a large copy. / best other: time over the fastest other's. host: for how long a call keeps "
    "it busy. predicted peak: inputs, results, gradients, state, and logits as far as they are kept"
)
KERNEL_NAMES = click.Choice(list(KERNELS))


@dataclass(frozen=True)
class FusedSettings(KernelSettings):
    """Options of the command line, one field each."""

    kernel: tuple[str, ...] = setting((), "Only this kernel; may be repeated.  [default: all]", type=KERNEL_NAMES)

    def kernels(self) -> list[str]:
        """The kernels that were asked for."""
        return [name for name in KERNELS if name in (self.kernel or KERNELS)]

    def tasks(self, device: torch.device) -> list[FusedTask]:
        """Measurements in order: all kernels' first shapes, then the second ones, in case the budget ends."""
        columns = []
        for name in self.kernels():
            kernel, dtype = KERNELS[name], self.dtype or KERNELS[name].dtypes[0]
            sizes = kernel.cpu_sizes if device.type == "cpu" else kernel.sizes
            passes = [what for what in kernel.passes if dtype in kernel.dtypes and self.wants(what)]
            shapes = [kernel.tiny] if self.smoke else sizes
            columns.append([[FusedTask(name, shape, dtype, what) for what in passes] for shape in shapes])
        return [task for row in zip_longest(*columns, fillvalue=[]) for tasks in row for task in tasks]

    def why_idle(self, device: torch.device) -> str:
        """Return the reason why there is nothing to measure, empty if there is something."""
        kernels, names = list(dict.fromkeys(task.kernel for task in self.tasks(device))), self.kernels()
        if not kernels:
            dtypes = {name: (None, *KERNELS[name].dtypes) for name in names}
            return "; ".join(
                f"{name} has no forward pass"
                if self.dtype in dtypes[name]
                else f"{name} is not measured in {self.dtype}"
                for name in names
            )
        present = chain.from_iterable(KERNELS[name].candidates for name in kernels)
        return self.idle(all_candidates(), device, present, absent=f"no candidate for {', '.join(kernels)}")


def predict(session: Session, task: FusedTask, name: str) -> dict[str, Any]:
    """Time and peak memory under the names of the metrics, and what the time is made of."""
    kernel, hardware = KERNELS[task.kernel], session.hardware(task.dtype)
    flops, moved = kernel.flops(task), kernel.moved(task, session.device)
    if flops and name == kernel.floor:
        moved = 0  # products alone
    predicted = {"median_ms": 1e3 * (flops / hardware.matmul_flops + moved / hardware.bandwidth)}
    predicted |= {"flops": flops, "bytes": moved, "peak_flops_per_s": hardware.matmul_flops}
    predicted |= {"bandwidth_bytes_per_s": hardware.bandwidth}
    formula = {"formula": "flops / peak_flops_per_s + bytes / bandwidth_bytes_per_s"}
    return predicted | formula | ({} if name == kernel.floor else {"peak_memory_bytes": kernel.peak_bytes(name, task)})


def memory_needed(task: FusedTask, name: str) -> int:
    """Bytes that have to be free for a candidate to take part."""
    kernel = KERNELS[task.kernel]
    return max(kernel.peak_bytes(name, task), kernel.gate_bytes(task)) + kernel.other_bytes(task)


def hold(session: Session, task: FusedTask) -> None:
    """Gate, time and record every candidate on one shape."""
    kernel, contest, playing, inputs = KERNELS[task.kernel], Contest(session.clock), [], None
    seconds = predict(session, task, kernel.floor)["median_ms"] / 1e3
    for name in names_for(session, task):
        if objection := session.patience.objection(key(name, task), seconds):
            session.note(f"{name} left out, too slow for --patience", f"{task}, {objection}")
        elif (need := memory_needed(task, name)) > session.usable:
            reason = f"needs {format_bytes(need)}, {format_bytes(session.usable)} usable"
            contest.refusals[name] = Refusal("out-of-memory", reason)
        else:
            try:
                inputs = inputs or kernel.inputs(task, session.device)
            except RuntimeError as error:
                contest.refusals[name] = refuse(name, error)
                continue
            contest.enter(name, partial(prepare, session.clock, name, task, inputs))
            playing.append(key(name, task))
    if contest.entries:
        contest.enter(kernel.floor, partial(prepare_floor, session.clock, task))
        contest.play(session.patience.rounds(playing, seconds, session.settings.rounds or ROUNDS))
    for name in (*kernel.candidates, kernel.floor):
        if name in contest.entries:
            session.recorder.keep(measured(session, contest, name, task))
        elif name in contest.refusals:
            session.refused(name, contest.refusals[name], configure(name, task), predict(session, task, name))


def key(name: str, task: FusedTask) -> str:
    """Name under which `Patience` remembers how slow a candidate is."""
    return f"{name} {task.kernel} {task.what} {task.dtype}"


def configure(name: str, task: FusedTask) -> dict[str, Any]:
    """Settings that identify a measurement."""
    sizes = dict(zip(KERNELS[task.kernel].sizes_are, task.sizes, strict=True))
    return {"kernel": task.kernel, "candidate": name, "pass": task.what} | sizes | {"dtype": task.dtype}


def measured(session: Session, contest: Contest, name: str, task: FusedTask) -> Record:
    """The record of a candidate that took its turns."""
    entry, floor, predicted = contest.entries[name], KERNELS[task.kernel].floor, predict(session, task, name)
    samples, hardware = entry.samples[task.what], session.hardware(task.dtype)
    metrics: dict[str, Any] = summarise(samples) | entry.metrics
    session.patience.learn(key(name, task), predicted["median_ms"] / 1e3, metrics["median_ms"] / 1e3)
    for what in ("flops", "bytes"):
        metrics |= {what: predicted[what], f"{what}_per_s": 1e3 * predicted[what] / metrics["median_ms"]}
    metrics["calls"] = entry.calls
    if name != floor:
        metrics |= {"gate_error": entry.gate_error, "floor": floor}
        metrics |= contest.against_others(name, task.what, ignored=[floor])
        if floor in contest.entries:
            floors = contest.entries[floor].samples[task.what]
            for what, pair in (("floor_ratio", (samples, floors)), ("floor_fraction", (floors, samples))):
                metrics |= {each.replace("ratio", what): value for each, value in ratios(*pair).items()}
    flags = suspicions(metrics, predicted["flops"], predicted["bytes"], hardware)
    return Record(session.benchmark, configure(name, task), session.stamp, samples, metrics, predicted, flags)


def names_for(session: Session, task: FusedTask) -> list[str]:
    """The kernel's candidates that are wanted and that run on this device."""
    wanted = session.settings.timed(all_candidates(), session.device)
    return [name for name in KERNELS[task.kernel].candidates if name in wanted]


def all_candidates() -> list[str]:
    """Names of the candidates of all kernels."""
    return list(dict.fromkeys(chain.from_iterable(kernel.candidates for kernel in KERNELS.values())))


def gate_ours(session: Session, tasks: list[FusedTask]) -> str:
    """Check our kernels on tiny shapes; returns those that passed. Failures are added to the session's faults."""
    errors: dict[str, float] = {}
    for task in dict.fromkeys(replace(task, sizes=KERNELS[task.kernel].interpreted) for task in tasks):
        kernel = KERNELS[task.kernel]
        function, inputs = kernel.candidates[OURS](session.device), kernel.inputs(task, session.device)
        try:
            errors[task.kernel] = max(errors.get(task.kernel, 0.0), kernel.gate(OURS, function, task, inputs))
        except WrongResultError as wrong:
            session.faults.append(f"{task.kernel}: {wrong}")
    return f"in {', '.join(f'{name} within {error:.1e}' for name, error in errors.items()) or 'nothing'}"


def cells(record: Record) -> list[str]:
    """One record as cells of the table."""
    metrics, times = record.metrics, time_cells(record)
    planned = format_bytes(record.predicted["peak_memory_bytes"]) if "peak_memory_bytes" in record.predicted else ""
    if record.status != "ok":
        return [*times, "", "", "", "", "", planned]
    rate, unit = (metrics["flops_per_s"], "FLOP/s") if metrics["flops"] else (metrics["bytes_per_s"], "B/s")
    floor = f"{metrics['floor_fraction_median']:.0%}" if "floor_fraction_median" in metrics else ""
    other = f"{metrics['ratio_median']:.2f}" if "ratio_median" in metrics else ""
    host = format_ms(metrics["host_us"] / 1e3) if "host_us" in metrics else ""
    peak = format_bytes(metrics["peak_memory_bytes"]) if metrics.get("peak_memory_bytes") is not None else ""
    return [*times, f"{format_count(rate)}{unit}", floor, other, host, peak, planned]


def heading(record: Record) -> str:
    """The kernel, the shape and the pass of a record."""
    config = record.config
    sizes = " x ".join(str(config[name]) for name in KERNELS[config["kernel"]].sizes_are)
    return f"{config['kernel']} {sizes} {config['dtype']}, {config['pass'].replace(BOTH, 'both')}"


def show(session: Session) -> None:
    """The table of what was measured, predictions beside it, and below it what is suspect or missing."""
    dtypes = dict.fromkeys(record.config["dtype"] for record in session.records)
    rates = [f"{dtype} {format_count(session.hardware(dtype).matmul_flops)}FLOP/s" for dtype in dtypes]
    ceilings = f"Largest products: {', '.join(rates)}; a large copy moves "
    ceilings += f"{format_count(session.hardware(next(iter(dtypes))).bandwidth)}B/s."
    if session.device.type == "cpu":
        ceilings += " On a CPU, all but the floor also wait for the system to hand out fresh memory."
    show_table(session, COLUMNS, f"{CAPTION}\n{ceilings}", heading, cells)


def run(settings: FusedSettings) -> list[Record]:
    """Measure, print and, unless it is a smoke run, record. Raises UserError for what cannot be run."""
    if settings.smoke:
        settings = replace(settings, rounds=2)
    device = choose_device(settings.device)
    session, tasks = open_session("fused", settings, settings.why_idle(device)), settings.tasks(device)
    if tasks and device.type == "cpu":
        check_interpreted(session, all_candidates(), partial(gate_ours, session, tasks))
        if not settings.smoke:
            print("on a CPU shapes are scaled down to what it computes in a moment")
    calls = (settings.rounds or ROUNDS) + 6
    each = [
        predict(session, task, KERNELS[task.kernel].floor)["median_ms"]
        / 1e3
        * calls
        * (len(names_for(session, task)) + 1)
        for task in tasks
    ]
    hold_contests(session, tasks, sum(each), hold, show)
    return session.records


@click.command()
@console.options(FusedSettings)
def main(**settings: Any) -> None:
    """Time fused kernels, the unfused code, and a lower bound (a copy, or the matrix products), beside predictions."""
    run(FusedSettings(**settings))


if __name__ == "__main__":
    sys.exit(console.run_command(main))
